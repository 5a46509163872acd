"""Posted plans: plans of micro-batches that attention servers have, and attention calls that are made with them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.taking import PostingTransport
from distca_hf.cost import TokenBytes
from distca_hf.errors import ServerLostError
from distca_hf.flops import ATTENTION_BACKWARD
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.planning.plan import Plan
from distca_hf.runtime.layer_kinds import AnnouncedCall, Posted
from distca_hf.runtime.pending_traces import NotedPass
from distca_hf.servers.orders import DTYPES, CallOrder, Kind, PassOrder, Phase
from distca_hf.servers.served_plans import plan_to_integers
from distca_hf.servers.served_traces import OrderedPass, ReportedPass
from distca_hf.servers.served_transport import ServedTransport
from distca_hf.servers.speeds import Stopwatch
from distca_hf.trace_file import TraceFile
from distca_hf.traces import RankTrace


class MeasuredCalls(Posted):
    """Measures the calls of a plan, and posts nothing: on a server, and on trainers whose servers are all lost.

    Args:
        rank: of this process in the plan.
        stopwatch: measures its kernels; None where nobody asks for their times.
    """

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
        """Measures kernels that follow as those of a call, of so many times the operations of forward."""
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
    """A plan that servers have: its number, and the calls that are made with it. Servers may drop it when this object
    is gone on the trainers.

    Args:
        transport: to the servers.
        micro_batch: its number, for messages.
        num_chunks: chunks of the exchange in forward.
        fingerprint, integers: of the plan, and the plan itself.
    """

    def __init__(
        self, transport: ServedTransport, micro_batch: int, num_chunks: int, fingerprint: int, integers: IntArray
    ) -> None:
        super().__init__(transport.rank, transport.speeds.stopwatch)
        self._transport, self._roster, self.room_bytes = transport, transport.roster, transport.room_bytes
        self.ranks = tuple(member.server for member in transport.members)
        self._slots = Slots()
        self._posting = micro_batch, num_chunks, fingerprint, integers
        self._number = transport.order_plan(self, *self._posting)

    def again(self) -> Self:
        return type(self)(self._transport, *self._posting)

    def runs_again(self, error: Exception) -> bool:
        transport = self._transport
        return isinstance(error, ServerLostError) and transport.in_step and transport.spoiled is not None

    def traced(self, device: torch.device, file: TraceFile, token_bytes: TokenBytes, trace: RankTrace) -> NotedPass:
        text = ReportedPass(str(file.folder.absolute()), token_bytes, trace).text()
        self._order_pass(Kind.BEGIN_PASS, text=text)
        return OrderedPass(device, self.end_forward)

    def end_forward(self, backward_calls: int) -> None:
        """Tells servers that the forward pass of a traced pass has ended, and how many calls of backward follow."""
        self._order_pass(Kind.END_FORWARD, backward_calls)

    def _order_pass(self, kind: Kind, backward_calls: int = 0, text: str = "") -> None:
        transport = self._transport
        if transport.spoiled is None and transport.roster == self._roster:  # else it runs again, or with another plan
            transport.order_pass(kind, PassOrder(self._number, backward_calls, text))

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
        """Posts an attention call; for the last two arguments see `CallOrder`.

        Raises:
            ServerLostError: this step is spoiled.
        """
        if self._transport.spoiled is not None:
            raise ServerLostError(self._transport.spoiled)
        q, k, v, spec, _ = call
        shapes, dtype = (q.shape[1], k.shape[1], q.shape[2], v.shape[2]), DTYPES.index(q.dtype)
        self._transport.order_call(CallOrder(self._number, phase, *shapes, dtype, slot, has_sinks, tuple(spec)))


class TrainerTransport(ServedTransport, PostingTransport):
    """Transport of a trainer with attention servers, which plans are posted to."""

    def post(self, plan: Plan | None, micro_batch: int, num_chunks: int) -> Posted:
        if plan is None:
            return MeasuredCalls(self.rank, self.speeds.stopwatch)
        return PostedPlan(self, micro_batch, num_chunks, plan.fingerprint, plan_to_integers(plan))


class Slots:
    """Numbers under which attention servers keep rows, from forward until one backward pass."""

    def __init__(self) -> None:
        self._last, self._open = 0, set[int]()

    def open(self) -> int:
        """Returns the next number."""
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
    """A kernel whose calls are measured.

    Args:
        kernel: computes.
        measure: returns a context that each call is made in.
    """

    def __init__(self, kernel: Kernel, measure: Callable[[], AbstractContextManager[object]]) -> None:
        self._kernel, self._measure = kernel, measure

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        """Computes as the kernel does."""
        with self._measure():
            return self._kernel.forward(inputs, spans, spec, room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        """Writes gradients as the kernel does."""
        with self._measure():
            self._kernel.backward(dout_TNV, saved, gradients, spans, spec)
