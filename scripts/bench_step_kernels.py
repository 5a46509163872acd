"""How long the attention kernel of a step takes on every rank: whether equal work is equal time.

Kernel calls are timed from outside, in a step of its own: on GPUs between two events on the stream of the call, on
CPUs by the clock. Of a GPU's time, what other kernels take that run beside the call is in it.
"""

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from bench_step_rates import synchronize

from distca_hf.kernels.interface import Kernel


class Mark(Protocol):
    """A moment: a `torch.cuda.Event`, or what CPUs have instead."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to there."""
        ...


class CpuMark:
    """A mark of the clock."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "CpuMark") -> float:
        return 1e3 * (end._seconds - self._seconds)


Laps = list[tuple[Mark, Mark]]  # begin and end of every call


@dataclass(frozen=True)
class KernelSeconds:
    """All calls of a step, for every rank.

    Attributes:
        forward: recomputed calls, too.
        backward: calls of the backward kernel.
    """

    forward: list[float]
    backward: list[float]

    @property
    def figures(self) -> dict[str, Any]:
        """Seconds of every rank, their mean, and the slowest rank over the mean."""
        passes = {"forward": self.forward, "backward": self.backward}
        return {
            name: {"seconds": seconds, "mean_seconds": statistics.mean(seconds), "max_over_mean": _imbalance(seconds)}
            for name, seconds in passes.items()
        }


def time_kernels(step: Callable[[], object], kernel: Kernel, device: torch.device) -> KernelSeconds:
    """Runs a step and times every call of the kernel in it; a collective call."""
    laps: dict[str, Laps] = {"forward": [], "backward": []}
    dist.barrier()
    with ExitStack() as stack:
        for name, passed in laps.items():
            timed = _timed(getattr(type(kernel), name), passed, device)
            stack.enter_context(mock.patch.object(type(kernel), name, timed))
        step()
    synchronize(device)
    own = torch.tensor([_seconds(passed) for passed in laps.values()], dtype=torch.float64, device=device)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return KernelSeconds(*torch.stack(ranks, dim=1).tolist())


def _timed(function: Callable[..., None], laps: Laps, device: torch.device) -> Callable[..., None]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> None:
        began = _mark(device)
        function(*args, **kwargs)
        laps.append((began, _mark(device)))

    return timed


def _mark(device: torch.device) -> Mark:
    """This moment; on a GPU the one when the current stream comes to it."""
    mark: Mark = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else CpuMark()
    mark.record()
    return mark


def _seconds(laps: Laps) -> float:
    """Of all calls, once the device has done them."""
    return 1e-3 * sum(began.elapsed_time(end) for began, end in laps)


def _imbalance(seconds: list[float]) -> float:
    return max(seconds) / statistics.mean(seconds)
