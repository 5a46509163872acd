"""Trainings of a pipeline in a folder: what is refused, and what stays; all parts in one process.

That they go on bit-equal is tested on ranks, in `tests/distributed/test_stages.py`."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

import distca_hf
from distca_hf import Pipeline
from distca_hf.errors import CheckpointError, ConfigError
from distca_hf.pipelines.stages import DividedModel, ModelPart, load_training, save_training
from support.models import tiny_model


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class Training:
    """All parts of a model and their optimizer. A step has gradients of ones."""

    parts: list[ModelPart]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(
        cls, checkpoint: Path, make: Callable[..., Any] = torch.optim.AdamW, chunks: int = 1, **dtype: torch.dtype
    ) -> "Training":
        pipeline = Pipeline(2, chunks)
        model = DividedModel(checkpoint, pipeline, **dtype)
        parts = [ModelPart(model.read(number), (), number, pipeline, 16) for number in range(pipeline.num_parts)]
        return cls(parts, make([weight for part in parts for weight in part.parameters()]))

    @property
    def weights(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for part in self.parts for name, weight in part.model.named_parameters()}

    def step(self, without: str = "none") -> None:
        for name, weight in self.weights.items():
            weight.grad = None if name.startswith(without) else torch.ones_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, **others: Any) -> None:
        save_training(self.parts, self.optimizer, folder, distca_hf.DistCAPlugin(), **others)

    def load(self, folder: Path, **others: Any) -> None:
        load_training(self.parts, self.optimizer, folder, distca_hf.DistCAPlugin(), **others)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(implementation="sdpa", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training after one step; tests do not write here."""
    training, folder = Training.of(checkpoint), tmp_path_factory.mktemp("trainings") / "saved"
    training.step()
    training.save(folder)
    return folder


@pytest.mark.parametrize("chunks", [1, 2])
def test_training_goes_on_bit_equal_in_other_parts(chunks: int, checkpoint: Path, tmp_path: Path) -> None:
    """Layers 1 and 2 get a gradient after saving, and the others had one before."""
    training, resumed = Training.of(checkpoint), Training.of(checkpoint, chunks=chunks)
    rates, resumed_rates = (MultiStepLR(of.optimizer, [1, 2]) for of in (training, resumed))
    training.step(without="model.layers.1")
    rates.step()

    training.save(tmp_path / "saved", rates=rates)
    resumed.load(tmp_path / "saved", rates=resumed_rates)

    for each, of_each in ((training, rates), (resumed, resumed_rates)):
        for _ in range(2):
            each.step()
            of_each.step()
    assert resumed_rates.state_dict() == rates.state_dict()
    assert all(torch.equal(weight, training.weights[name]) for name, weight in resumed.weights.items())
    for name, weight in resumed.weights.items():
        state, expected = resumed.optimizer.state[weight], training.optimizer.state[training.weights[name]]
        assert float(state["step"]) == (2 if name.startswith("model.layers.1") else 3)
        assert all(torch.equal(state[key], entry) for key, entry in expected.items())


def test_training_is_saved_before_its_first_step(checkpoint: Path, tmp_path: Path) -> None:
    training, resumed = Training.of(checkpoint), Training.of(checkpoint)

    training.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")

    for each in (training, resumed):
        assert not each.optimizer.state
        each.step()
        assert {float(state["step"]) for state in each.optimizer.state.values()} == {1.0}


def with_empty_groups(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Groups as on a stage that has none of the weights of two of them."""
    groups = {"params": []}, {"params": weights[::2], "lr": 0.1}, {"params": []}, {"params": weights[1::2]}
    return torch.optim.AdamW(groups)


def of_no_weights(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": []}])


@pytest.mark.parametrize("make", [with_empty_groups, of_no_weights])
def test_groups_without_weights_are_passed_over(make: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    training, resumed = Training.of(checkpoint, make), Training.of(checkpoint, make)
    training.step()
    expected = [group | {"params": len(group["params"])} for group in training.optimizer.param_groups]

    training.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")

    groups = [group | {"params": len(group["params"])} for group in resumed.optimizer.param_groups]
    assert groups == expected
    for each in (training, resumed):
        each.step()
    assert all(torch.equal(weight, training.weights[name]) for name, weight in resumed.weights.items())


def test_weights_of_several_groups_are_not_read_into_one(checkpoint: Path, tmp_path: Path) -> None:
    """Torch would take the settings of the first weight for all."""
    Training.of(checkpoint, with_empty_groups).save(tmp_path / "saved")

    with pytest.raises(ConfigError, match=r"^rank 0: group 0 of .* has \S+, .* lr 0\.1, and \S+, with 0\.001\. Begin"):
        Training.of(checkpoint).load(tmp_path / "saved")


def test_names_of_weights_in_an_optimizer_stay_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """Another stage has other weights in a group."""

    def named(weights: list[torch.nn.Parameter], *firsts: int) -> torch.optim.Optimizer:
        pairs = [(f"weight {number}", weight) for number, weight in enumerate(weights)]
        return torch.optim.AdamW([{"params": pairs[first :: len(firsts)]} for first in firsts])

    Training.of(checkpoint, lambda weights: named(weights, 0)).save(tmp_path / "saved")
    resumed = Training.of(checkpoint, lambda weights: named(weights, 0, 1))
    expected = [group["param_names"] for group in resumed.optimizer.param_groups]

    resumed.load(tmp_path / "saved")

    assert [group["param_names"] for group in resumed.optimizer.param_groups] == expected


def test_schedule_is_made_on_both_sides_or_on_none(checkpoint: Path, tmp_path: Path) -> None:
    """It adds a setting to each group of the optimizer."""
    scheduled, plain = Training.of(checkpoint), Training.of(checkpoint)
    MultiStepLR(scheduled.optimizer, [1])
    scheduled.save(tmp_path / "scheduled")
    plain.save(tmp_path / "plain")

    begins = r"another training: optimizer\.param_groups\.\S+\.initial_lr"
    remedy = r"\(and 38 more .* create it before"
    with pytest.raises(ConfigError, match=f"{begins} has no place here {remedy}"):
        plain.load(tmp_path / "scheduled")
    with pytest.raises(ConfigError, match=f"{begins} is missing {remedy}"):
        scheduled.load(tmp_path / "plain")


def test_states_on_the_gpu_of_another_rank_come_to_this_ones_device(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training.of(checkpoint, lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(0.5)))
    rates = MultiStepLR(training.optimizer, [1])
    with monkeypatch.context() as patched:
        patched.setattr("torch.serialization.location_tag", lambda storage: "cuda:3")
        training.save(tmp_path / "saved", rates=rates)

    training.load(tmp_path / "saved", rates=rates)

    assert [(float(rate), rate.device.type) for rate in rates.base_lrs] == [(0.5, "cpu")]


def sgd(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def amsgrad(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, amsgrad=True)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a wider model": (
        {"intermediate_size": 80},
        {},
        r".*\.0\.mlp\.gate_proj\.weight is \(64, 64\) in torch\.float32, and here \(80, 64\) in torch\.float32 \(and",
    ),
    "a deeper model": (
        {"num_hidden_layers": 5},
        {},
        r".*layers\.4\.\S+ is missing \(and \d+ more like it\)\. Resume with",
    ),
    "a flatter model": (
        {"num_hidden_layers": 3},
        {},
        r"it has 39 weights, and all stages together have 30\. Resume",
    ),
    "another dtype": (
        {},
        {"dtype": torch.bfloat16},
        r".* in torch\.float32, and here \(128, 64\) in torch\.bfloat16 \(and",
    ),
    "another optimizer": ({}, {"make": sgd}, r"optimizer\.param_groups\.\S+ is missing \(and"),
    "another setting": ({}, {"make": amsgrad}, r"optimizer\.state\.\S+\.max_exp_avg_sq is missing \(and 38 more"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_training_of_something_else_is_refused(kind: str, saved: Path, checkpoint: Path, tmp_path: Path) -> None:
    model, of_training, words = OTHERS[kind]
    if model:
        checkpoint = tmp_path
        tiny_model(implementation="sdpa", **{"num_hidden_layers": 4} | model).save_pretrained(checkpoint)
    training = Training.of(checkpoint, **of_training)
    before = {name: weight.detach().clone() for name, weight in training.weights.items()}

    with pytest.raises(ConfigError, match=f"^(rank 0: )?{re.escape(str(saved))} holds another training: {words}"):
        training.load(saved)

    assert all(torch.equal(weight, before[name]) for name, weight in training.weights.items())


def test_states_without_a_place_are_refused(saved: Path, checkpoint: Path) -> None:
    """Gradients are there already: torch then makes no room for the states of the optimizer."""
    training = Training.of(checkpoint)
    for weight in training.weights.values():
        weight.grad = torch.ones_like(weight)

    with pytest.raises(
        ConfigError, match=r"it has \d+ states and settings of an optimizer, and all stages .* first step"
    ):
        training.load(saved)


def test_other_states_are_missing_or_begin_anew(checkpoint: Path, tmp_path: Path, caplog: Any) -> None:
    training = Training.of(checkpoint)
    rates = MultiStepLR(training.optimizer, [1])
    training.save(tmp_path / "saved", rates=rates)

    with pytest.raises(ConfigError, match=r"others\.loader is missing\. Resume"):
        training.load(tmp_path / "saved", rates=rates, loader=rates)
    with caplog.at_level(logging.WARNING, "distca_hf"):
        training.load(tmp_path / "saved")

    assert "holds the state of 'rates', which load_training was not given: it begins anew" in caplog.text


def test_optimizer_of_foreign_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    training = Training.of(checkpoint)
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    with pytest.raises(
        ConfigError, match=r"rank 0: 1 of 40 weights of the optimizer .* first one of \(3,\); give all"
    ):
        training.save(tmp_path / "saved")

    assert not list(tmp_path.iterdir())


def test_folder_with_other_files_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    training = Training.of(checkpoint)
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "mine.earlier").mkdir()
    (tmp_path / "mine.earlier" / "notes").write_text("of another kind")

    with pytest.raises(ConfigError, match=r"mine\.earlier holds notes, and"):
        training.save(tmp_path / "mine")
    with pytest.raises(
        ConfigError,
        match=r"holds mine\.earlier \(and 1 more like it\), and save_training replaces .*; give an empty one$",
    ):
        training.save(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is a file, and save_training writes a folder"):
        training.save(tmp_path / "model.safetensors")

    assert (tmp_path / "model.safetensors").read_text() == "weights"


def test_folder_that_ranks_do_not_share_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine wrote, and nothing is here."""
    monkeypatch.setattr("distca_hf.pipelines.stages.saving.save", lambda *args, **kwargs: None)

    with pytest.raises(
        ConfigError, match=r"^1 of 1 ranks cannot see .*, first rank 0; give a folder that all ranks sh"
    ):
        Training.of(checkpoint).save(tmp_path / "saved")


def test_failed_save_leaves_the_earlier_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, training = tmp_path / "saved", Training.of(checkpoint)
    training.save(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(
            CheckpointError, match=r"saved, which is as it was before: rank 0: OSError: .*No space left"
        ):
            training.save(folder)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert (tmp_path / "saved.unfinished").is_dir()
    training.step()
    training.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} != files


def test_link_stays_a_link(checkpoint: Path, tmp_path: Path) -> None:
    training = Training.of(checkpoint)
    (tmp_path / "link").symlink_to(tmp_path / "large disk" / "run")

    for _ in range(2):
        training.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert [path.name for path in (tmp_path / "large disk").iterdir()] == ["run"]
    training.load(tmp_path / "link")


@pytest.mark.parametrize("renamed", ["saved", "saved.unfinished"])
def test_training_that_cannot_be_renamed_is_kept(
    renamed: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, training, rename = tmp_path / "saved", Training.of(checkpoint), Path.rename
    training.save(folder)

    def busy(path: Path, to: Path) -> Path:
        if path.name == renamed:
            raise OSError(16, "Device or resource busy")
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        with pytest.raises(
            CheckpointError,
            match=r"^rank 0: the training is complete in \S+saved\.unfinished, and cannot be renamed to \S+saved: "
            r"OSError: .* busy\. Rename it before",
        ):
            training.save(folder)

    for whole in (folder, tmp_path / "saved.unfinished"):
        training.load(whole)
    assert not (tmp_path / "saved.earlier").exists()


@pytest.mark.parametrize("kind", ["unfinished", "earlier"])
def test_links_next_to_a_training_are_not_followed(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """One that somebody else has put there, to a training of the user."""
    training, other = Training.of(checkpoint), tmp_path / "other"
    training.save(other)
    files = {path.name: path.read_bytes() for path in other.iterdir()}
    (tmp_path / f"saved.{kind}").symlink_to(other)

    for _ in range(2):
        training.save(tmp_path / "saved")

    assert {path.name: path.read_bytes() for path in other.iterdir()} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved"]


def test_processes_killed_at_any_place_leave_a_whole_training(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First between the two new names, as is assumed, and then before the second one, and while files are removed."""
    folder, training = tmp_path / "saved", Training.of(checkpoint)
    unfinished, earlier = tmp_path / "saved.unfinished", tmp_path / "saved.earlier"
    training.save(folder)
    folder.rename(earlier)
    rename = Path.rename

    def killed(path: Path, *to: Path, **how: Any) -> Path:
        if path.name.startswith(".metadata"):
            return rename(path, *to)
        raise KeyboardInterrupt

    for name, is_whole in (("pathlib.Path.rename", True), ("shutil.rmtree", False)):
        with monkeypatch.context() as patched:
            patched.setattr(name, killed)
            with pytest.raises(KeyboardInterrupt):
                training.save(folder)
        assert (unfinished / ".metadata").exists() == is_whole
        training.load(earlier)
    training.save(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_half_written_training_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder, training = tmp_path / "saved", Training.of(checkpoint)
    begins = rf"{re.escape(str(folder))} holds no training to resume, as it has no \.metadata; "

    with pytest.raises(ConfigError, match=f"{begins}name the folder of one, or begin anew"):
        training.load(folder)
    (tmp_path / "saved.unfinished").mkdir()
    with pytest.raises(ConfigError, match=rf"{begins}\S+\.unfinished was not written to its end"):
        training.load(folder)
    training.save(tmp_path / "saved.earlier")
    with pytest.raises(ConfigError, match=rf"{begins}\S+\.earlier is complete, and was to be replaced: rename it"):
        training.load(folder)


def test_cut_off_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder, training = tmp_path / "saved", Training.of(checkpoint)
    training.save(folder)
    (file,) = folder.glob("*.distcp")

    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"saved cannot be read, .*: rank 0: \w+: .*If a file is incomplete"):
        training.load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank 0: FileNotFoundError: .*\.distcp"):
        training.load(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\.metadata cannot be read \(.*\); resume from another checkpoint"):
        training.load(folder)
