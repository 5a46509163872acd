"""A failing call, or the end of the process, at every operation on files of every save: old or new is whole."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import distca_hf
from distca_hf import Pipeline, telemetry
from distca_hf.analysis.profiles.__main__ import write
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, find_profile
from distca_hf.analysis.report.run_folder import TraceIndex, read_folder
from distca_hf.analysis.report.run_report import write_page
from distca_hf.pipelines.stages import DividedModel, ModelPart, load_training, save_parts, save_training
from distca_hf.trace_file import TraceFile
from distca_hf.traces import RankTrace, file_name
from support.failing_files import ways_to_fail
from support.made_traces import made_trace, write_run
from support.models import tiny_model


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Failed to save"),
]
OLD, NEW = 1.0, 2.0
PIPELINE = Pipeline(2)


@dataclass(frozen=True)
class Save:
    """A save over an earlier one.

    Attributes:
        old: makes the earlier one.
        new: makes the save.
        read: returns what is there, as a reader has it.
    """

    old: Callable[[Path], object]
    new: Callable[[Path], object]
    read: Callable[[Path], object]


def parts_of(checkpoint: Path, value: float) -> list[ModelPart]:
    divided = DividedModel(checkpoint, PIPELINE)
    parts = [ModelPart(divided.read(number), (), number, PIPELINE, 16) for number in range(PIPELINE.num_parts)]
    for part in parts:
        for weight in part.parameters():
            weight.data.fill_(value)
    return parts


def single_file(checkpoint: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for weight in model.parameters():
        weight.data.fill_(OLD)
    model.save_pretrained(folder)


def weights_of(folder: Path) -> set[float]:
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return {float(value) for weight in model.parameters() for value in (weight.detach().min(), weight.detach().max())}


def training_of(folder: Path, training: tuple[list[ModelPart], torch.optim.Optimizer]) -> set[float]:
    """Weights of the training that is whole: under its name, or under one that the error of `load_training` says."""
    named = (path for path in (folder, Path(f"{folder}.unfinished"), Path(f"{folder}.earlier")))
    load_training(*training, next(path for path in named if (path / ".metadata").is_file()), distca_hf.DistCAPlugin())
    return {float(weight.detach().min()) for part in training[0] for weight in part.parameters()}


def traces_of(folder: Path) -> list[float]:
    """When the traces were written that a report reads."""
    index = TraceIndex.of([folder / file_name(0)])
    return [trace.written for step in index.steps for trace in index.traces_of(step)]


def trace(step: int, written: float = OLD) -> RankTrace:
    return replace(made_trace(0, 1, step, layers=1), written=written)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(implementation="sdpa", num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def saves(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Save]:
    plugin = distca_hf.DistCAPlugin()
    old, new = (parts_of(checkpoint, value) for value in (OLD, NEW))
    trainings = {
        value: (parts, torch.optim.SGD([weight for part in parts for weight in part.parameters()]))
        for value, parts in ((OLD, old), (NEW, new))
    }
    profiles = {
        value: replace(find_profile("h200"), made=replace(find_profile("h200").made, remarks=f"{value}"))
        for value in (OLD, NEW)
    }
    write_run(tmp_path / "run", ranks=1)
    report = replace(read_folder(tmp_path / "run"), steps=())
    file = TraceFile(str(tmp_path / "here"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "here" / "error.json"))

    def write_trace(folder: Path) -> None:
        file.write(0, trace(3, NEW))

    def begin_trace(folder: Path) -> None:
        TraceFile(str(folder)).write(0, trace(2, NEW))

    def old_traces(folder: Path) -> None:
        (folder / file_name(0)).write_text("".join(f"{trace(step).line()}\n" for step in (1, 2)))

    def traces_of_a_run(folder: Path) -> None:
        nonlocal file
        old_traces(folder)
        file = TraceFile(str(folder))
        file.write(0, trace(2))

    def page(value: float) -> Callable[[Path], object]:
        return lambda folder: write_page(replace(report, title=f"{value}"), folder / "report.html", named=True)

    def error(value: float) -> Callable[[Path], object]:
        return lambda folder: telemetry.leave_for_launcher(f"{value}")

    return {
        "parts over parts": Save(
            lambda folder: save_parts(old, folder, plugin), lambda folder: save_parts(new, folder, plugin), weights_of
        ),
        "parts over a single file": Save(
            lambda folder: single_file(checkpoint, folder), lambda folder: save_parts(new, folder, plugin), weights_of
        ),
        "training": Save(
            lambda folder: save_training(*trainings[OLD], folder / "saved", plugin),
            lambda folder: save_training(*trainings[NEW], folder / "saved", plugin),
            lambda folder: training_of(folder / "saved", trainings[OLD]),
        ),
        "traces of an earlier run": Save(old_traces, begin_trace, traces_of),
        "one more trace": Save(traces_of_a_run, write_trace, traces_of),
        "report": Save(page(OLD), page(NEW), lambda folder: (folder / "report.html").read_text()),
        "profile": Save(
            lambda folder: write(profiles[OLD], folder / "profile.json"),
            lambda folder: write(profiles[NEW], folder / "profile.json"),
            lambda folder: ClusterProfile.load(folder / "profile.json").made.remarks,
        ),
        "error for the launcher": Save(
            lambda folder: None,
            error(NEW),
            lambda folder: [path.read_text()[:40] for path in folder.glob("error.json")],
        ),
    }


NAMES = (
    *("parts over parts", "parts over a single file", "training", "traces of an earlier run", "one more trace"),
    *("report", "profile", "error for the launcher"),
)


@pytest.mark.parametrize("name", NAMES)
def test_old_or_new_is_whole_whatever_fails(name: str, saves: dict[str, Save], tmp_path: Path) -> None:
    save, folder, kept = saves[name], tmp_path / "here", tmp_path / "kept"
    folder.mkdir()
    save.old(folder)
    shutil.copytree(folder, kept)
    old = save.read(folder)
    save.new(folder)
    both = [old, save.read(folder)]

    def prepare() -> Path:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        if name == "one more trace":
            save.old(folder)
        for path in tmp_path.glob("here.*"):
            shutil.rmtree(path)
        return folder

    ways, states = 0, list[Any]()
    for way in ways_to_fail(prepare, lambda: save.new(folder)):
        found = save.read(folder)
        assert found in both, (way, sorted(os.listdir(folder)))
        ways, states = ways + 1, [*states, found]
    assert ways > 2
    assert old in states


# Saves whose names nobody has typed.
PREDICTABLE = [name for name in NAMES if name not in ("report", "profile")]


@pytest.mark.parametrize("name", PREDICTABLE)
def test_links_at_predictable_names_are_not_followed(name: str, saves: dict[str, Save], tmp_path: Path) -> None:
    """Somebody else has put them there: at every name that the save writes, or has written in earlier versions."""
    save, folder, victim = saves[name], tmp_path / "here", tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    save.old(folder)
    save.new(folder)
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    for place in [
        folder / other for one in names for other in (one, f"{one}.unfinished", one.with_suffix(".unfinished"))
    ]:
        shutil.rmtree(folder)
        folder.mkdir()
        save.old(folder)
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(victim)
        with suppress(Exception):  # of a folder that holds something else
            save.new(folder)
        assert victim.read_text() == "precious", place
