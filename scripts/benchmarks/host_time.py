"""Measures the time that the host spends on an attention call, beyond that of the kernel function itself.

    torchrun --nproc-per-node 4 scripts/benchmarks/host_time.py
    torchrun --nproc-per-node 2 scripts/benchmarks/host_time.py --device cpu --documents 64,24x8 --repeats 3

Calls are those of a forward pass of so many layers, one behind the other, with real exchanges and no waiting for the
device; documents are so small that the device keeps up. One line per rank and repeat; `beyond` the kernel function's
own time are launches of exchanges (in one chunk) and copies, views, and the dispatch of the operator.

With `--unchecked` each repeat runs twice, with and without the checks of a call, in turns. With `--tensor 2` ranks are
a grid of data and tensor ranks. Each repeat runs twice: in that grid, where a rank attends with its part of the heads;
and in a flat job of the ranks that share documents, with as many heads. Both have the same plan. A grid with one data
rank exchanges nothing. The last line of a rank is the median of the differences.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distca_hf.comm.groups import Members, grid_of_mesh, open_transport
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import AttentionSpec, Kernel
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.device_routing import PinnedRankPlan
from distca_hf.runtime.forward_pass import ForwardPass
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from lib.documents import parse_documents
from lib.options import on_all_ranks
from lib.rates import synchronize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="4096,96x128", help="of all ranks together: lengths, as 4096,96x128")
    parser.add_argument("--layers", type=int, default=32, help="calls of a pass")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--head-dim", type=int, default=128, help="dimension of a head")
    parser.add_argument("--repeats", type=int, default=8, help="passes")
    parser.add_argument("--kernel", default=DistCAConfig().kernel, help="attention kernel, as in settings")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where ranks compute")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--unchecked", action="store_true", help="also without the checks of a call, in turns")
    compared.add_argument("--tensor", type=int, default=1, help="tensor ranks; also a flat job, in turns")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spent its time in one more pass")
    options = parser.parse_args()
    # NCCL opens groups of some ranks alone only in a job whose group is bound to no device.
    on_all_ranks(measure, options, bind=options.tensor == 1)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Prints the time of every repeat on this rank."""
    if options.tensor > 1:
        in_grid, flat = _transports(options, device)
        kernel, attend = _attention(options, device, _plan(options, in_grid, device))
        _, attend_flat = _attention(options, device, _plan(options, flat, device))
    else:
        kernel, attend = _attention(options, device, _plan(options, open_transport(device, 60.0), device))
    differences = []
    for repeat in range(options.repeats):
        beyond = _beyond(options, device, kernel, attend, f"repeat {repeat}")
        if options.unchecked:
            with _unchecked():
                differences.append(beyond - _beyond(options, device, kernel, attend, f"repeat {repeat}, unchecked"))
        if options.tensor > 1:
            differences.append(beyond - _beyond(options, device, kernel, attend_flat, f"repeat {repeat}, flat"))
    if differences:
        subject = "checks cost" if options.unchecked else f"{options.tensor} tensor ranks cost"
        words = f"rank {dist.get_rank()}: {subject} {1e6 * statistics.median(differences):.1f} µs a call"
        print(f"{words} (median of {len(differences)} pairs of passes)", flush=True)
    if options.profile:
        profile = cProfile.Profile()
        with torch.no_grad():
            for _ in range(4 * options.layers):
                profile.runcall(attend)
        if dist.get_rank() == 0:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


def _beyond(
    options: argparse.Namespace, device: torch.device, kernel: Kernel, attend: Callable[[], object], name: str
) -> float:
    """Prints the times of one pass, and returns the seconds of a call beyond the kernel function."""
    with _timed(kernel) as spent, torch.no_grad():
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(options.layers):
            attend()
        seconds = (time.perf_counter() - began) / options.layers
        synchronize(device)
    of_kernel, kernels = sum(spent) / options.layers, len(spent) // options.layers
    words = f"rank {dist.get_rank()}, {name}: {1e6 * seconds:.0f} µs a call, {1e6 * of_kernel:.0f} in"
    print(f"{words} {kernels} kernels, {1e6 * (seconds - of_kernel):.0f} beyond", flush=True)
    return seconds - of_kernel


@contextmanager
def _unchecked() -> Iterator[None]:
    """Takes away the checks of a call: that its layer attends within a forward pass, and the note of the layer."""
    with ExitStack() as patches:
        for name in ("check_open", "note_call"):
            patches.enter_context(mock.patch.object(ForwardPass, name, _nothing))
        yield


def _nothing(*arguments: object) -> None:
    """Takes the place of a check; a mock costs more than the check."""


def _transports(options: argparse.Namespace, device: torch.device) -> tuple[Transport, Transport]:
    """Opens transports in a grid of data and tensor ranks, and over the ranks of it that share documents, as a job."""
    data_ranks, rest = divmod(dist.get_world_size(), options.tensor)
    for name in ("heads", "kv_heads"):
        if rest or getattr(options, name) % options.tensor:
            numbers = f"{dist.get_world_size()} ranks, {options.heads} query and {options.kv_heads} KV heads"
            raise SystemExit(f"--tensor {options.tensor} does not divide all of {numbers}")
        setattr(options, name, getattr(options, name) // options.tensor)
    mesh = init_device_mesh(device.type, (data_ranks, options.tensor), mesh_dim_names=("data", "tensor"))
    grid = grid_of_mesh(mesh, data="data", tensor="tensor")
    in_grid = open_transport(device, 60.0, members=Members(range(dist.get_world_size()), grid))
    return in_grid, open_transport(device, 60.0, members=Members.of(mesh["data"].get_group()))


def _plan(options: argparse.Namespace, transport: Transport, device: torch.device) -> LivePlan:
    """Returns a placed plan in the middle of training: every rank has agreed to it."""
    plan = plan_in_place(place(parse_documents(options.documents), transport.world_size))
    mine = rank_plan(plan, transport.rank)
    routings = {mine.mask: PinnedRankPlan.prepare(mine).to(device)}
    live = LivePlan(0, routings, mine.facts, transport, DistCAConfig(kernel=options.kernel))
    live.begin_forward_pass(None, {})
    return live


def _attention(
    options: argparse.Namespace, device: torch.device, live: LivePlan
) -> tuple[Kernel, Callable[[], object]]:
    """Returns the kernel, and one attention call of this rank's rows."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(live.num_rows, heads, options.head_dim, device=device, dtype=dtype)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    layer = torch.tensor(0, device="cpu")  # enabled models say which one attends
    scale = options.head_dim**-0.5

    def attend() -> object:
        return flash_attn(q, k, v, AttentionSpec(scale), live.handle, layer)  # layers make their spec in each call

    return live.kernel(q, k, v, AttentionSpec(scale)), attend


@contextmanager
def _timed(kernel: Kernel) -> Iterator[list[float]]:
    """Seconds of every forward call of a kernel that is made within."""
    spent: list[float] = []
    forward = type(kernel).forward

    def timed(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        began = time.perf_counter()
        results = forward(*arguments)
        spent.append(time.perf_counter() - began)
        return results

    with mock.patch.object(type(kernel), "forward", timed):
        yield spent


if __name__ == "__main__":
    main()
