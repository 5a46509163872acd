"""Programs that measure pipelines: the simulation against torch's schedules, and the tables."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.request import PlanRequest, preset
from distca_hf.flops import LLAMA_8B_COSTS
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Schedule
from distca_hf.pipelines.shaping import divide, simulate, work_of_documents
from support.commands import REPOSITORY
from support.scripts import run_script


K = 1024


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("pipelines")


def test_torchs_schedules_run_what_is_simulated(tmp_path: Path) -> None:
    """Two stages that hardly sleep: every row is there, and no step is shorter than its sleeps."""
    program = "scripts/benchmarks/pipeline_runtime.py"
    printed = run_script(2, tmp_path, [program, "--step-seconds", "0.2", "--rounds", "1", "--chunks", "2"])
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \|", printed, re.MULTILINE)

    expected = [
        (mix, schedule, division)
        for schedule in ("1F1B", "interleaved")
        for mix in ("pretrain", "prolong")
        for division in ("as packed", "shaped")
    ]
    assert [row[:3] for row in rows] == [tuple(row) for row in expected]
    for _, _, division, simulated, measured in rows:
        assert float(measured) >= 0.99 * float(simulated)
        assert float(simulated) == 0.2 if division == "as packed" else float(simulated) <= 0.2


def test_stages_that_do_not_divide_micro_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SystemExit: 3 processes are as many stages: 8 micro-batches"):
        run_script(3, tmp_path, ["scripts/benchmarks/pipeline_runtime.py", "--step-seconds", "0.2"])


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
    ratios = re.findall(r"as packed ÷ without transfers between data ranks ([\d.]+)$", printed, re.MULTILINE)
    assert len(ratios) == 2
    assert all(float(ratio) > 0 for ratio in ratios)
    assert "no enabled model ran on them" not in printed  # all micro-batches of a step are taken at once
    assert not (tmp_path / "pipeline_step_output").exists()


def test_memory_of_stages_is_estimated_on_a_cpu(tmp_path: Path) -> None:
    """Two stages whose data ranks shard weights. The last one has the head."""
    program = ["scripts/benchmarks/pipeline_memory.py", "--device", "cpu", "--preset", "tiny"]
    printed = run_script(4, tmp_path, [*program, "--tokens-per-rank", "256", "--micro-batches", "2"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]

    schedules = ("1F1B", "interleaved, 2 chunks")
    assert [row[:3] for row in rows[2:]] == [[schedule, stage, "-"] for schedule in schedules for stage in "01"]
    for first, last in (rows[2:4], rows[4:]):
        assert 0 < float(first[3]) < float(last[3])
    assert not (tmp_path / "pipeline_memory_output").exists()


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
    times = importlib.import_module("lib.pipeline.part_times").PartTimes
    pairs = np.array([1_000_000_000, 2_000_000_000, 5_000_000_000])
    lines = np.array([[[0.1, 2e-11], [0.3, 4e-11]], [[0.2, 5e-11], [0.0, 1e-11]]])
    seconds = lines[..., :1] + lines[..., 1:] * pairs
    found = times.fit(pairs, seconds)

    np.testing.assert_allclose(found.lines, lines, rtol=1e-9, atol=1e-12)
    assert found.error < 1e-9
    np.testing.assert_allclose(np.array(found.of(pairs)), seconds)
    seconds[0, 0, 1] *= 1.2
    assert times.fit(pairs, seconds).error > 0.02


def test_a_table_of_what_transfers_wait_for(tmp_path: Path) -> None:
    printed = run_script(1, tmp_path, ["scripts/benchmarks/pipelines.py", "waits", "--steps", "1"])
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")][2:]

    assert [[int(cell) for cell in cells[1:3]] for cells in rows] == 2 * [[s, c] for s in (2, 4, 8) for c in (1, 2, 4)]
    for _, stages, chunks, *shares in rows:
        none, pairs, of_stages = map(float, shares)
        assert 100 > none >= pairs >= of_stages > 0
        assert (pairs == of_stages) == (int(stages) == 2 or int(chunks) == 1)


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "micro_batches"),
    [
        ("pretrain", 8, 128 * K, 8),
        ("pretrain", 16, 128 * K, 16),
        ("pretrain", 32, 64 * K, 8),
        ("pretrain", 64, 64 * K, 4),
    ],
)
@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, 2)], ids=str)
def test_equal_work_reaches_what_the_schedule_allows(
    name: str, ranks: int, tokens: int, micro_batches: int, pipeline: Pipeline, pipelines: ModuleType
) -> None:
    request = PlanRequest(ranks, tokens, 8, micro_batches, preset("llama3-8b"), overlong="split")
    lengths = read_lengths(Path(name)).tokens
    packed = pack_epoch(lengths, request, seed=0)
    schedule, seen = Schedule(pipeline, micro_batches), 0
    for step in range(packed.epoch.num_micro_batches // micro_batches):
        numbers = range(step * micro_batches, (step + 1) * micro_batches)
        documents = lengths[np.concatenate([packed.epoch.micro_batch(number) for number in numbers])]
        if seen == 3 or pipelines.least_heaviest(documents, micro_batches) > 1.1:
            continue
        seen += 1
        work = work_of_documents(documents)
        even = divide(documents, work, [1.0] * micro_batches, ranks * tokens)
        assert even is not None
        loads = np.array([work[group].sum() for group in even])
        perfect = np.full(micro_batches, work.sum() / micro_batches)
        took, ideal = (simulate(schedule, one, ranks, tokens, LLAMA_8B_COSTS) for one in (loads, perfect))
        assert ideal / took >= 0.98
    assert seen


def test_no_division_is_lighter_than_the_bound(pipelines: ModuleType) -> None:
    """One document of 8 tokens, work 36, in a micro-batch of 10 with two of 1; the sum is 36 + 12, the mean 24."""
    assert pipelines.least_heaviest(np.array([1] * 12 + [8]), 2) == pytest.approx((36 + 2) / 24)
    assert pipelines.least_heaviest(np.array([5, 5, 5, 5]), 2) == 1.0
