"""How long the attention kernel of a step takes on every rank: whether equal work is equal time.

Kernel calls are timed from outside, in steps of their own: on GPUs between two events on the stream of the call, on
CPUs by the clock. On a GPU it includes the time that kernels beside the call take from it.
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

from distca_hf.kernels.interface import Kernel
from lib.rates import synchronize


class Mark(Protocol):
    """A moment: a `torch.cuda.Event`, or its counterpart on CPUs."""

    def record(self) -> None:
        """Takes this moment."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Returns the milliseconds from here to there."""
        ...


class CpuMark:
    """A mark of the clock."""

    def record(self) -> None:
        """Takes this moment."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "CpuMark") -> float:
        """Returns the milliseconds from here to there."""
        return 1e3 * (end._seconds - self._seconds)


Laps = list[tuple[Mark, Mark]]  # begin and end of every call


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of all calls of a step; medians over some steps.

    Attributes:
        forward: `[ranks]`, of forward calls, recomputed ones, too.
        backward: `[ranks]`, of backward calls.
    """

    forward: list[float]
    backward: list[float]

    @property
    def figures(self) -> dict[str, Any]:
        """Returns for `forward` and `backward` the `seconds` of every rank, `mean_seconds`, and `max_over_mean`: the
        slowest rank over the mean."""
        passes = {"forward": self.forward, "backward": self.backward}
        return {
            name: {"seconds": seconds, "mean_seconds": statistics.mean(seconds), "max_over_mean": _imbalance(seconds)}
            for name, seconds in passes.items()
        }


def time_kernels(step: Callable[[], object], kernel: Kernel, device: torch.device, rounds: int) -> KernelSeconds:
    """Runs a step so many times, and times every call of the kernel in it; a collective call.

    Returns:
        seconds of all calls, for every rank: medians of the steps.
    """
    rounds_seconds = [_one_step(step, kernel, device) for _ in range(rounds)]
    own = torch.tensor(rounds_seconds, dtype=torch.float64, device=device).quantile(0.5, dim=0)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return KernelSeconds(*torch.stack(ranks, dim=1).tolist())


def _one_step(step: Callable[[], object], kernel: Kernel, device: torch.device) -> list[float]:
    """Seconds of all forward calls, and of all backward calls."""
    laps: dict[str, Laps] = {"forward": [], "backward": []}
    dist.barrier()
    with ExitStack() as stack:
        for name, passed in laps.items():
            timed = _timed(getattr(type(kernel), name), passed, device)
            stack.enter_context(mock.patch.object(type(kernel), name, timed))
        step()
    synchronize(device)
    return [_seconds(passed) for passed in laps.values()]


def _timed(function: Callable[..., Any], laps: Laps, device: torch.device) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = _mark(device)
        results = function(*args, **kwargs)
        laps.append((began, _mark(device)))
        return results

    return timed


def _mark(device: torch.device) -> Mark:
    """This moment; on a GPU the one when the current stream comes to it."""
    mark: Mark = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else CpuMark()
    mark.record()
    return mark


def _seconds(laps: Laps) -> float:
    """Returns the seconds of all calls, once the device has done them."""
    return 1e-3 * sum(began.elapsed_time(end) for began, end in laps)


def _imbalance(seconds: list[float]) -> float:
    return max(seconds) / statistics.mean(seconds)
