"""Weak scaling: documents for every number of GPUs, one process with the part of a rank, and the table."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distca_hf.cost import causal_pairs
from support.commands import REPOSITORY
from support.scripts import run_script, small_llama


PROGRAM = REPOSITORY / "scripts" / "benchmarks" / "weak_scaling.py"
CONFIG = small_llama(num_key_value_heads=1)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    return importlib.import_module("lib.scaling")


def test_every_gpu_has_as_many_tokens(scaling: ModuleType) -> None:
    sizes, tokens = [2, 4, 8], 65_536
    documents = scaling.documents_of("prolong_up", sizes, tokens, 2)

    assert [(each.kind, each.gpus) for each in documents] == [
        *(("mix", size) for size in (1, *sizes)),
        *(("copies", size) for size in sizes),
    ]
    for each in documents:
        assert sum(each.lengths) == each.gpus * tokens
        assert all(length % (2 * each.gpus) == 0 for length in each.lengths)
        assert len(set(each.lengths)) <= 12
        if each.kind == "copies" or each.gpus == 1:
            assert max(each.lengths) <= tokens
        else:
            assert max(each.lengths) > sum(each.lengths) / 2


@pytest.mark.parametrize("tokens", [1000, 0, 64])
def test_tokens_that_lengths_cannot_fill_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokens: int
) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.setattr(
        sys, "argv", [str(PROGRAM), "--device", "cpu", "--sizes", "2", "--tokens-per-gpu", str(tokens)]
    )
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")

    assert f"--tokens-per-gpu {tokens} is no multiple of 128" in capsys.readouterr().err


def test_one_process_has_the_tokens_and_pairs_of_a_rank(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    options = ["--device", "cpu", "--config", str(config), "--documents", "512,8x64;256,4x64", "--modes", "ideal"]
    quick = ["--share-tokens", "512", "--no-exposed", "--rounds", "1", "--warmup", "0", "--out", out]
    printed = run_script(1, tmp_path, ["scripts/benchmarks/attention_step.py", *options, *quick])
    of_two, of_one = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "out.1.json"))

    assert "the part of one rank of 2" in printed
    assert [facts["load"]["tokens"] for facts in (of_two, of_one)] == [512, 512]
    assert of_two["load"]["pairs"] == (causal_pairs(0, 512) + 8 * causal_pairs(0, 64)) / 2
    assert of_one["load"]["pairs"] == causal_pairs(0, 256) + 4 * causal_pairs(0, 64)
    for facts in (of_two, of_one):
        assert all(error <= 1 for error in facts["errors"]["ideal"].values())
        assert facts["modes"]["ideal"]["exchanged_bytes"] == 0


def test_table_compares_with_one_gpu_at_equal_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launches: list[tuple[int, int]] = []
    written: list[bool] = []
    figures = tmp_path / "scaling.json"

    def launch(line: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        of = {name: line[line.index(name) + 1] for name in ("--nproc-per-node", "--documents", "--modes", "--out")}
        gpus, lists, out = int(of["--nproc-per-node"]), of["--documents"].split(";"), Path(of["--out"])
        launches.append((gpus, len(lists)))
        written.append(figures.is_file())
        for number in range(len(lists)):
            seconds = {"ideal": 1.0 if "--share-tokens" in line else 1.0625, "placed": 1.25}
            modes: dict[str, Any] = {
                mode: {"step_seconds": seconds[mode], "exchanged_bytes": 3e9} for mode in of["--modes"].split(",")
            }
            facts = {"modes": modes, "load": {"tokens": 1024, "pairs": 5e9}}
            out.with_suffix(f".{number}.json" if number else ".json").write_text(json.dumps(facts))
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.setattr(subprocess, "run", launch)
    words = ["--device", "cpu", "--sizes", "2,4", "--tokens-per-gpu", "1024", "--repeats", "2", "--out", str(figures)]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *words, "--", "--layers", "1"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    rows = [line.split(" | ") for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]

    assert launches == 2 * [(1, 3), (2, 2), (4, 2)]
    assert [row[:2] for row in rows[1:]] == [["| mix", "2"], ["| mix", "4"], ["| copies", "2"], ["| copies", "4"]]
    assert rows[2][3:] == "1024 | 5.000 | 1000.0 | 1250.0 | 1024 | 819 | 0.800 | 0.800, 0.800 | 0.941 | 3.000 |".split(
        " | "
    )
    assert written == [False] * 3 + [True] * 3, "after every repeat"
    assert len(json.loads(figures.read_text())["rows"][0]["rounds"]) == 2
