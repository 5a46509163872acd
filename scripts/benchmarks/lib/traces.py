"""Traces of a benchmark step, in which the parts of distributed attention have names.

Names are put around functions from outside, while a trace is taken and no longer.
"""

import functools
import gzip
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
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
    (kernel_calls.PreparedForward, "merge", "distca prefixes are merged"),
    (remote_kv.KVGradCombine, "start", "distca combine: gradients leave"),
    (remote_kv.KVGradCombine, "finish", "distca combine: gradients are summed"),
    (remote_queries.ResultCombine, "start", "distca combine: results leave"),
    (remote_queries.ResultCombine, "finish", "distca combine: results land"),
)
# How traces are compressed: most of what a step writes is spaces and repeated names.
LITTLE_COMPRESSION, BLOCK_BYTES = 1, 2**20


def trace_step(step: Callable[[], object], kernels: Sequence[Kernel], device: torch.device, path: Path) -> None:
    """Runs a step, and writes its trace in Chrome's format to a file, `.json.gz`; a collective call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    dist.barrier()
    with named_parts(kernels), profile(activities=activities) as profiler:
        step()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    # The profiler itself would compress line by line, which takes several times as long.
    with plain.open("rb") as lines, gzip.open(path, "wb", compresslevel=LITTLE_COMPRESSION) as compressed:
        shutil.copyfileobj(lines, compressed, BLOCK_BYTES)
    plain.unlink()


@contextmanager
def named_parts(kernels: Sequence[Kernel]) -> Iterator[None]:
    """Names exchanges, waits, kernels and the steps of the product's runtime in traces that are taken within."""
    parts: list[tuple[Any, str, str]] = [
        *STEPS,
        *((Wires, name, f"bench {name}") for name in ("exchange", "all_gather", "reduce_scatter")),
        (torch_transport.TorchExchange, "wait", "bench wait for an exchange"),
        *(
            (kernel, name, f"kernel {name}")
            for kernel, name in product({type(kernel) for kernel in kernels}, ("forward", "backward"))
        ),
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
