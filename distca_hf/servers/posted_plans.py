"""Posted plans: plans of micro-batches that attention servers have, and attention calls that are made with them."""

from collections.abc import Sequence

import torch

from distca_hf.arrays import IntArray
from distca_hf.errors import ServerLostError
from distca_hf.servers.orders import DTYPES, CallOrder, Kind, PassOrder, Phase
from distca_hf.servers.served_transport import ServedTransport


class PostedPlan:
    """A plan that servers have: its number, and the calls that are made with it. Servers may drop it when this object
    is gone on the trainers.

    Args:
        transport: to the servers.
        micro_batch: its number, for messages.
        num_chunks: chunks of the exchange in forward.
        fingerprint, integers: of the plan, and the plan itself.

    Attributes:
        roster: number of the connection that it was planned for.
        servers: numbers of the servers that take part, in the order of their ranks.
        room_bytes: that rows may take on each server until backward.
    """

    def __init__(
        self, transport: ServedTransport, micro_batch: int, num_chunks: int, fingerprint: int, integers: IntArray
    ) -> None:
        self._transport, self.roster, self.room_bytes = transport, transport.roster, transport.room_bytes
        self.servers = tuple(member.server for member in transport.members)
        self._order = micro_batch, num_chunks, fingerprint, integers
        self._number = transport.order_plan(self, *self._order)

    def again(self) -> "PostedPlan":
        """Posts the same plan under another number, for one more pass."""
        return PostedPlan(self._transport, *self._order)

    @property
    def is_spoiled(self) -> bool:
        """Whether a server was lost in this step: attention gives zeros."""
        return self._transport.in_step and self._transport.spoiled is not None

    def begin_pass(self, text: str) -> None:
        """Has servers trace the calls of a pass that begins. See `PassOrder`."""
        self._order_pass(Kind.BEGIN_PASS, text=text)

    def end_forward(self, backward_calls: int) -> None:
        """Tells servers that the forward pass of a traced pass has ended, and how many calls of backward follow."""
        self._order_pass(Kind.END_FORWARD, backward_calls)

    def _order_pass(self, kind: Kind, backward_calls: int = 0, text: str = "") -> None:
        transport = self._transport
        if transport.spoiled is None and transport.roster == self.roster:  # else it runs again, or with another plan
            transport.order_pass(kind, PassOrder(self._number, backward_calls, text))

    def call(
        self,
        phase: Phase,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGV: torch.Tensor,
        spec: Sequence[float],
        slot: int = 0,
        has_sinks: bool = False,
    ) -> None:
        """Posts an attention call on tensors like these.

        Args:
            spec, slot, has_sinks: see `CallOrder`.

        Raises:
            ServerLostError: this step is spoiled.
        """
        if self._transport.spoiled is not None:
            raise ServerLostError(self._transport.spoiled)
        shapes = q_TNH.shape[1], k_TGH.shape[1], q_TNH.shape[2], v_TGV.shape[2]
        dtype = DTYPES.index(q_TNH.dtype)
        self._transport.order_call(CallOrder(self._number, phase, *shapes, dtype, slot, has_sinks, tuple(spec)))
