"""Pipelines: orders of torch, transfers that wait for each other, known times, and schedules that cannot run."""

from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as of_torch

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Operation, Queues, Schedule, held_micro_batches


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


def interleaved_of_torch(pipeline: Pipeline, micro_batches: int) -> Any:
    """`ScheduleInterleaved1F1B` of the first stage; it has the lists of all."""
    stages = [Recorder(chunk * pipeline.num_stages, pipeline.num_parts) for chunk in range(pipeline.chunks)]
    for chunk in stages:
        chunk.group_rank, chunk.group_size = 0, pipeline.num_stages
    return of_torch.ScheduleInterleaved1F1B(stages, micro_batches)  # type: ignore[arg-type]


INTERLEAVED = pytest.mark.parametrize(
    ("num_stages", "chunks", "micro_batches"), [(2, 2, 2), (2, 3, 8), (3, 5, 9), (4, 2, 8), (4, 4, 16), (8, 2, 24)]
)


@INTERLEAVED
def test_interleaved_1f1b_runs_what_torch_runs(num_stages: int, chunks: int, micro_batches: int) -> None:
    pipeline = Pipeline(num_stages, chunks)
    torchs = interleaved_of_torch(pipeline, micro_batches)
    for stage, operations in enumerate(Schedule(pipeline, micro_batches).stages):
        actions = [action for action in torchs.pipeline_order[stage] if action is not None]
        assert operations == [
            Operation(action.computation_type == of_torch.FORWARD, action.stage_index, action.microbatch_index)
            for action in actions
        ]


@INTERLEAVED
def test_transfers_are_posted_where_torch_posts_them(num_stages: int, chunks: int, micro_batches: int) -> None:
    """Every stage's list of torch, without what is FSDP's: operations, sends and receives."""
    pipeline = Pipeline(num_stages, chunks)
    lists: list[list[tuple[str, int, int | None]]] = [[] for _ in range(num_stages)]
    for stage, (is_forward, part, micro_batch), receiver, target, _ in Schedule(pipeline, micro_batches).actions:
        letter = "F" if is_forward else "B"
        lists[stage].append((letter, part, micro_batch))
        if receiver is not None:
            lists[stage].append((f"SEND_{letter}", part, micro_batch))
            lists[target].append((f"RECV_{letter}", receiver.part, micro_batch))
    torchs = interleaved_of_torch(pipeline, micro_batches).pipeline_order_with_comms
    for stage, actions in enumerate(lists):
        assert actions == [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in torchs[stage]
            if action.microbatch_index is not None
        ]


def test_a_receive_holds_up_what_is_posted_behind_it() -> None:
    """Two stages of two chunks, two micro-batches. Parts 0 and 1 take time forward, and nothing else does."""
    forward = np.array([[1.0, 1.0], [10.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    backward = np.zeros_like(forward)
    pairs, free = (Schedule(Pipeline(2, 2), 2, queues) for queues in (Queues.PAIRS, Queues.NONE))
    # Part 0 has the micro-batches until 1 and 2, part 1 the first one from 2 to 12. Stage 0 has posted the receive of
    # its result in front of the second one, which so comes at 14 and not at 3: part 1 has it until 15 and not 13. From
    # there the second one has five hops; but all nine transfers that are left go one after the other.
    assert free.step_seconds_of_parts(forward, backward, 1.0) == 13.0 + 5
    assert pairs.step_seconds_of_parts(forward, backward, 1.0) == 15.0 + 9


def test_one_queue_for_all_transfers_of_a_stage_takes_longer() -> None:
    forward = np.full(8, 16.0)
    took = {queues: float(Schedule(Pipeline(4, 4), 8, queues).step_seconds(forward, 3 * forward)) for queues in Queues}
    assert took[Queues.NONE] == took[Queues.PAIRS] == 140.0
    assert took[Queues.STAGES] == 182.0
    in_1f1b = {float(Schedule(Pipeline(4), 8, queues).step_seconds(forward, 3 * forward)) for queues in Queues}
    assert in_1f1b == {176.0}


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 2), (4, 8), (8, 16)])
def test_equal_micro_batches_in_1f1b_take_what_the_formula_says(num_stages: int, micro_batches: int) -> None:
    forward = np.full(micro_batches, float(num_stages))  # one second in each stage
    schedule = Schedule(Pipeline(num_stages), micro_batches)
    assert schedule.step_seconds(forward, 2 * forward) == pytest.approx(3 * (micro_batches + num_stages - 1))
    held = (held_micro_batches(schedule.pipeline, stage, micro_batches) for stage in range(num_stages))
    assert max(held) == num_stages


def test_chunks_divide_the_time_of_filling_and_draining() -> None:
    forward = np.full(8, 4.0)
    waited = [Schedule(Pipeline(4, chunks), 8).step_seconds(forward, 2 * forward) - 3 * 8 for chunks in (1, 2, 4)]
    assert waited == pytest.approx([9.0, 4.5, 2.25])


def test_parts_with_times_of_their_own_by_hand() -> None:
    """Stage 0: F0 F1 B0 B1. Stage 1: F0 B0 F1 B1, with a head that takes as long again as its layers."""
    forward, backward = np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([[3.0, 7.0], [6.0, 14.0]])
    # Stage 1 has F0 from 1 to 3, B0 to 9, F1 to 13 and B1 to 27. Stage 0 has B0 from 9 to 12, and B1 from 27 to 34.
    assert Schedule(Pipeline(2), 2).step_seconds_of_parts(forward, backward) == 34.0


def test_parts_may_have_unequally_many_layers() -> None:
    pipeline = Pipeline(4)
    assert pipeline.layers_of_parts(10) == [3, 3, 2, 2]
    forward, schedule = np.full(64, 10.0), Schedule(pipeline, 64)
    even = schedule.step_seconds(forward, forward)
    of_parts = forward * np.array(pipeline.layers_of_parts(10))[:, np.newaxis] / 10
    uneven = schedule.step_seconds_of_parts(of_parts, of_parts)
    assert uneven / even == pytest.approx(3 / 2.5, rel=0.05)  # all wait for a stage of three layers


@pytest.mark.parametrize(
    ("pipeline", "micro_steps", "num_layers", "words"),
    [
        (Pipeline(4), 3, None, "3 micro-batches per optimizer step do not fill a pipeline of 4 stages"),
        (Pipeline(4, 2), 10, None, "10 micro-batches per optimizer step are not a multiple of 4 stages.*give 8 or 12"),
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
