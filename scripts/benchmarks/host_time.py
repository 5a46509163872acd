"""Measures the host's time for an attention call with an exchange, and for FlashAttention's own call beside it.

    torchrun --nproc-per-node 4 scripts/benchmarks/host_time.py
    torchrun --nproc-per-node 2 scripts/benchmarks/host_time.py --device cpu --documents 64,24x8 --repeats 3

Calls are those of a forward pass of so many layers, one after the other, with real exchanges and no waiting for the
device; documents are so small that the device keeps up. A line for each rank and repeat has the time of a call, that
of the kernel functions in it, and what is `beyond` these: launches of exchanges and copies, views, and the dispatch
of the operator. `alone` is one call of FlashAttention's public function on the same rows, as if all parts of documents
on this rank were whole, in turns with the product's; where another kernel is used, it is a call of that.

The last lines are medians of the repeats: of each rank, then the largest of all ranks. They say what a call takes in
all, beyond its kernels, and more than FlashAttention's own call. Exchanges have as many chunks as settings say
(DISTCA_EXCHANGE_CHUNKS).

With `--backward` each repeat has a backward pass, too, whose layers are differentiated one after the other. With
`--pad-to 128` rows are padded as batches of the product are by default: padding is cleared in every call.

With `--unchecked` each repeat runs twice, with and without the checks of a call, in turns. With `--tensor 2` ranks are
a grid of data and tensor ranks. Each repeat runs twice: in that grid, where a rank attends with its part of the heads;
and in a flat job of the ranks that share documents, with as many heads. Both have the same plan. A grid with one data
rank exchanges nothing. A line of each rank has the median of the differences.
"""

import argparse
import cProfile
import importlib
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distca_hf.comm.groups import Members, grid_of_mesh, open_transport
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK
from distca_hf.kernels.flash4 import Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, Inputs, Kernel, Spans
from distca_hf.kernels.registry import kernel_name
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.forward_pass import ForwardPass
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.pass_calls import CallTensors, PassCalls
from lib.baselines.operators import OwnKeys, make_call
from lib.options import add_kernel, on_all_ranks, read_documents
from lib.parser import add_device, count, few, parser_of
from lib.rates import synchronize


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
    parser.add_argument("--pad-to", type=count, help="rows of a rank are padded to a multiple of this")
    parser.add_argument("--backward", action="store_true", help="also time backward")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--unchecked", action="store_true", help="also without the checks of a call, in turns")
    compared.add_argument("--tensor", type=count, default=1, help="tensor ranks; also a flat job, in turns")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spent its time in one more pass")
    options = parser.parse_args()
    options.lengths = [tokens for of_set in read_documents(parser, options.documents).values() for tokens in of_set]
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads} do not divide --heads {options.heads}")
    # NCCL opens groups of some ranks alone only in a job whose group is bound to no device.
    on_all_ranks(measure, options, bind=options.tensor == 1)


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Prints the time of every repeat on this rank, and medians of all ranks."""
    flat: Subject | None = None
    if options.tensor > 1:
        in_grid, of_data = _transports(options, device)
        subject = _subject(options, device, in_grid)
        flat = _subject(options, device, of_data)
    else:
        subject = _subject(options, device, open_transport(device, 60.0))
    times, backward_times, differences = [], [], []
    for repeat in range(options.repeats):
        times.append(_pass(options, device, subject, f"repeat {repeat}"))
        if options.backward:
            backward_times.append(_backward_pass(options, device, subject, f"repeat {repeat}"))
        if options.unchecked:
            with _unchecked():
                others = _pass(options, device, subject, f"repeat {repeat}, unchecked")
            differences.append(times[-1].beyond - others.beyond)
        if flat is not None:
            differences.append(times[-1].beyond - _pass(options, device, flat, f"repeat {repeat}, flat").beyond)
    if differences:
        what = "checks cost" if options.unchecked else f"{options.tensor} tensor ranks cost"
        words = f"rank {dist.get_rank()}: {what} {1e6 * statistics.median(differences):.1f} µs a call"
        print(f"{words} (median of {len(differences)} pairs of passes)", flush=True)
    _print_medians(times, subject, device)
    if options.backward:
        _print_backward_medians(backward_times, device)
    if options.profile:
        profile = cProfile.Profile()
        with torch.no_grad():
            for _ in range(4 * options.layers):
                profile.runcall(subject.attend)
        if dist.get_rank() == 0:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


@dataclass(frozen=True)
class Subject:
    """Calls of this rank that are timed."""

    kernel: Kernel  # that both call
    attend: Callable[[], object]  # one attention call of the product, forward
    attend_alone: Callable[[], object]  # FlashAttention's own call on the same rows
    alone_name: str  # of its function
    transport: Transport  # counts exchanges
    begin: Callable[[], object]  # begins another pass, and makes its first call: that one waits for the other ranks
    # attends in so many layers, and returns a function that differentiates them
    make_graph: Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the host for each call of a pass."""

    call: float  # of the product
    kernels: float  # in the kernel function, of the same
    alone: float  # FlashAttention's own call
    exchanges: float  # that a call starts

    @property
    def beyond(self) -> float:
        return self.call - self.kernels

    @property
    def more(self) -> float:
        return self.call - self.alone


def _pass(options: argparse.Namespace, device: torch.device, subject: Subject, name: str) -> PassTimes:
    """Times one pass of the product and as many calls of FlashAttention, and prints them."""
    begun = subject.transport.traffic.exchanges
    with _timed(subject.kernel) as spent, torch.no_grad():
        seconds = _seconds_of_a_call(options, device, subject.attend)
    exchanges = (subject.transport.traffic.exchanges - begun) / options.layers
    with torch.no_grad():
        alone = _seconds_of_a_call(options, device, subject.attend_alone)
    times = PassTimes(seconds, sum(spent) / options.layers, alone, exchanges)
    kernels = len(spent) // options.layers
    words = f"rank {dist.get_rank()}, {name}: {1e6 * seconds:.0f} µs a call, {1e6 * times.kernels:.0f} in"
    print(f"{words} {kernels} kernels, {1e6 * times.beyond:.0f} beyond; alone {1e6 * alone:.0f}", flush=True)
    return times


def _backward_pass(
    options: argparse.Namespace, device: torch.device, subject: Subject, name: str
) -> tuple[float, float, float]:
    """Times one backward pass, and prints seconds of a call: in all, in its kernels, beyond them."""
    subject.begin()
    differentiate = subject.make_graph(options.layers)
    dist.barrier()
    synchronize(device)
    with _timed(subject.kernel, "backward") as spent:
        began = time.perf_counter()
        differentiate()
        seconds = (time.perf_counter() - began) / options.layers
    synchronize(device)
    subject.begin()
    of_kernels, kernels = sum(spent) / options.layers, len(spent) // options.layers
    words = f"rank {dist.get_rank()}, {name}, backward: {1e6 * seconds:.0f} µs a call, {1e6 * of_kernels:.0f} in"
    print(f"{words} {kernels} kernels, {1e6 * (seconds - of_kernels):.0f} beyond", flush=True)
    return seconds, of_kernels, seconds - of_kernels


def _seconds_of_a_call(options: argparse.Namespace, device: torch.device, call: Callable[[], object]) -> float:
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(options.layers):
        call()
    seconds = (time.perf_counter() - began) / options.layers
    synchronize(device)
    return seconds


def _print_medians(times: Sequence[PassTimes], subject: Subject, device: torch.device) -> None:
    """Prints medians of every rank, and the largest of each figure."""
    names = ("call", "kernels", "beyond", "alone", "more", "exchanges")
    medians = [statistics.median(getattr(each, name) for each in times) for name in names]
    rows = [dict(zip(names, each, strict=True)) for each in _of_all_ranks(medians, device)]
    if dist.get_rank():
        return
    for name, row in [
        *((f"rank {rank}", row) for rank, row in enumerate(rows)),
        ("largest of all", {name: max(row[name] for row in rows) for name in names}),
    ]:
        call, kernels, beyond, alone, more = (f"{1e6 * row[part]:.0f}" for part in names[:-1])
        print(
            f"{name}, median of {len(times)}: a call with {row['exchanges']:.0f} exchanges takes {call} µs in all; "
            f"{kernels} µs in its kernels, {beyond} µs beyond them; {subject.alone_name} alone takes {alone} µs, so a "
            f"call takes {more} µs more",
            flush=True,
        )


def _print_backward_medians(times: Sequence[tuple[float, float, float]], device: torch.device) -> None:
    """Prints the largest medians of all ranks."""
    medians = [statistics.median(seconds) for seconds in zip(*times, strict=True)]
    worst = [max(of_ranks) for of_ranks in zip(*_of_all_ranks(medians, device), strict=True)]
    if not dist.get_rank():
        call, of_kernels, beyond = (f"{1e6 * seconds:.0f}" for seconds in worst)
        words = f"a call takes {call} µs in all; {of_kernels} µs in its kernels, {beyond} µs beyond them"
        print(f"largest of all, backward, median of {len(times)}: {words}", flush=True)


def _of_all_ranks(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """Returns the numbers of every rank."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [each.tolist() for each in ranks]


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


def _subject(options: argparse.Namespace, device: torch.device, transport: Transport) -> Subject:
    """Returns an attention call of this rank's rows, and FlashAttention's own. The call has a placed plan as in the
    middle of training: every rank has agreed to it."""
    config = DistCAConfig(kernel=options.kernel)
    topology = config.topology(transport.world_size)
    layout = place(options.lengths, transport.world_size)
    plan = plan_in_place(layout if options.pad_to is None else layout.padded(options.pad_to, sys.maxsize))
    mine = rank_plan(plan, transport.rank, config.num_chunks(topology))
    routings = {mine.mask: on_device(mine, device)}
    live = LivePlan(0, Planned(lambda: routings, None, mine.facts, plan.fingerprint), transport, config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(live.num_rows, heads, options.head_dim, device=device, dtype=dtype)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    layer = torch.tensor(0, device="cpu")  # enabled models say which one attends
    scale = options.head_dim**-0.5
    # As of a pass before, so that later calls are not compared.
    before = PassCalls([CAUSAL_MASK], [CallTensors.of(q, k, v)], [])

    def attend() -> object:
        return flash_attn(q, k, v, AttentionSpec(scale), live.handle, layer)  # layers make their spec in each call

    def begin() -> object:
        live.begin_forward_pass(None, {}, before=before)
        with torch.no_grad():
            return attend()

    def make_graph(layers: int) -> Callable[[], object]:
        """Outputs of a layer are the queries of the next one; each has keys and values of its own."""
        leaves = [q.detach().requires_grad_()]
        [out] = leaves
        for _ in range(layers):
            own_k, own_v = (x.detach().requires_grad_() for x in (k, v))
            leaves += [own_k, own_v]
            out = flash_attn(out, own_k, own_v, AttentionSpec(scale), live.handle, layer)[0]
        return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out))

    begin()
    kernel = live.lookup.kernel(q, k, v, AttentionSpec(scale))
    held = [stop - start for _, start, stop in plan.layout.held_by(transport.rank)]
    rows = slice(0, sum(held))
    inputs = Inputs(q[rows], k[rows], v[rows])
    spans = make_call(0, held, held, OwnKeys(rows), device).spans
    name, attend_alone = _own_call(kernel, inputs, spans, scale)
    return Subject(kernel, attend, attend_alone, name, transport, begin, make_graph)


def _own_call(kernel: Kernel, inputs: Inputs, spans: Spans, scale: float) -> tuple[str, Callable[[], object]]:
    """Returns FlashAttention 4's public function and its name, if that kernel is used, or else the kernel's own."""
    if isinstance(kernel, Flash4Kernel):
        public = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        return public.__name__, lambda: public(*inputs, **spans.by_name, softmax_scale=scale, causal=True)
    return f"the kernel {kernel_name(kernel)}", lambda: kernel.forward(inputs, spans, AttentionSpec(scale))


@contextmanager
def _timed(kernel: Kernel, name: str = "forward") -> Iterator[list[float]]:
    """Seconds of every call of a kernel's function that is made within."""
    spent: list[float] = []
    function = getattr(type(kernel), name)

    def timed(*arguments: Any) -> object:
        began = time.perf_counter()
        results = function(*arguments)
        spent.append(time.perf_counter() - began)
        return results

    with mock.patch.object(type(kernel), name, timed):
        yield spent


if __name__ == "__main__":
    main()
