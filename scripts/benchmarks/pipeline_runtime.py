"""Compares simulated steps of pipelines with torch's own schedules, whose stages sleep as long as the model says.

    torchrun --nproc-per-node 4 scripts/benchmarks/pipeline_runtime.py [--step-seconds 50] [--rounds 1]

Every process is a stage over gloo. Its layers sleep, forward and backward, as long as a micro-batch of real documents
takes on a rank of an 8B Llama, all times scaled so that a step lasts about `--step-seconds`. The step is the first of
an epoch of the shipped lengths: 8 data ranks x 128K tokens, 8 micro-batches, as packed and shaped, in 1F1B and
interleaved. Sleeping needs hardly a core. What is measured beyond the simulation is the host's time and that of gloo.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.request import PlanRequest, preset
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError
from distca_hf.flops import LLAMA_8B_COSTS
from distca_hf.pipelines.pipeline import Pipeline
from distca_hf.pipelines.schedules import Queues, Schedule, Seconds
from distca_hf.pipelines.shaping import shape_step, work_of_documents
from lib.parser import above_zero, count, few, parse_launched, parser_of
from lib.tables import head, row


MIXES = ("pretrain", "prolong")
NUM_RANKS, TOKENS_PER_RANK, MICRO_BATCHES = 8, 128 * 1024, 8


@dataclass(frozen=True)
class SleepTimes:
    """`[micro_batches]` seconds of each micro-batch in one part of the layers."""

    forward: list[float]
    backward: list[float]


class _Sleep(torch.autograd.Function):
    """Sleeps forward and backward; the number of the micro-batch is what the tensor holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: SleepTimes) -> torch.Tensor:
        micro_batch = int(x.detach()[0, 0])
        ctx.seconds = times.backward[micro_batch]
        time.sleep(times.forward[micro_batch])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingLayers(nn.Module):
    """Layers of one part of the model; `times` may change between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.times = SleepTimes([0.0] * MICRO_BATCHES, [0.0] * MICRO_BATCHES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x if x.requires_grad else x.requires_grad_(), self.times)


class Runtime:
    """One of torch's schedules over all processes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        rank, stages = dist.get_rank(), pipeline.num_stages
        self._layers = [SleepingLayers() for _ in range(pipeline.chunks)]
        like = torch.zeros(1, 1, requires_grad=True)  # activations; said here, because layers read what they hold
        parts = [
            PipelineStage(
                *(layers, chunk * stages + rank, pipeline.num_parts, torch.device("cpu")),
                input_args=like.detach() if chunk == rank == 0 else like,
                output_args=like,
            )
            for chunk, layers in enumerate(self._layers)
        ]
        self._is_first, self._is_last = rank == 0, rank == stages - 1
        if pipeline.chunks == 1:
            self._schedule: Any = Schedule1F1B(parts[0], MICRO_BATCHES, loss_fn=_loss)
        else:
            self._schedule = ScheduleInterleaved1F1B(parts, MICRO_BATCHES, loss_fn=_loss)  # type: ignore[arg-type]
        self.step(np.zeros(MICRO_BATCHES), np.zeros(MICRO_BATCHES))  # opens connections

    def step(self, forward_seconds: Seconds, backward_seconds: Seconds) -> float:
        """Runs a step, and returns the seconds until all processes have ended it.

        Args:
            forward_seconds, backward_seconds: `[micro_batches]` seconds in all layers of the model.
        """
        parts = self._pipeline.num_parts
        for layers in self._layers:
            layers.times = SleepTimes((forward_seconds / parts).tolist(), (backward_seconds / parts).tolist())
        numbers = torch.arange(MICRO_BATCHES, dtype=torch.float32).unsqueeze(1)
        inputs = (numbers,) if self._is_first else ()
        dist.barrier()
        began = time.perf_counter()
        self._schedule.step(*inputs, **({"target": numbers} if self._is_last else {}))
        dist.barrier()
        return time.perf_counter() - began


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum()


def work_of_micro_batches(mix: str, schedule: Schedule) -> dict[str, IntArray]:
    """Returns `[micro_batches]` attended pairs of the first step, as packed and shaped."""
    batches = first_step(mix)
    lengths = np.concatenate(batches)
    work = work_of_documents(lengths)
    as_packed = np.split(np.arange(len(lengths)), np.cumsum([len(batch) for batch in batches])[:-1])
    shaped = shape_step(lengths, work, as_packed, schedule, NUM_RANKS, TOKENS_PER_RANK, LLAMA_8B_COSTS)
    return {"as packed": _sums(work, as_packed), "shaped": _sums(work, shaped)}


@cache
def first_step(mix: str) -> list[IntArray]:
    """Returns the lengths of each micro-batch of the first step of a training."""
    pipeline = Pipeline(2)  # its epochs are those of any pipeline
    request = PlanRequest(NUM_RANKS, TOKENS_PER_RANK, 8, MICRO_BATCHES, preset("llama3-8b"), pipeline=pipeline)
    return pack_epoch(read_lengths(Path(mix)).tokens, request, seed=0).first_step(MICRO_BATCHES).micro_batches


def _sums(work: IntArray, groups: Sequence[IntArray]) -> IntArray:
    return np.array([int(work[group].sum()) for group in groups])


def seconds_of(work: IntArray) -> tuple[Seconds, Seconds]:
    """Returns `[micro_batches]` seconds forward and backward of a rank, in all layers of the model."""
    pairs, forward, backward = work / NUM_RANKS, LLAMA_8B_COSTS.forward, LLAMA_8B_COSTS.backward
    return (
        TOKENS_PER_RANK * forward.token_seconds + pairs * forward.pair_seconds,
        TOKENS_PER_RANK * backward.token_seconds + pairs * backward.pair_seconds,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--step-seconds", type=above_zero, default=50.0, help="about how long a step lasts")
    parser.add_argument("--rounds", type=count, default=1, help="measured steps of each row")
    parser.add_argument("--chunks", type=few, default=4, help="parts of the layers on each stage, when interleaved")
    options = parse_launched(parser)
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    try:
        pipelines = {"1F1B": Pipeline(stages), "interleaved": Pipeline(stages, options.chunks)}
        pipelines["interleaved"].check(MICRO_BATCHES)
    except ConfigError as error:
        raise SystemExit(f"{stages} processes are as many stages: {error}") from error
    if rank == 0:
        print(f"torch {torch.__version__}, {stages} processes, {os.cpu_count()} cores")
        columns = ["lengths", "schedule", "micro-batches", "simulated s", "measured s", "÷ simulated"]
        print(
            head([*columns, "÷ as packed: simulated", "measured", "load of the machine"], text_columns=3), flush=True
        )
    for name, pipeline in pipelines.items():
        runtime, schedule = Runtime(pipeline), Schedule(pipeline, MICRO_BATCHES, Queues.NONE)  # as gloo has none
        for mix in MIXES:
            before: list[tuple[float, float]] = []
            for division, work in work_of_micro_batches(mix, schedule).items():
                forward, backward = seconds_of(work)
                if not before:
                    scale = options.step_seconds / float(schedule.step_seconds(forward, backward))
                simulated = scale * float(schedule.step_seconds(forward, backward))
                load = os.getloadavg()[0]
                measured = [runtime.step(scale * forward, scale * backward) for _ in range(options.rounds)]
                before.append((simulated, min(measured)))
                if rank == 0:
                    runs = ", ".join(f"{seconds:.3f}" for seconds in measured)
                    ratios = ", ".join(f"{seconds / simulated:.3f}" for seconds in measured)
                    against = [f"{now / then:.3f}" for now, then in zip(before[-1], before[0], strict=True)]
                    print(
                        row([mix, name, division, f"{simulated:.3f}", runs, ratios, *against, f"{load:.1f}"]),
                        flush=True,
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
