"""Posted plans: plans of micro-batches that attention servers have, attention calls made with them, and traces of
passes.

    trainer                                                server
    reported pass begins ── begin: step, folder, layers ──▶ NotedPass ──▶ calls note moments ──▶ pending
    its forward pass ends ── end: calls of backward ──────▶                                        │
    next plan, or the membership is closed ───────────────▶ complete ones go to the server's file ◀┘

A trainer's order contains its own trace, with everything that is the same for all ranks of the pass. A server fills in
what differs. Other passes cost nothing, because they need no order.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch

from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes
from distca_hf.errors import ServerLostError
from distca_hf.flops import ATTENTION_BACKWARD
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.planning.plan import Plan
from distca_hf.runtime.forward_pass import ForwardPass
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pending_traces import (
    NotedPass,
    Pending,
    PendingTraces,
    bytes_of_layer,
    device_name,
    is_routed_by,
    memory_of,
    tasks_of,
)
from distca_hf.runtime.posted import AnnouncedCall, Posted, PostingTransport
from distca_hf.servers.orders import DTYPES, CallOrder, Kind, PassOrder, Phase
from distca_hf.servers.served_plans import plan_to_integers
from distca_hf.servers.served_transport import ServedTransport
from distca_hf.servers.speeds import Stopwatch
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.trace_file import TraceFile, read_trace
from distca_hf.traces import RankTrace


log = get_logger(__name__)


class MeasuredCalls(Posted):
    """Measures the calls of a plan, and posts nothing: on a server, and on trainers whose servers are all lost.
    `stopwatch` is None if times of kernels are not needed."""

    def __init__(self, rank: int, stopwatch: Stopwatch | None) -> None:
        self._rank, self._stopwatch = rank, stopwatch

    def again(self) -> Self:
        return self

    def forward(self, call: AnnouncedCall, keeps: bool) -> int:
        self._measure(call)
        return 0

    def backward(self, call: AnnouncedCall, slot: torch.Tensor, has_sinks: bool, keeps: bool) -> bool:
        self._measure(call, ATTENTION_BACKWARD)
        return keeps

    def _measure(self, call: AnnouncedCall, times: float = 1) -> None:
        """Measures the kernels that follow, which do `times` the operations of a forward call."""
        if self._stopwatch is not None and not call.spec.window_tokens:
            heads, dims = call.q_TNH.shape[1], call.q_TNH.shape[2] + call.v_TGV.shape[2]
            flops = 2 * dims * heads * call.facts.work[self._rank] // call.facts.rows_per_token
            self._stopwatch.begin_call(round(times * flops))

    def measured(self, kernel: Kernel, spec: AttentionSpec) -> Kernel:
        if self._stopwatch is None or spec.window_tokens:  # servers take no part in layers with windows
            return kernel
        return MeasuredKernel(kernel, self._stopwatch.kernel)

    def traced(self, device: torch.device, file: TraceFile, token_bytes: TokenBytes, trace: RankTrace) -> NotedPass:
        return NotedPass(device)


class PostedPlan(MeasuredCalls):
    """A plan that servers have: its number, and the calls made with it. Servers may drop it when this object is gone
    on the trainers."""

    def __init__(
        self, transport: ServedTransport, micro_batch: int, num_chunks: int, fingerprint: int, integers: IntArray
    ) -> None:
        super().__init__(transport.rank, transport.speeds.stopwatch)
        self._transport, self._membership, self.room_bytes = transport, transport.membership, transport.room_bytes
        self.ranks = tuple(member.server for member in transport.members)
        self._slots = Slots()
        self._posting = micro_batch, num_chunks, fingerprint, integers
        self._number = transport.order_plan(self, *self._posting)

    def again(self) -> Self:
        return type(self)(self._transport, *self._posting)

    def runs_again(self, error: Exception) -> bool:
        transport = self._transport
        return isinstance(error, ServerLostError) and transport.in_step and transport.failed is not None

    def traced(self, device: torch.device, file: TraceFile, token_bytes: TokenBytes, trace: RankTrace) -> NotedPass:
        text = ReportedPass(str(file.folder.absolute()), token_bytes, trace).text()
        self._order_pass(Kind.BEGIN_PASS, text=text)
        return OrderedPass(device, partial(self._order_pass, Kind.END_FORWARD))

    def _order_pass(self, kind: Kind, backward_calls: int = 0, text: str = "") -> None:
        transport = self._transport
        if (
            transport.failed is None and transport.membership == self._membership
        ):  # else it runs again, or with another plan
            transport.order(kind, PassOrder(self._number, backward_calls, text).numbers())

    def forward(self, call: AnnouncedCall, keeps: bool) -> int:
        slot = self._slots.open() if keeps else 0
        self._order(Phase.FORWARD, call, slot)
        super().forward(call, keeps)
        return slot

    def backward(self, call: AnnouncedCall, slot: torch.Tensor, has_sinks: bool, keeps: bool) -> bool:
        number = self._slots.close(slot)
        self._order(Phase.BACKWARD, call, number, has_sinks)
        return super().backward(call, slot, has_sinks, number > 0)

    def _order(self, phase: Phase, call: AnnouncedCall, slot: int, has_sinks: bool = False) -> None:
        """Posts an attention call; for slot and has_sinks see `CallOrder`."""
        if self._transport.failed is not None:
            raise ServerLostError(self._transport.failed)
        q, k, v, spec, _ = call
        shapes, dtype = (q.shape[1], k.shape[1], q.shape[2], v.shape[2]), DTYPES.index(q.dtype)
        order = CallOrder(self._number, phase, *shapes, dtype, slot, has_sinks, tuple(spec))
        self._transport.order(Kind.CALL, order.numbers())


class TrainerTransport(ServedTransport, PostingTransport):
    """Transport of a trainer that posts plans to attention servers."""

    def post(self, plan: Plan | None, micro_batch: int, num_chunks: int) -> Posted:
        if plan is None:
            return MeasuredCalls(self.rank, self.speeds.stopwatch)
        return PostedPlan(self, micro_batch, num_chunks, plan.fingerprint, plan_to_integers(plan))


class Slots:
    """Numbers under which attention servers keep rows, from forward until one backward pass."""

    def __init__(self) -> None:
        self._last, self._open = 0, set[int]()

    def open(self) -> int:
        self._last += 1
        self._open.add(self._last)
        return self._last

    def close(self, slot: torch.Tensor) -> int:
        """Returns the number of a slot (see `Kept`); 0 if it has none, or was closed before."""
        number = slot.shape[0]
        if number not in self._open:
            return 0
        self._open.discard(number)
        return number


class MeasuredKernel:
    """A kernel whose calls are measured."""

    def __init__(self, kernel: Kernel, measure: Callable[[], AbstractContextManager[object]]) -> None:
        self._kernel, self._measure = kernel, measure

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        with self._measure():
            return self._kernel.forward(inputs, spans, spec, room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        with self._measure():
            self._kernel.backward(dout_TNV, saved, gradients, spans, spec)


class OrderedPass(NotedPass):
    """Notes moments of a trainer, and tells servers when forward ends."""

    def __init__(self, device: torch.device, tell: Callable[[int], None]) -> None:
        super().__init__(device)
        self._tell: Callable[[int], None] | None = tell

    def end_forward(self, backward_calls: int) -> None:
        """Ends the forward pass, which `backward_calls` follow."""
        super().end_forward(backward_calls)
        if self._tell is not None:
            self._tell(backward_calls)
        self._tell = None  # servers keep a plan for as long as trainers hold it, and moments may be held for longer


class ReportedPass(NamedTuple):
    """Everything that a server must know about a pass to trace its part of it."""

    folder: str
    token_bytes: TokenBytes  # bytes of one token in one layer of the model
    trace: RankTrace  # trace of the reporting trainer, without calls

    def text(self) -> str:
        return json.dumps([self.folder, *vars(self.token_bytes).values(), self.trace.line()])

    @classmethod
    def of(cls, text: str) -> Self:
        folder, query, output, key_value, line = json.loads(text)
        return cls(folder, TokenBytes(query, output, key_value), read_trace(line, "an order of a trainer"))


@dataclass
class ServedTraces:
    """The traces of an attention server about one membership. They may be written only below `root`: the setting
    `report_folder`, or the working directory."""

    server: int
    device: torch.device
    root: Path

    def __post_init__(self) -> None:
        self._pending = PendingTraces()
        self._file, self._folder, self._refused = TraceFile(""), "", ""

    def begin(self, plan: LivePlan, text: str) -> None:
        reported = ReportedPass.of(text)
        root = self.root.resolve()
        if not Path(reported.folder).resolve().is_relative_to(root):
            if reported.folder != self._refused:
                self._refused = reported.folder
                log.warning(
                    "attention server %d writes no traces to %s, which is not below %s: set report_folder in the "
                    "recipe, or DISTCA_REPORT_FOLDER",
                    *(self.server, reported.folder, root),
                    extra=OF_THIS_RANK,
                )
            return
        noted = NotedPass(self.device)
        plan.forward_pass = ForwardPass(plan.transport, plan.micro_batch, trace=noted)
        if reported.folder != self._folder:
            self._file, self._folder = TraceFile(reported.folder), reported.folder
        trace = self._own(reported, plan)
        self._pending.add(self._file, Pending(trace, noted, self.device, self.server, time.perf_counter()))

    def write_complete(self) -> None:
        """Writes complete traces, without waiting."""
        self._pending.write_complete()

    def end(self) -> None:
        """Writes the last traces. Leaves out a pass that has not made all its calls: its step did not count."""
        self._pending.drop_incomplete()
        self._pending.flush()

    def _own(self, reported: ReportedPass, plan: LivePlan) -> RankTrace:
        """Returns the trainer's trace with the values of this server, which layers with a window do not change."""
        full = next(kind.plan for kind in plan.kinds if kind.plan.facts.window_tokens is None)
        kinds = tuple(
            replace(kind, tasks=tasks_of(full.tasks) if is_routed_by(kind, full) else ())
            for kind in reported.trace.kinds
        )
        sent, received = bytes_of_layer([full], kinds, reported.token_bytes)
        return replace(
            reported.trace,
            written=time.time(),
            rank=plan.transport.rank,
            device=device_name(self.device),
            tokens=0,
            kinds=kinds,
            sent_bytes=sent,
            received_bytes=received,
            memory=memory_of(self.device),
        )
