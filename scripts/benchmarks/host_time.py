"""Measures the host's time for an attention call with an exchange, and for FlashAttention's own call next to it.

    torchrun --nproc-per-node 4 scripts/benchmarks/host_time.py
    torchrun --nproc-per-node 2 scripts/benchmarks/host_time.py --device cpu --documents 64,24x8 --repeats 3

Calls are made as in a forward pass of so many layers, one after the other, with real exchanges and no waiting for the
device; documents are so small that the device keeps up. The table has medians of the repeats, in µs of the host: a
call of the product in all, of that in its kernels, the rest beyond them, and alone a call of FlashAttention's public
function on the same rows, in turns with the product's (of another kernel if that is used).

Exchanges have as many chunks as settings say (DISTCA_EXCHANGE_CHUNKS). With `--unchecked` each repeat runs twice, with
and without the checks of a call, in turns; a line of each rank has the median of the differences.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from distca_hf.comm.groups import open_transport
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK
from distca_hf.kernels.flash4 import Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, CallTensors, Inputs, Kernel
from distca_hf.kernels.registry import kernel_name
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.forward_pass import ForwardPass, PassCalls
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from lib.baselines.operators import whole_call
from lib.options import add_kernel, on_all_ranks, read_documents
from lib.parser import add_device, count, few, parser_of
from lib.tables import Columns, figure, table_of
from lib.wires import of_all_ranks, synchronize


COLUMNS: Columns = {
    "exchanges of a call": figure("exchanges", 1, 0),
    **{title: figure(title, 1e6, 0) for title in ("a call", "in its kernels", "beyond", "alone", "more")},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--documents", default="4096,96x128", help="of all ranks together: lengths, as 4096,96x128")
    parser.add_argument("--layers", type=few, default=32, help="calls of a pass")
    parser.add_argument("--heads", type=few, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=few, default=8, help="heads of keys and values")
    parser.add_argument("--head-dim", type=few, default=128, help="dimension of a head")
    parser.add_argument("--repeats", type=count, default=8, help="passes")
    add_kernel(parser)
    add_device(parser)
    parser.add_argument("--unchecked", action="store_true", help="also without the checks of a call, in turns")
    options = parser.parse_args()
    options.lengths = [tokens for of_set in read_documents(parser, options.documents).values() for tokens in of_set]
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads} do not divide --heads {options.heads}")
    on_all_ranks(measure, options)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Prints medians of all ranks."""
    subject = _subject(options, device)
    times, differences = [], []
    for _ in range(options.repeats):
        times.append(_pass(options, device, subject))
        if options.unchecked:
            # Leaves out the check that a layer attends within a forward pass, and the note of the layer. A mock would
            # cost more than these.
            with mock.patch.multiple(ForwardPass, check_open=lambda *_: None, note_call=lambda *_: None):
                others = _pass(options, device, subject)
            differences.append(times[-1]["beyond"] - others["beyond"])
    if differences:
        words = f"rank {dist.get_rank()}: checks cost {1e6 * statistics.median(differences):.1f} µs a call"
        print(f"{words} (median of {len(differences)} pairs of passes)", flush=True)
    medians = [statistics.median(each[name] for each in times) for name in times[0]]
    own = torch.tensor(medians, dtype=torch.float64, device=device)
    rows = [dict(zip(times[0], each, strict=True)) for each in of_all_ranks(own)]
    figures = {f"rank {rank}": row for rank, row in enumerate(rows)}
    figures["largest of all"] = {name: max(row[name] for row in rows) for name in rows[0]}
    if dist.get_rank() == 0:
        words = f"{len(times)} passes; alone: {subject.alone_name}"
        print(f"{words}\n\n{table_of(COLUMNS, figures, 'median, µs')}", flush=True)


class Subject(NamedTuple):
    """Calls of this rank that are timed."""

    kernel: Kernel  # kernel that both calls use
    attend: Callable[[], object]  # one attention call of the product, forward
    attend_alone: Callable[[], object]  # FlashAttention's own call on the same rows
    alone_name: str  # name of FlashAttention's function
    transport: Transport  # counts exchanges


def _pass(options: argparse.Namespace, device: torch.device, subject: Subject) -> dict[str, float]:
    """Times one pass of the product and as many calls of FlashAttention; returns seconds of the host for each call,
    and the number of exchanges that a call starts, as the columns of the table are called."""
    begun = subject.transport.traffic.exchanges
    with _timed(subject.kernel) as spent, torch.no_grad():
        call = _seconds_of_a_call(options, device, subject.attend)
    exchanges = (subject.transport.traffic.exchanges - begun) / options.layers
    with torch.no_grad():
        alone = _seconds_of_a_call(options, device, subject.attend_alone)
    kernels = sum(spent) / options.layers
    of_product = {"exchanges": exchanges, "a call": call, "in its kernels": kernels, "beyond": call - kernels}
    return of_product | {"alone": alone, "more": call - alone}


def _seconds_of_a_call(options: argparse.Namespace, device: torch.device, call: Callable[[], object]) -> float:
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(options.layers):
        call()
    seconds = (time.perf_counter() - began) / options.layers
    synchronize(device)
    return seconds


def _subject(options: argparse.Namespace, device: torch.device) -> Subject:
    """Returns an attention call of this rank's rows, and FlashAttention's own. The call has a placed plan as in the
    middle of training: every rank has agreed to it."""
    config, transport = DistCAConfig(kernel=options.kernel), open_transport(device, 60.0)
    plan = plan_in_place(place(options.lengths, transport.world_size))
    mine = rank_plan(plan, transport.rank, config.num_chunks(config.topology(transport.world_size)))
    routings = {mine.mask: on_device(mine, device)}
    live = LivePlan(0, Planned(lambda: routings, None, mine.facts, plan.fingerprint), transport, config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(live.kinds.num_rows, heads, options.head_dim, device=device, dtype=dtype)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    layer = torch.tensor(0, device="cpu")  # enabled models say which one attends
    scale = options.head_dim**-0.5

    def attend() -> object:  # layers make their spec in each call, too
        return flash_attn(q, k, v, AttentionSpec(scale), live.handle, layer)

    # As of a pass before, so that later calls are not compared. The first call waits for the other ranks.
    tensors = CallTensors((dtype,) * 3, (q.shape[1:], k.shape[1:], v.shape[1:]))
    live.begin_forward_pass(None, {}, before=PassCalls([CAUSAL_MASK], [tensors], []))
    with torch.no_grad():
        attend()
    kernel = live.lookup.kernel(q, k, v, AttentionSpec(scale))
    held = [stop - start for _, start, stop in plan.layout.held_by(transport.rank)]
    rows = slice(0, sum(held))
    inputs, spans = Inputs(q[rows], k[rows], v[rows]), whole_call(held, device).spans
    if not isinstance(kernel, Flash4Kernel):
        alone = partial(kernel.forward, inputs, spans, AttentionSpec(scale))
        return Subject(kernel, attend, alone, f"the kernel {kernel_name(kernel)}", transport)
    public = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    alone = partial(public, *inputs, **spans.by_name, softmax_scale=scale, causal=True)
    return Subject(kernel, attend, alone, public.__name__, transport)


@contextmanager
def _timed(kernel: Kernel) -> Iterator[list[float]]:
    """Yields seconds of every forward call of a kernel that is made within."""
    spent: list[float] = []
    function = type(kernel).forward

    def timed(*arguments: Any) -> object:
        began = time.perf_counter()
        results = function(*arguments)
        spent.append(time.perf_counter() - began)
        return results

    with mock.patch.object(type(kernel), "forward", timed):
        yield spent


if __name__ == "__main__":
    main()
