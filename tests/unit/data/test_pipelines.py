"""Pipelines: orders of torch, known times, and schedules that cannot run."""

from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as of_torch

import distca_hf
from distca_hf.data.pipelines import Operation, Pipeline, Schedule
from distca_hf.errors import ConfigError


class Recorder:
    """A pipeline stage that computes and sends nothing, and notes what it is asked to run."""

    has_backward = is_first = True
    is_last = False

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index = self.group_rank = stage
        self.num_stages = self.group_size = num_stages
        self.ran: list[Operation] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.ran.append(Operation(True, self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.ran.append(Operation(False, self.stage_index, micro_batch))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 8), (8, 19)])
def test_1f1b_runs_what_torch_runs(num_stages: int, micro_batches: int) -> None:
    schedule = Schedule(Pipeline(num_stages), micro_batches)
    for stage, operations in enumerate(schedule.stages):
        recorder = Recorder(stage, num_stages)
        torchs = of_torch.Schedule1F1B(recorder, micro_batches)  # type: ignore[arg-type]
        torchs._initialize_stage = lambda *_: None  # type: ignore[method-assign]  # it would exchange shapes
        torchs._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        assert operations == recorder.ran


@pytest.mark.parametrize(
    ("num_stages", "chunks", "micro_batches"), [(2, 2, 2), (2, 3, 8), (3, 5, 9), (4, 2, 8), (4, 4, 16), (8, 2, 24)]
)
def test_interleaved_1f1b_runs_what_torch_runs(num_stages: int, chunks: int, micro_batches: int) -> None:
    pipeline = Pipeline(num_stages, chunks)
    stages = [Recorder(chunk * num_stages, num_stages * chunks) for chunk in range(chunks)]
    for chunk in stages:
        chunk.group_rank, chunk.group_size = 0, num_stages
    torchs = of_torch.ScheduleInterleaved1F1B(stages, micro_batches)  # type: ignore[arg-type]
    for stage, operations in enumerate(Schedule(pipeline, micro_batches).stages):
        actions = [action for action in torchs.pipeline_order[stage] if action is not None]
        assert operations == [
            Operation(action.computation_type == of_torch.FORWARD, action.stage_index, action.microbatch_index)
            for action in actions
        ]


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 2), (4, 8), (8, 16)])
def test_equal_micro_batches_in_1f1b_take_what_the_formula_says(num_stages: int, micro_batches: int) -> None:
    forward = np.full(micro_batches, float(num_stages))  # one second in each stage
    schedule = Schedule(Pipeline(num_stages), micro_batches)
    assert schedule.step_seconds(forward, 2 * forward) == pytest.approx(3 * (micro_batches + num_stages - 1))
    assert schedule.held_micro_batches == num_stages


def test_chunks_divide_the_time_of_filling_and_draining() -> None:
    forward = np.full(8, 4.0)
    waited = [Schedule(Pipeline(4, chunks), 8).step_seconds(forward, 2 * forward) - 3 * 8 for chunks in (1, 2, 4)]
    assert waited == pytest.approx([9.0, 4.5, 2.25])


def test_two_stages_by_hand() -> None:
    """Stage 0: F0 F1 B0 B1. Stage 1: F0 B0 F1 B1. A hop takes 10, backward of the second micro-batch 7 a stage."""
    schedule = Schedule(Pipeline(2), 2)
    forward, backward = np.array([2.0, 4.0]), np.array([6.0, 14.0])
    # F0 ends at 1 and, behind a hop, at 12 on stage 1; B0 there at 15; F1 at 17 (its input came at 13), B1 at 24.
    # Stage 0 has B0 from 25 to 28, and B1 from 34 to 41.
    assert schedule.step_seconds(forward, backward, hop_seconds=10.0) == 41.0


def test_parts_with_times_of_their_own_by_hand() -> None:
    """Stage 0: F0 F1 B0 B1. Stage 1: F0 B0 F1 B1, with a head that takes as long again as its layers."""
    forward, backward = np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([[3.0, 7.0], [6.0, 14.0]])
    # Stage 1 has F0 from 1 to 3, B0 to 9, F1 to 13 and B1 to 27. Stage 0 has B0 from 9 to 12, and B1 from 27 to 34.
    assert Schedule(Pipeline(2), 2).step_seconds_of_parts(forward, backward) == 34.0


def test_steps_side_by_side_are_those_one_by_one() -> None:
    random = np.random.default_rng(0)
    forward, backward = random.random((5, 3, 8)), random.random((5, 3, 8))
    schedule = Schedule(Pipeline(4, 2), 8)
    together = schedule.step_seconds(forward, backward, 0.1)
    assert together.shape == (5, 3)
    assert together[4, 1] == schedule.step_seconds(forward[4, 1], backward[4, 1], 0.1)


def test_parts_may_have_unequally_many_layers() -> None:
    pipeline = Pipeline(4)
    assert pipeline.layers_of_parts(10) == [3, 3, 2, 2]
    forward, schedule = np.full(64, 10.0), Schedule(pipeline, 64)
    even = schedule.step_seconds(forward, forward)
    uneven = schedule.step_seconds(forward, forward, part_layers=pipeline.layers_of_parts(10))
    assert uneven / even == pytest.approx(3 / 2.5, rel=0.05)  # all wait for a stage of three layers


@pytest.mark.parametrize(
    ("pipeline", "micro_steps", "num_layers", "words"),
    [
        (Pipeline(4), 3, None, "3 micro-batches per optimizer step do not fill a pipeline of 4 stages"),
        (Pipeline(4, 2), 10, None, "10 micro-batches per optimizer step are no multiple of 4 stages.*give 8 or 12"),
        (Pipeline(4, 4), 8, 15, "4 stages of 4 chunks are 16 parts of a model with 15 layers"),
        (Pipeline(4), 8, 3, "4 stages of 1 chunk are 4 parts of a model with 3 layers"),
    ],
    ids=str,
)
def test_schedules_that_cannot_run(pipeline: Pipeline, micro_steps: int, num_layers: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pipeline.check(micro_steps, num_layers)


@pytest.mark.parametrize(("sizes", "words"), [((1,), "1 stages is none"), ((4, 0), "0 chunks")])
def test_sizes_that_are_no_pipeline(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        distca_hf.Pipeline(*sizes)


def test_1f1b_takes_any_number_that_fills_it() -> None:
    Pipeline(4).check(7)
    Pipeline(4, 4).check(8, 16)
