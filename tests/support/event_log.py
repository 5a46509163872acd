"""Event log: what a layer's attention does on one rank, in order, over a corpus of random plans.

    start forward, keys            2,0,3 sent, 0,0,1 received, rows of 96 bytes
    forward reference              queries (5, 4, 8) of 0,2,5, keys (5, 2, 8) of 0,2,5
    spent local
    wait forward, keys
    copy index_copy_               (4, 12)

Equal results and equal exchanges do not show what runs while an exchange is under way: these lines do. Run it to see
the lines of some cases, or to write the digests of all of them after a change of the order that is meant:

    python -m support.event_log 17 42       in tests/
    python -m support.event_log > property/event_orders.json
"""

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.device_routing import on_device
from distca_hf.runtime.layer_kinds import Planned
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pending_traces import PassTrace
from distca_hf.servers.served_plans import Servers
from distca_hf.testing import NotedTransport, rows_of_rank, run_ranks
from distca_hf.traces import PassPart, Spent
from support.layouts import packed_layout, padding_rows, random_layout, random_plan, striped_layout
from support.parity import HEADS, SCALE


CASES = range(112)
KINDS = ("placed", "packs", "in place", "moved", "moved heads", "striped", "served")
# Operators that copy or add rows, as far as the package asks for them by name.
COPIES = ("index_select", "index_copy_", "index_add_", "cat")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class OrderCase:
    """One case of the corpus: a plan, and how a layer attends with it.

    Attributes:
        again: whether forward runs once more from what it received, as recomputation does.
    """

    kind: str
    plan: Plan
    heads: tuple[int, int, int, int]
    window_tokens: int
    num_chunks: int
    kv_residency: Residency
    has_sinks: bool
    again: bool

    @classmethod
    def draw(cls, number: int) -> "OrderCase":
        """Returns the case of a number: each kind on 1 to 4 ranks."""
        rng = random.Random(number)
        kind, num_ranks = KINDS[number % len(KINDS)], 1 + number // len(KINDS) % 4
        plan = _plan_of(kind, rng, num_ranks)
        heads = rng.choice([heads for heads in HEADS if heads[1] % plan.tasks.head_groups == 0])
        has_window = kind in ("placed", "packs", "in place", "striped") and rng.random() < 1 / 2
        return cls(
            kind,
            plan,
            heads,
            rng.randint(1, max(1, plan.layout.longest_document_tokens)) if has_window else 0,
            rng.choice([1, 1, 2, 3]),
            rng.choice(["refetch", "keep"]),
            rng.random() < 1 / 3,
            rng.random() < 1 / 3,
        )


def _plan_of(kind: str, rng: random.Random, num_ranks: int) -> Plan:
    if kind == "placed":
        layout = place([rng.randint(1, 30) for _ in range(rng.randint(0, 8))] + [rng.randint(60, 120)], num_ranks)
        return plan_in_place(layout.padded(8, int(layout.rank_tokens.max()) + 8))
    if kind == "striped":
        return plan_in_place(striped_layout(rng, num_ranks), rng.choice([1, 2, 4]))
    if kind == "served":
        servers = Servers((rng.uniform(0.2, 1),), rng.random() < 1 / 2)
        return servers.plan(random_layout(rng, num_ranks), rng.choice([1, 2]))
    layout = packed_layout(rng, num_ranks, 40) if kind == "packs" else random_layout(rng, num_ranks)
    if kind == "moved":
        return random_plan(rng, layout)
    return random_plan(rng, layout, rng.choice([2, 3, 4])) if kind == "moved heads" else plan_in_place(layout)


class EventLog:
    """Lines of one rank; notes nothing while a kernel computes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_in_kernel = False

    def note(self, event: str, *facts: object) -> None:
        """Adds a line."""
        if not self.is_in_kernel:
            self.lines.append(" ".join([event.ljust(30), ", ".join(map(str, facts))]).rstrip())

    def started(self, asked: AllToAll) -> None:
        """Adds the start of an exchange."""
        sent, received = (",".join(map(str, counts)) for counts in (asked.send_counts, asked.receive_counts))
        rows = f"{sent} sent", f"{received} received", f"rows of {asked.row_bytes} bytes"
        self.note(f"start {_place(asked)}", *rows)

    def waited(self, asked: AllToAll) -> None:
        """Adds the wait for an exchange."""
        self.note(f"wait {_place(asked)}")


def _place(asked: AllToAll) -> str:
    return ", ".join(asked.where.split(", ")[-2:])


class NotedKernel:
    """Notes calls of a kernel with shapes, offsets and how it attends."""

    def __init__(self, kernel: Kernel, log: EventLog) -> None:
        self.kernel, self._log = kernel, log

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        """Attends."""
        self._note(
            "forward", inputs.q_TNH, inputs.k_SGH, spans, spec, f"into {'new' if room is NEW else 'given'} rows"
        )
        self._log.is_in_kernel = True
        try:
            return self.kernel.forward(inputs, spans, spec, room)
        finally:
            self._log.is_in_kernel = False

    def backward(
        self, dout: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        """Derives."""
        self._note("backward", saved.q_TNH, saved.k_SGH, spans, spec)
        self._log.is_in_kernel = True
        try:
            self.kernel.backward(dout, saved, gradients, spans, spec)
        finally:
            self._log.is_in_kernel = False

    def _note(
        self, what: str, q: torch.Tensor, k: torch.Tensor, spans: Spans, spec: AttentionSpec, *more: str
    ) -> None:
        rows = [f"{list(x.shape)} of {[*offsets]}" for x, offsets in ((q, spans.queries), (k, spans.keys))]
        self._log.note(what, f"queries {rows[0]}", f"keys {rows[1]}", *spec[:-1], *more)


class NotedTrace(PassTrace):
    """Notes the marks of a trace."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def begin(self, part: PassPart, layer: int, window_tokens: int) -> None:
        """Notes the beginning of a call."""
        self._log.note(f"begin {part.name.lower()}", layer, window_tokens)

    def spent(self, use: Spent) -> None:
        """Notes the end of a span."""
        self._log.note(f"spent {use.name.lower()}")


class NotedCopies(TorchDispatchMode):
    """Notes operators that copy rows, outside of kernels."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            moved = args[3] if name in ("index_copy_", "index_add_") else result
            self._log.note(f"copy {name}", list(moved.shape), moved.dtype)
        return result


def events_of(case: OrderCase) -> list[list[str]]:
    """Returns the lines of each rank: forward and backward of a first layer and of one alike, without autograd."""
    layout, plan = case.plan.layout, case.plan
    heads, kv_heads, dim, value_dim = case.heads
    mask = Mask(case.window_tokens) if case.window_tokens else CAUSAL_MASK
    spec = AttentionSpec(SCALE, window_tokens=case.window_tokens)
    config = DistCAConfig(kernel="reference", kv_residency=case.kv_residency)

    def run(transport: Transport) -> list[str]:
        rank, log = transport.rank, EventLog()
        full = on_device(rank_plan(plan, rank, case.num_chunks), CPU)
        routings = {CAUSAL_MASK: full}
        if mask != CAUSAL_MASK:
            routings[mask] = on_device(rank_plan(plan.of_window(mask), rank), CPU)
        noted: Any = NotedTransport(transport, log.started, log.waited)
        live = LivePlan(0, Planned(lambda: routings, None, full.facts, plan.fingerprint), noted, config)
        live.forward_pass.trace = NotedTrace(log)
        choose = live.lookup.kernel
        live.lookup.kernel = lambda *given: NotedKernel(choose(*given), log)  # type: ignore[method-assign]
        rows = len(rows_of_rank(layout, rank)) + int(padding_rows(layout)[rank])
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
        q, k, v, dout = (torch.zeros(rows, *shape, dtype=torch.float64) for shape in shapes)
        sinks = torch.zeros(heads, dtype=torch.float64) if case.has_sinks else None
        with torch.no_grad(), NotedCopies(log):
            for layer in range(2):
                log.note(f"layer {layer}")
                out, lse, kept = attend(q, k, v, spec, live, sinks_N=sinks)
                if case.again:
                    received = kept.received() if case.kv_residency == "keep" else None
                    out, lse, kept = attend(q, k, v, spec, live, received, sinks)
                attend_backward(dout, Attended(q, k, v, out, lse), kept, spec, live, case.has_sinks)
        return log.lines

    return run_ranks(layout.num_ranks, run)


def digest_of(events: Sequence[Sequence[str]]) -> str:
    """Returns a digest of the lines of all ranks."""
    return hashlib.blake2b(json.dumps(events).encode(), digest_size=8).hexdigest()


def main() -> None:
    numbers = list(map(int, sys.argv[1:]))
    if not numbers:
        digests = [digest_of(events_of(OrderCase.draw(number))) for number in CASES]
        sys.stdout.write(json.dumps(digests, indent=0) + "\n")
    for number in numbers:
        case = OrderCase.draw(number)
        for rank, lines in enumerate(events_of(case)):
            title = f"case {number}: {case.kind}, rank {rank} of {case.plan.layout.num_ranks}"
            sys.stdout.write("\n    ".join([title, *lines]) + "\n")


if __name__ == "__main__":
    main()
