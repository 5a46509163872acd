"""Rates of this device for the parts of a step, and the least time of a step."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from distca_hf import flops
from distca_hf.config import KernelName
from distca_hf.cost import causal_pairs
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, accumulation_dtype
from distca_hf.kernels.registry import Operands, choose_kernel
from lib.baselines.operators import whole_call
from lib.model import AttentionKind, Shape, Widths


MATRIX_SIZE = {"cuda": 8192, "cpu": 256}
MOST_KERNEL_TOKENS = 65_536
REPEATS, CALLS = 3, 4


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of an attention kernel on one document without a window, the fastest of all ranks."""

    kernel: str  # class of the kernel
    head_dim: int
    forward_pairs: float  # attended pairs per second
    backward_pairs: float

    def in_words(self) -> str:
        """Returns the rates as text."""
        rates = f"{self.forward_pairs / 1e9:.4g} / {self.backward_pairs / 1e9:.4g}"
        return f"{self.kernel} with heads of {self.head_dim} {rates} billion pairs/s forward / backward"


@dataclass(frozen=True)
class Rates:
    """Measured rates, the fastest of all ranks."""

    matrix_flops: float  # flops per second of a large matrix product
    kernels: Sequence[KernelRates]  # rates for each kind of attention layers

    def floor_seconds(self, linear_flops: float, pairs: Sequence[float]) -> float:
        """Returns the least seconds of a rank: its linear flops, and attention once forward and once backward on its
        attended pairs in all layers of each kind."""
        return linear_flops / self.matrix_flops + sum(
            count / kernel.forward_pairs + count / kernel.backward_pairs
            for count, kernel in zip(pairs, self.kernels, strict=True)
        )


def kernels_for(shape: Shape, name: KernelName, device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    """Returns the kernel of each kind of attention layers, in all modes: the one of a name, or the fastest for these
    widths, this window and this dtype."""
    kernels = []
    for kind in shape.kinds:
        q, k, v, _ = (torch.empty(1, *width, device=device, dtype=dtype) for width in kind.widths)
        spec = AttentionSpec(kind.scale, window_tokens=kind.window_tokens)
        kernels.append(choose_kernel(name, Operands.of(q, k, v), spec))
    return kernels


def measure_rates(
    shape: Shape, kernels: Sequence[Kernel], longest_tokens: int, device: torch.device, dtype: torch.dtype
) -> Rates:
    """Times a matrix product, and the kernel of each kind of layers on the longest document (64K tokens of it). A
    collective call."""
    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    [matrix_flops] = largest([2 * size**3 / _seconds(lambda: left @ right)], device)
    tokens = min(longest_tokens, MOST_KERNEL_TOKENS)
    measured: dict[tuple[type[Kernel], Widths], list[float]] = {}
    for kind, kernel in zip(shape.kinds, kernels, strict=True):
        if (type(kernel), kind.widths) not in measured:
            rates = _pairs_per_second(kind, kernel, tokens, device, dtype)
            measured[type(kernel), kind.widths] = largest(rates, device)
    of_kinds = [
        KernelRates(type(kernel).__name__, kind.head_dim, *measured[type(kernel), kind.widths])
        for kind, kernel in zip(shape.kinds, kernels, strict=True)
    ]
    return Rates(matrix_flops, of_kinds)


def _pairs_per_second(
    kind: AttentionKind, kernel: Kernel, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[float]:
    """Times forward and backward on one document, without a window."""
    q, k, v, dout = (torch.randn(tokens, *width, device=device).to(dtype) for width in kind.widths)
    out, dq, dk, dv = (torch.empty_like(x) for x in (dout, q, k, v))
    lse = torch.empty(kind.heads, tokens, device=device, dtype=accumulation_dtype(dtype))
    spans = whole_call([tokens], device).spans
    spec = AttentionSpec(kind.scale)
    forward = _seconds(lambda: kernel.forward(Inputs(q, k, v), spans, spec, Room(out, lse)))
    saved, gradients = Saved(q, k, v, out, lse), Gradients(dq, dk, dv)
    backward = _seconds(lambda: kernel.backward(dout, saved, gradients, spans, spec))
    return [causal_pairs(0, tokens) / seconds for seconds in (forward, backward)]


def _seconds(run: Callable[[], object]) -> float:
    """Times one call: the fastest of several series of them, after some that are not counted."""
    timer = Timer("run()", globals={"run": run})
    return min(timer.timeit(CALLS).mean for _ in range(REPEATS))


def largest(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Returns each number of the rank where it is the largest. A collective call."""
    of_all = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    return of_all.tolist()


def of_all_ranks(own: torch.Tensor) -> list[Any]:
    """Returns the values of every rank's tensor. A collective call."""
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [each.tolist() for each in ranks]


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak of bf16 matrix products per second, by the name of the device; None if it is not known."""
    return flops.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Waits until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CpuMark:
    """A moment of the clock, as `torch.cuda.Event` is one of a stream."""

    def record(self) -> None:
        """Takes this moment."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "CpuMark") -> float:
        """Returns the milliseconds from here to there."""
        return 1e3 * (end._seconds - self._seconds)


Laps = list[tuple[Any, Any]]  # moments at which every call began and ended


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of all calls of a step on each rank; medians over some steps."""

    forward: list[float]  # `[ranks]`, with the calls of recomputation
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


def time_kernels(
    step: Callable[[], object], kernels: Sequence[Kernel], device: torch.device, rounds: int
) -> KernelSeconds:
    """Runs a step so many times, and times every call of the kernels in it. A collective call."""
    rounds_seconds = [_one_step(step, kernels, device) for _ in range(rounds)]
    own = torch.tensor(rounds_seconds, dtype=torch.float64, device=device).quantile(0.5, dim=0)
    return KernelSeconds(*map(list, zip(*of_all_ranks(own), strict=True)))


def _one_step(step: Callable[[], object], kernels: Sequence[Kernel], device: torch.device) -> list[float]:
    """Returns the seconds of all forward calls, and of all backward calls."""
    laps: dict[str, Laps] = {"forward": [], "backward": []}
    dist.barrier()
    with ExitStack() as stack:
        for kernel, (name, passed) in product({type(kernel) for kernel in kernels}, laps.items()):
            timed = _timed(getattr(kernel, name), passed, device)
            stack.enter_context(mock.patch.object(kernel, name, timed))
        step()
    synchronize(device)
    return [1e-3 * sum(began.elapsed_time(end) for began, end in passed) for passed in laps.values()]


def _timed(function: Callable[..., Any], laps: Laps, device: torch.device) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began, end = (torch.cuda.Event(enable_timing=True) if device.type == "cuda" else CpuMark() for _ in range(2))
        began.record()
        results = function(*args, **kwargs)
        end.record()
        laps.append((began, end))
        return results

    return timed
