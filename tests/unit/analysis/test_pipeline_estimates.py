"""Pipelines in `distca plan`: goals on the shipped lengths, what wires do, output, and what is refused."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from distca_hf.analysis.epoch import EpochPlans, PackedEpoch, pack_epoch, plan_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.pipeline_estimates import (
    PipelineEstimates,
    Wires,
    WithoutPipeline,
    estimate_pipeline,
    least_heaviest,
)
from distca_hf.analysis.request import PlanRequest, preset
from distca_hf.cli import app
from distca_hf.data.pipelines import Pipeline
from distca_hf.data.schedules import Schedule
from distca_hf.data.shaping import divide, simulate, work_of_documents
from distca_hf.flops import LLAMA_8B_COSTS, Rates


K = 1024
LLAMA = preset("llama3-8b")
# Rates of the goals: of matrix products alone, without norms and activations.
RATES = Rates(matrix=785e12, attention_forward=650e12, attention_backward=609e12)


@cache
def planned(name: str) -> tuple[PlanRequest, PackedEpoch, EpochPlans]:
    """Plans of 16 optimizer steps of an epoch: 8 ranks x 128K tokens, 4 stages of 4 chunks, 8 micro-batches."""
    request = PlanRequest(8, 128 * K, 8, 8, LLAMA, pipeline=Pipeline(4, 4))
    packed = pack_epoch(read_lengths(Path(name)).tokens, request, seed=0)
    return request, packed, plan_epoch(request, packed.document_tokens, packed.epoch)


@cache
def estimates(name: str, wire_speed: float = 50.0) -> PipelineEstimates:
    request, packed, plans = planned(name)
    costs = LLAMA.pass_costs(rates=RATES)
    assert costs is not None
    return estimate_pipeline(request, packed.document_tokens, packed.epoch, plans, costs, Wires(wire_speed))


@pytest.mark.parametrize(
    ("name", "plain", "as_packed", "shaped", "interleaved"),
    [("pretrain", 0.39, 0.66, 0.73, 0.88), ("prolong", 0.34, 0.62, 0.66, 0.79)],
)
def test_goals_on_the_shipped_lengths(
    name: str, plain: float, as_packed: float, shaped: float, interleaved: float
) -> None:
    busy = estimates(name)

    assert busy.steps == 16
    assert busy.plain == pytest.approx(plain, abs=0.03)
    assert busy.as_packed == pytest.approx(as_packed, abs=0.02)
    assert busy.shaped >= shaped
    assert busy.interleaved is not None
    assert busy.interleaved >= interleaved
    assert busy.no_pipeline >= 0.99
    assert 0.97 < busy.filled <= 1.0
    assert busy.heaviest >= busy.least_heaviest >= 1.0


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
    name: str, ranks: int, tokens: int, micro_batches: int, pipeline: Pipeline
) -> None:
    request = PlanRequest(ranks, tokens, 8, micro_batches, LLAMA, overlong="split")
    lengths = read_lengths(Path(name)).tokens
    packed = pack_epoch(lengths, request, seed=0)
    schedule, seen = Schedule(pipeline, micro_batches), 0
    for step in range(packed.epoch.num_micro_batches // micro_batches):
        numbers = range(step * micro_batches, (step + 1) * micro_batches)
        documents = lengths[np.concatenate([packed.epoch.micro_batch(number) for number in numbers])]
        if seen == 3 or least_heaviest(documents, micro_batches) > 1.1:
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


def test_no_division_is_lighter_than_the_bound() -> None:
    """One document of 8 tokens, work 36, in a micro-batch of 10 with two of 1; the sum is 36 + 12, the mean 24."""
    assert least_heaviest(np.array([1] * 12 + [8]), 2) == pytest.approx((36 + 2) / 24)
    assert least_heaviest(np.array([5, 5, 5, 5]), 2) == 1.0


@pytest.mark.parametrize("wire_speed", [12.5, 25.0, 50.0, 100.0])
@pytest.mark.parametrize("tokens", [8 * K, 64 * K])
def test_wires_limit_gathers_without_a_pipeline(tokens: int, wire_speed: float) -> None:
    """By hand: 32 layers of 218,103,808 weights, documents of 512 tokens."""
    costs = LLAMA.pass_costs(rates=RATES)
    assert costs is not None
    request = PlanRequest(4, tokens, 8, 4, LLAMA, pipeline=Pipeline(4))
    step = np.full(4 * request.capacity_tokens // 512, 512)
    weights, pairs = 32 * 218_103_808, tokens * 513 / 2
    forward = 2 * weights * tokens / 785e12 + 4 * 128 * 32 * 32 * pairs / 650e12
    backward = 6 * weights * tokens / 785e12 + 10 * 128 * 32 * 32 * pairs / 609e12  # computed again, and two gradients
    gather = 2 * weights / (1e9 * wire_speed)
    expected = (forward + backward) / (max(forward, gather) + max(backward, 2 * gather))

    utilisation = WithoutPipeline(request, [step]).utilisation(LLAMA, costs, Wires(wire_speed))
    assert utilisation == pytest.approx(expected, rel=1e-3)


def run(lengths: str | Path, *options: str, status: int = 0, ranks: int = 8, tokens: int = 16384) -> Any:
    arguments = ["plan", str(lengths), "--gpus", str(ranks), "--tokens-per-rank", str(tokens), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "some.json"
    path.write_text(json.dumps(np.minimum(read_lengths(Path("pretrain")).tokens[:1500], 60_000).tolist()))
    return path


def test_json_and_text_say_the_same(some: Path) -> None:
    options = ("--pipeline", "4", "--chunks", "2", "--micro-steps", "8", "--wire-speed", "2")
    said = json.loads(run(some, *options, "--json").stdout)
    busy = said["pipeline"]

    assert (busy["num_stages"], busy["chunks"], busy["gpus"], busy["wire_gbytes_per_second"]) == (4, 2, 32, 2.0)
    assert 0 < busy["plain"] < busy["as_packed"] <= busy["shaped"] < busy["interleaved"] < 1
    assert busy["no_pipeline"] < 0.5  # 16K tokens per rank over such wires
    assert said["estimates"] is None
    assert said["choices"] == []
    assert said["micro_steps"] == 8
    text = " ".join(run(some, *options).stdout.split())
    assert "in each of 4 stages of a pipeline (32 GPUs)" in text
    for way in ("plain", "shaped", "interleaved", "no_pipeline"):
        assert f"{busy[way]:.1%}".replace("%", " %") in text
    assert "shaped, 2 chunks" in text


def test_the_first_step_is_shaped_as_in_training(some: Path) -> None:
    shaped = json.loads(run(some, "--pipeline", "4", "--micro-steps", "8", "--json").stdout)
    interleaved = json.loads(run(some, "--pipeline", "4", "--chunks", "4", "--micro-steps", "8", "--json").stdout)
    without = json.loads(run(some, "--micro-steps", "8", "--json").stdout)

    assert shaped["pipeline"]["interleaved"] is None
    assert shaped["epoch_micro_batches"] % 8 == 0
    assert len({shaped["fingerprint"], interleaved["fingerprint"], without["fingerprint"]}) == 3
    assert without["pipeline"] is None
    assert without["estimates"] is not None


def test_the_example_of_the_help_works() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    (example,) = re.findall(r"With and without a pipeline: distca (.*)", shown)
    ran = CliRunner().invoke(app, [*example.split(), "--json"])

    assert json.loads(ran.stdout)["pipeline"]["gpus"] == 32


def test_a_model_of_unknown_size_has_no_utilisation(some: Path, tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--pipeline", "4", "--micro-steps", "4", "--model", str(tmp_path / "config.json"))
    assert json.loads(run(some, *options, "--json").stdout)["pipeline"] is None
    assert "its size is not known" in run(some, *options).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pipeline 1", "--pipeline 1: a pipeline of 1 stages is none: give at least 2"),
        ("--pipeline 4 --chunks 0", "--pipeline 4 --chunks 0: a pipeline stage has 0 chunks"),
        ("--pipeline 4", "--pipeline 4 --chunks 1 --micro-steps 1: 1 micro-batches per optimizer step do not fill"),
        ("--pipeline 4 --chunks 2 --micro-steps 6", "6 micro-batches per optimizer step are not a multiple of 4"),
        ("--pipeline 4 --chunks 9 --micro-steps 8", "36 parts of a model with 32 layers; give fewer stages or chunks"),
        ("--pipeline 4 --micro-steps 4 --wire-speed 0", "--wire-speed 0 must be above 0 GB/s"),
        ("--pipeline 4 --micro-steps 4 --wire-speed nan", "--wire-speed nan must be above 0 GB/s"),
        ("--pipeline 4 --micro-steps 4 --layout fixed", "--layout fixed keeps packs as they are; leave one"),
        ("--chunks 4", "--chunks 4 is of a pipeline: give --pipeline, too, or leave it out"),
        ("--wire-speed 12.5", "--wire-speed 12.5 is of a pipeline"),
        ("--pipeline 4 --micro-steps 1024", "need 1024 documents or more, and the dataset holds 3"),
        ("--pipeline 2 --micro-steps 2 --tokens-per-rank 99", "a document of 800 tokens does not fit on 8 ranks x 99"),
    ],
)  # fmt: skip
def test_pipelines_that_are_refused(options: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[700, 800, 300]")
    refused = run(tmp_path / "lengths.json", *options.split(), status=2)

    assert refused.stdout == ""
    assert refused.stderr.startswith("distca: ")
    assert refused.stderr.count("\n") == 1
    assert words in refused.stderr
