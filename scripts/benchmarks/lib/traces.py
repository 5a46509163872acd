"""Traces of a benchmark step, in which the parts of distributed attention have names.

Names are put around functions from outside, while a trace is taken and no longer.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from distca_hf.comm import torch_transport
from distca_hf.kernels.interface import Kernel
from distca_hf.runtime import kernel_calls, remote_kv, remote_queries
from lib.wires import Wires


# Steps of the product's runtime, and their names here. One that it no longer has is not named.
STEPS: tuple[tuple[Any, str, str], ...] = (
    (remote_kv.KVDispatch, "start", "distca dispatch: keys leave"),
    (remote_queries.QueryDispatch, "start", "distca dispatch: queries leave"),
    (kernel_calls, "merge", "distca prefixes are merged"),
    (remote_kv.KVGradCombine, "start", "distca combine: gradients leave"),
    (remote_kv.KVGradCombine, "finish", "distca combine: gradients are summed"),
    (remote_queries.ResultCombine, "start", "distca combine: results leave"),
    (remote_queries.ResultCombine, "finish", "distca combine: results land"),
)


def trace_step(step: Callable[[], object], kernel: Kernel, device: torch.device, path: Path) -> None:
    """Runs a step, and writes its trace in Chrome's format to a file; a collective call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    dist.barrier()
    with named_parts(kernel), profile(activities=activities) as profiler:
        step()
    profiler.export_chrome_trace(str(path))


@contextmanager
def named_parts(kernel: Kernel) -> Iterator[None]:
    """Names exchanges, waits, kernels and the steps of the product's runtime in traces that are taken within."""
    parts: list[tuple[Any, str, str]] = [
        *STEPS,
        *((Wires, name, f"bench {name}") for name in ("exchange", "all_gather", "reduce_scatter")),
        (torch_transport.TorchExchange, "wait", "bench wait for an exchange"),
        *((type(kernel), name, f"kernel {name}") for name in ("forward", "backward")),
    ]
    with ExitStack() as stack:
        for owner, name, label in parts:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, _named(getattr(owner, name), label)))
        yield


def _named(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return named
