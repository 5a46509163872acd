"""The script that measures on all GPUs of a host: lines that it launches, by the number of GPUs."""

import importlib
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from support.commands import REPOSITORY


SCRIPT = REPOSITORY / "scripts" / "benchmarks" / "all_gpus.sh"
GPUS = """#!/usr/bin/env bash
if [[ $1 == --list-gpus ]]; then for _ in $(seq "$GPUS"); do echo "a GPU"; done; else echo "NVIDIA H100 80GB HBM3"; fi
"""
LAUNCHER = """#!/usr/bin/env bash
echo "line: $(basename "$0") $*"
[[ -z $FAILING || $* != *"$FAILING"* ]]
"""
# Short code finds no package, and a length in a file.
INTERPRETER = LAUNCHER.replace("\n", "\nif [[ $1 == -c ]]; then [[ $2 != *json* ]] || echo 98304; exit; fi\n", 1)


def launch(folder: Path, gpus: int, *parts: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    """The script on so many GPUs; lines that it would launch are printed, and fail where they have these words."""
    for name, text in (("nvidia-smi", GPUS), ("torchrun", LAUNCHER), ("python", INTERPRETER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GPUS": str(gpus), "FAILING": failing}
    words = [SCRIPT, folder / "out", *parts]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def lines_of(folder: Path, gpus: int, *parts: str) -> list[str]:
    """Lines that the script would launch on so many GPUs."""
    done = launch(folder, gpus, *parts)
    assert done.returncode == 0, done.stderr
    return launched(done.stdout)


def launched(printed: str) -> list[str]:
    return re.findall(r"^line: (.*)$", printed, re.MULTILINE)


def documents_of(line: str) -> list[str]:
    found = re.search(r"--documents (\S+)", line)
    assert found is not None, line
    return found[1].split(";")


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("lib.documents")


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_one_gpu_serves_the_others(tmp_path: Path, documents: ModuleType, gpus: int) -> None:
    timed, lost = lines_of(tmp_path, gpus, "servers", "lost")
    started = f"torchrun --standalone --nproc-per-node {gpus} -m distca_hf.run --attention-servers 1 "

    assert timed.startswith(f"{started}scripts/benchmarks/attention_step.py")
    for text in documents_of(timed):
        lengths = documents.parse_documents(text)
        assert sum(lengths) == 65_536 * (gpus - 1)
        documents.check_lengths(lengths, gpus)
        whole, parts = documents.evenly_spread(lengths, gpus)
        assert len({sum(stop - start for _, start, stop in [*a, *b]) for a, b in zip(whole, parts, strict=True)}) == 1
    wrap = "ddp" if gpus == 2 else "fsdp2"
    assert f"--trainers {gpus - 1} --servers 1 --how both --losses 10 --wrap {wrap}" in lost


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_grids_are_measured_beside_their_simulation(tmp_path: Path, documents: ModuleType, gpus: int) -> None:
    hsdp, pipeline, tensor, experts = lines_of(tmp_path, gpus, "grids")

    assert "pipeline_step.py" in pipeline
    for line, option, ranks in (
        (hsdp, "--dp-replicate-size 2", gpus),
        (tensor, "--tp-size 2", gpus // 2),
        (experts, f"--preset qwen3-30b-a3b --ep-size {gpus} --even-experts", gpus),
    ):
        assert option in line
        assert "--cluster h100" in line
        assert len(documents_of(line)) == 2
        for text in documents_of(line):
            lengths = documents.parse_documents(text)
            documents.check_lengths(lengths, ranks)
            assert len(documents.whole_documents(lengths, ranks)) == ranks


def test_launches_and_parts_behind_one_that_fails_run(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "saved", "grids", "no_part", "host", failing="--checkpointing saved --no-check")
    lines = launched(done.stdout)

    assert [line.partition("--out ")[2].split()[0] for line in lines[:2]] == [
        f"{tmp_path}/out/{name}.json" for name in ("saved", "best")
    ]
    assert len(lines) == 7
    assert "host_time.py" in lines[-1]
    assert done.returncode == 1
    assert "== saved failed with status 1\n" in done.stderr
    assert done.stderr.endswith("== failed parts: saved no_part\n")


@pytest.mark.parametrize(
    ("part", "failing", "launches"),
    [
        ("windows", "gemma3-27b", 3),
        ("scale", "scale.json", 1),
        ("saved", "saved.json", 2),
        ("models", "llama-64k", 4),
        ("liger", "liger.json", 1),
        ("training", "llama3-8b", 2),
        ("memory", "memory.py", 2),
    ],
)
def test_every_launch_of_a_part_runs_and_one_failure_fails_it(
    tmp_path: Path, part: str, failing: str, launches: int
) -> None:
    done = launch(tmp_path, 2, part, failing=failing)

    assert len([line for line in launched(done.stdout) if line.startswith("torchrun")]) == launches
    assert done.returncode == 1
    assert done.stderr.endswith(f"== {part} failed with status 1\n== failed parts: {part}\n")


@pytest.mark.parametrize("part", ["scale", "scale-one", "weak", "windows", "servers", "hsdp", "pipeline"])
def test_rounds_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setenv("ROUNDS", "7")
    monkeypatch.setenv("WEAK", "--liger")
    lines = [line for line in lines_of(tmp_path, 2, part) if "scripts/" in line]

    assert lines
    for line in lines:
        assert re.findall(r"--rounds (\S+)", line)[-1] == "7"
        assert ("--liger" in line) == (part == "weak")


def test_the_length_of_short_attention_is_tried_with_whole_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever options the first search got: the second one begins and ends at its length."""
    monkeypatch.setenv("LONGEST", "--minutes 9 --first-tokens 32768 --attended-tokens 8192")
    short, whole = ([*pairwise(words)] for words in map(str.split, lines_of(tmp_path, 4, "longest")))

    for pairs, limits in (
        (short, {"--attended-tokens": "8192", "--first-tokens": "32768"}),
        (whole, {"--attended-tokens": "0", "--first-tokens": "98304", "--most-tokens": "98304"}),
    ):
        last = dict(pairs)
        assert {"--minutes": "9", **limits}.items() <= last.items()
    assert dict(short)["--out"] != dict(whole)["--out"]


@pytest.mark.parametrize("failing", ["", ".py"])
def test_the_model_of_a_pipeline_does_not_stay(tmp_path: Path, failing: str) -> None:
    done = launch(tmp_path, 2, "pipeline", failing=failing)

    assert done.returncode == (1 if failing else 0)
    assert f"--folder {tmp_path}/out/pipeline." in done.stdout
    assert list((tmp_path / "out").iterdir()) == []
