"""The program that measures a pipeline's steps against their prediction."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from support.commands import REPOSITORY
from support.scripts import run_script


def test_steps_of_a_pipeline_are_measured_and_predicted(tmp_path: Path) -> None:
    """Two stages of two data ranks: all ways of all schedules train on the same tokens."""
    config, lengths = tmp_path / "config.json", tmp_path / "lengths.txt"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2} | sizes))
    lengths.write_text("\n".join(map(str, [200, 30, 7, 90, 120, 15, 60, 40] * 6)))
    program = ["scripts/benchmarks/pipeline_step.py", "--device", "cpu", "--config", config, "--vocabulary", "64"]
    step = ["--lengths", lengths, "--tokens-per-rank", "128", "--micro-batches", "4", "--rounds", "1"]
    printed = run_script(4, tmp_path, [*program, *step])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]

    ways = ["plain", "as packed", "shaped"]
    assert [row[:2] for row in rows[2:]] == [
        [schedule, way] for schedule in ("1F1B", "interleaved, 2 chunks") for way in ways
    ]
    as_packed_ms = {schedule: float(measured) for schedule, way, *_, measured, _, _, _ in rows[2:] if way == ways[1]}
    for schedule, _, heaviest, _, measured, _, _, against in rows[2:]:
        assert float(heaviest) >= 1
        assert float(against) == pytest.approx(float(measured) / as_packed_ms[schedule], rel=0.05)
    assert re.findall(r"^(1F1B|interleaved, 2 chunks): parts alone", printed, re.MULTILINE) == [rows[2][0], rows[5][0]]
    assert "no enabled model ran on them" not in printed  # all micro-batches of a step are taken at once
    assert not (tmp_path / "pipeline_step_output").exists()


def test_a_folder_that_is_there_is_kept_and_refused_by_all_ranks(tmp_path: Path) -> None:
    kept = tmp_path / "pipeline_step_output" / "mine"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(AssertionError) as refused:
        run_script(2, tmp_path, ["scripts/benchmarks/pipeline_step.py", "--device", "cpu"])

    assert len(re.findall(r"SystemExit: pipeline_step_output is there already", str(refused.value))) >= 2
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--micro-batches", "3"], "3 micro-batches per optimizer step are not a multiple of 2 stages"),
        (["--chunks", "9"], "2 stages of 9 chunks are 18 parts of a model with 4 layers"),
        (["--micro-batches", "4", "--tokens-per-rank", "1"], "the dataset holds"),
    ],
)
def test_steps_that_cannot_run_are_refused_and_leave_no_folder(words: list[str], said: str, tmp_path: Path) -> None:
    program = ["scripts/benchmarks/pipeline_step.py", "--device", "cpu", "--preset", "tiny", *words]
    with pytest.raises(AssertionError, match=f"SystemExit: .*{said}"):
        run_script(2, tmp_path, program)

    assert not (tmp_path / "pipeline_step_output").exists()


def test_lines_of_parts_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    times = importlib.import_module("lib.pipeline").PartTimes
    pairs = np.array([1_000_000_000, 2_000_000_000, 5_000_000_000])
    lines = np.array([[[0.1, 2e-11], [0.3, 4e-11]], [[0.2, 5e-11], [0.0, 1e-11]]])
    seconds = lines[..., :1] + lines[..., 1:] * pairs
    found = times.fit(pairs, seconds)

    np.testing.assert_allclose(found.lines, lines, rtol=1e-9, atol=1e-12)
    assert found.error < 1e-9
    np.testing.assert_allclose(np.array(found.of(pairs)), seconds)
    seconds[0, 0, 1] *= 1.2
    assert times.fit(pairs, seconds).error > 0.02
