"""The script that measures on all GPUs of a host: lines that it launches, by the number of GPUs."""

import importlib
import os
import re
import subprocess
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
"""


def lines_of(folder: Path, gpus: int, *parts: str) -> list[str]:
    """Lines that the script would launch on so many GPUs."""
    for name, text in (("nvidia-smi", GPUS), ("torchrun", LAUNCHER), ("python", LAUNCHER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GPUS": str(gpus)}
    done = subprocess.run(
        [SCRIPT, folder / "out", *parts], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^line: (.*)$", done.stdout, re.MULTILINE)


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

    assert timed.startswith(f"{started}scripts/benchmarks/server_step.py")
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
        (experts, f"--preset qwen3-30b-a3b --ep-size {gpus}", gpus),
    ):
        assert option in line
        assert "--cluster h100" in line
        assert len(documents_of(line)) == 2
        for text in documents_of(line):
            lengths = documents.parse_documents(text)
            documents.check_lengths(lengths, ranks)
            assert len(documents.whole_documents(lengths, ranks)) == ranks
