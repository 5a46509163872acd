"""Simulated stages of a pipeline: by hand where all micro-batches are alike, beside other ways, memory, and what is
refused."""

from dataclasses import replace

import numpy as np
import pytest

from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.memory import estimate_memory
from distca_hf.analysis.models import SimulatedModel, preset
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.request import PlanRequest
from distca_hf.analysis.simulate import ways
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, simulate
from distca_hf.analysis.simulate.step import GATHERED_BYTES, StagedTraining, StageMemory
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError, PackingError
from distca_hf.pipelines.pipeline import Pipeline
from lib.planning.predicted import ReplicatedTraining


PROFILE = find_profile("h100")
MODEL = SimulatedModel.of(preset("llama3-8b"))
# Five or more steps of 16 x 8,192 tokens.
MIXED = np.array([*[16_384] * 8, *[1024] * 512])


def staged(pipeline: Pipeline, has_head: bool) -> StagedTraining:
    """Stages of one rank each, with tokens for which hops take 1 % of a pass or less."""
    notes = Notes()
    costs = Costs(PROFILE, MODEL, False, notes)
    one = ReplicatedTraining(costs, Cluster(PROFILE, 1, 1, notes), has_head=has_head, gathers_layers=False)
    return StagedTraining(one, pipeline, Cluster(PROFILE, pipeline.num_stages, pipeline.num_stages, notes), 16_384)


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_equal_micro_batches_take_what_the_schedule_takes(micro_batches: int) -> None:
    training = staged(Pipeline(4), has_head=False)
    load = ways.packs(training.training.costs, [np.array([16_384])], np.array([16_384]))
    one = sum(training.training.layers_seconds(load)) / 4

    seconds = training.micro_batches_seconds([load] * micro_batches)
    assert seconds == pytest.approx((micro_batches + 3) * one, rel=0.04)
    assert seconds > (micro_batches + 3) * one


def test_the_head_is_on_the_last_stage() -> None:
    """Others wait for it: every micro-batch takes longer by all of it, and not by a share."""
    load = ways.packs(staged(Pipeline(4), True).training.costs, [np.array([16_384])], np.array([16_384]))
    without, with_head = (
        staged(Pipeline(4), has_head).micro_batches_seconds([load] * 16) for has_head in (False, True)
    )
    head = staged(Pipeline(4), True).training.head_seconds(load)

    assert with_head - without == pytest.approx(16 * head, rel=0.05)


def request_of(**options: object) -> SimulationRequest:
    given = {
        "model": MODEL,
        "gpus": 16,
        "tokens_per_rank": 8192,
        "context_tokens": None,
        "accumulation": 2,
        "batches": 2,
    }
    return SimulationRequest(**{**given, **options})  # type: ignore[arg-type]


def result_of(document_tokens: IntArray = MIXED, **options: object) -> Result:
    return simulate(request_of(**options), PROFILE, document_tokens, 1e9)[0]


def test_all_ways_have_the_documents_that_stages_have() -> None:
    request = request_of(pipeline=Pipeline(4))

    for step in request.steps(MIXED):
        joined = request.without_stages(step)
        assert (len(step), len(joined)) == (8, 2)
        assert max(int(batch.sum()) for batch in step) <= 4 * 8192
        assert np.concatenate(joined).tolist() == np.concatenate(step).tolist()


@pytest.mark.parametrize("options", [{"tensor_ranks": 2}, {"ranks_per_node": 4, "checkpointing": "recomputed"}])
def test_stages_stand_beside_all_other_ways(options: dict[str, object]) -> None:
    plain = {way.key: way for way in result_of(**options).ways}
    result = result_of(pipeline=Pipeline(2, 2), **options)
    seconds = {way.key: way.step_seconds for way in result.ways}

    added = {key for key in seconds.keys() - plain.keys() if not key.startswith(("ulysses_", "ring_"))}
    assert added == {"pipeline_plain", "pipeline_placed", "pipeline_shaped"}
    assert seconds["pipeline_shaped"] <= 1.02 * seconds["pipeline_placed"]
    assert f"pipeline of {result.num_stages} stages" in result.in_short()
    assert "pipeline" not in result_of(**options).in_short()


def test_stages_win_where_wires_are_slow() -> None:
    """With 8K tokens, gathering weights over 30 GB/s takes longer than computing; within a node it is hidden."""
    ratios = {}
    for per_node in (1, 8):
        result = result_of(ranks_per_node=per_node, pipeline=Pipeline(4, 4), accumulation=4)
        seconds = {way.key: way.step_seconds for way in result.ways}
        ratios[per_node] = seconds["pipeline_shaped"] / seconds["placed"]
        word = "as fast as" if per_node == 1 else "as long as"
        assert f"{word} these GPUs without one" in result.in_short()

    assert ratios[1] < 1 < ratios[8]


def test_a_tensor_rank_gathers_its_part_of_the_weights() -> None:
    size = MODEL.size.decoder(MODEL.heads)
    alone, divided = (
        StageMemory(size, TrainingSetup(8, tensor_ranks=ranks), Pipeline(4), 8, 16, 0).total for ranks in (1, 4)
    )
    last = (size.parameters - size.embedding_parameters) // 4 + size.head_parameters

    assert alone - divided == pytest.approx(GATHERED_BYTES * last * 3 / 4, rel=5e-3)  # a few tokens beside


def test_shared_weights_of_embedding_and_head_are_on_both_stages() -> None:
    """A pipeline trains them as two: it takes such a model once they are untied."""
    size = MODEL.size.decoder(MODEL.heads)
    shared = replace(
        size,
        parameters=size.parameters - size.head_parameters,
        embedding_parameters=size.embedding_parameters - size.head_parameters,
    )
    untied, tied = (StageMemory(one, TrainingSetup(8), Pipeline(4), 8, 1024, 0) for one in (size, shared))

    assert [tied.of_stage(stage) for stage in range(4)] == [untied.of_stage(stage) for stage in range(4)]


@pytest.mark.parametrize(
    ("fitting", "words"),
    [
        ({"placed_recomputed", "pipeline_shaped"}, "stages "),
        ({"pipeline_shaped"}, "Of these GPUs distca fits their memory only as stages of a pipeline."),
        ({"placed_recomputed"}, "Of these GPUs distca fits their memory only without stages."),
        (set(), "fit no GPU in any way"),
    ],
)
def test_stages_stand_beside_what_fits(fitting: set[str], words: str) -> None:
    result = result_of(pipeline=Pipeline(2))
    ways = [replace(way, fits=way.key in fitting) for way in result.ways]

    assert words in replace(result, ways=ways).in_short()
    assert ("distca fits" in replace(result, ways=ways).in_short()) == (len(fitting) == 1)


def test_memory_of_a_stage_is_that_of_all_layers_its_weights_and_hops() -> None:
    """Stage 0 of four holds four micro-batches of a quarter of the layers: activations of one of all. In addition its
    weights stay gathered, with their gradients, outputs wait, and there is room for gradients of all eight outputs.
    Stage 1 holds three micro-batches, and has room for inputs and gradients of all."""
    size = replace(MODEL.size.decoder(MODEL.heads), vocabulary=0, embedding_parameters=0)
    size = replace(size, parameters=32 * size.layers[0].parameters)
    whole = estimate_memory(size, TrainingSetup(32), 65_536, 0)
    in_stages = StageMemory(size, TrainingSetup(8), Pipeline(4), 8, 65_536, 0)
    stages = [in_stages.of_stage(stage) for stage in range(4)]
    interleaved = replace(in_stages, pipeline=Pipeline(4, 4))
    hidden = 65_536 * 2 * size.hidden_size
    kept = 65_536 * size.layers[0].kept_bytes(size.hidden_size, TrainingSetup(1))

    assert stages[0] - whole.total + whole.gathered == pytest.approx(
        GATHERED_BYTES * size.parameters // 4 + (8 + 4) * hidden, rel=1e-6
    )
    assert stages[0] - stages[1] == pytest.approx(8 * kept - (16 - (8 + 4)) * hidden, rel=1e-6)
    assert in_stages.total == max(stages)
    assert interleaved.total > max(stages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline": Pipeline(3)}, "--pipeline 3 must divide 16 data ranks: 16 GPUs, 1 of which"),
        ({"pipeline": Pipeline(4, 16)}, "64 parts of a model with 32 layers"),
        ({"pipeline": Pipeline(4), "context_tokens": 40_000}, "4 data ranks of a stage x 8192 tokens hold 32768"),
        ({"pipeline": Pipeline(2), "gpus": 24}, "stages of 12 data ranks begin and end within nodes of 8"),
    ],
)
def test_stages_that_cannot_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        request_of(**options)


def test_too_few_documents_for_stages_are_refused() -> None:
    with pytest.raises(
        PackingError, match=r"steps of 8 micro-batches need 8 documents or more, and the dataset holds 7"
    ):
        result_of(np.array([2048] * 7), pipeline=Pipeline(4))


def test_steps_are_those_that_a_training_in_stages_packs() -> None:
    """Every epoch has whole steps: a few documents fill all micro-batches of one step, as `distca plan` has them."""
    lengths = np.array([2048] * 32)
    packed = pack_epoch(lengths, PlanRequest(4, 8192, 8, 8, preset("llama3-8b"), pipeline=Pipeline(4)), seed=0)
    step, *_ = request_of(pipeline=Pipeline(4)).steps(lengths)

    assert [batch.tolist() for batch in step] == [batch.tolist() for batch in packed.first_step(8)]
    assert all(len(batch) for batch in step)
