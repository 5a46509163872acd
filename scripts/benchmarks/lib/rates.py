"""Rates of this device for the parts of a step, and the least time of a step."""

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

from distca_hf import flops
from distca_hf.config import KernelName
from distca_hf.cost import causal_pairs
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, accumulation_dtype
from distca_hf.kernels.registry import Operands, choose_kernel
from lib.baselines.operators import OwnKeys, make_call
from lib.model import Shape


MATRIX_SIZE = {"cuda": 8192, "cpu": 256}
MOST_KERNEL_TOKENS = 65_536
REPEATS, CALLS = 3, 4


@dataclass(frozen=True)
class Rates:
    """Measured rates, the fastest of all ranks.

    Attributes:
        kernel: class of the attention kernel.
        matrix_flops: of a large matrix product, per second.
        forward_pairs, backward_pairs: attended pairs per second of the kernel, on one document.
    """

    kernel: str
    matrix_flops: float
    forward_pairs: float
    backward_pairs: float

    def floor_seconds(self, linear_flops: float, pairs: float) -> float:
        """Returns the least seconds of a rank: linear work, and attention once forward and once backward.

        Args:
            linear_flops: of the rank.
            pairs: attended pairs of the rank, in all layers.
        """
        return linear_flops / self.matrix_flops + pairs / self.forward_pairs + pairs / self.backward_pairs


def kernel_for(shape: Shape, name: KernelName, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Returns the kernel that all modes use: the one of a name, or the fastest for these widths and this dtype."""
    q, k, v, _ = (torch.empty(1, *width, device=device, dtype=dtype) for width in shape.widths)
    return choose_kernel(name, Operands.of(q, k, v), AttentionSpec(shape.scale))


def measure_rates(
    shape: Shape, kernel: Kernel, longest_tokens: int, device: torch.device, dtype: torch.dtype
) -> Rates:
    """Times a matrix product, and the kernel on the longest document (64K tokens of it); a collective call.

    Args:
        shape: heads, and numbers of a head.
        kernel: of attention.
        longest_tokens: of a document.
        device, dtype: where, and of what.
    """
    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matrix_seconds = _seconds(lambda: left @ right, device)

    tokens = min(longest_tokens, MOST_KERNEL_TOKENS)
    q, k, v, dout = (torch.randn(tokens, *width, device=device).to(dtype) for width in shape.widths)
    out, dq, dk, dv = (torch.empty_like(x) for x in (dout, q, k, v))
    lse = torch.empty(shape.heads, tokens, device=device, dtype=accumulation_dtype(dtype))
    spans = make_call(0, [tokens], [tokens], OwnKeys(slice(0, tokens)), device).spans
    spec = AttentionSpec(shape.scale)
    forward = _seconds(lambda: kernel.forward(Inputs(q, k, v), spans, spec, Room(out, lse)), device)
    saved, gradients = Saved(q, k, v, out, lse), Gradients(dq, dk, dv)
    backward = _seconds(lambda: kernel.backward(dout, saved, gradients, spans, spec), device)
    pairs = causal_pairs(0, tokens)
    rates = torch.tensor([2 * size**3 / matrix_seconds, pairs / forward, pairs / backward], device=device)
    dist.all_reduce(rates, op=dist.ReduceOp.MAX)
    return Rates(type(kernel).__name__, *rates.tolist())


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak of bf16 matrix products per second, by the name of the device; None if it is not known."""
    return flops.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Waits until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Times one call: the fastest of several series of them; the first call is not counted."""
    run()
    series = []
    for _ in range(REPEATS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        synchronize(device)
        series.append((time.perf_counter() - began) / CALLS)
    return min(series)


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
        return {
            name: {
                "seconds": seconds,
                "mean_seconds": statistics.mean(seconds),
                "max_over_mean": max(seconds) / statistics.mean(seconds),
            }
            for name, seconds in vars(self).items()
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
    return [1e-3 * sum(began.elapsed_time(end) for began, end in passed) for passed in laps.values()]


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
