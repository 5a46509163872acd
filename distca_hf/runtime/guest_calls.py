"""Guests of a layer, from where they come to where they return: queries that other ranks hold and this one computes.

Made only where queries move. Their exchanges follow those of the keys, leg by leg.

Shape legend in `kernels.interface`; rows as in `planning.ranges`.
"""

from collections.abc import Sequence

import torch

from distca_hf.comm.transport import Transport
from distca_hf.kernels.interface import AttentionSpec, Kernel
from distca_hf.runtime.guest_flights import Homeward, Outward
from distca_hf.runtime.kernel_calls import BackwardCalls, ForwardCalls, empty_rows
from distca_hf.runtime.maps import LegMaps, QueryMaps
from distca_hf.runtime.residency import Kept
from distca_hf.runtime.store import Store, StoreGradients


class ForwardGuests:
    """Forward.

    Args:
        received: `[guest rows, ...]` guests that came before; the queries stay then.

    Attributes:
        kept: queries, outputs and log-sum-exps of guests, `[guest rows, ...]`; complete after the last leg.
    """

    def __init__(
        self,
        kernel: Kernel,
        q: torch.Tensor,
        v: torch.Tensor,
        moves: QueryMaps,
        spec: AttentionSpec,
        kv_heads: int,
        received: torch.Tensor | None,
    ) -> None:
        self._outward, guest_q = None, received
        if guest_q is None:
            self._outward = Outward([q], moves)
            guest_q = self._outward.tensors[0]
        out, lse = empty_rows(guest_q, v)
        self._calls = ForwardCalls(kernel, guest_q, out, lse, spec, kv_heads)
        self._homeward = Homeward([out, lse], moves)
        self.kept = guest_q, out, lse

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Queries of a leg leave for where they are guests."""
        if self._outward is not None:
            self._outward.start(leg.queries, transport, where)

    def attend(self, leg: LegMaps, store: Store, transport: Transport, where: str) -> None:
        """Waits for the leg's guests, attends, and sends their results home."""
        if self._outward is not None:
            self._outward.arrive(leg.queries)
        self._calls.attend(leg.guests, store.k, store.v)
        self._homeward.start(leg.queries, transport, where)

    def land(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Puts results that came home into `out` and `lse`."""
        self._homeward.land([out, lse])


class BackwardGuests:
    """Backward; what of forward was not kept comes once more.

    Args:
        of_queries: `[rows, ...]` output gradients, queries, outputs and log-sum-exps of this rank.
    """

    def __init__(
        self,
        kernel: Kernel,
        of_queries: Sequence[torch.Tensor],
        kept: Kept | None,
        moves: QueryMaps,
        spec: AttentionSpec,
        kv_heads: int,
    ) -> None:
        self._outward = Outward(of_queries if kept is None else of_queries[:1], moves)
        dout, q, out, lse = self._outward.tensors if kept is None else (*self._outward.tensors, *kept.guests)
        dq = torch.empty_like(q)
        self._calls = BackwardCalls(kernel, dout, q, out, lse, dq, spec, kv_heads)
        self._homeward = Homeward([dq], moves)

    def start(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """What backward needs of a leg's queries leaves for where they are guests."""
        self._outward.start(leg.queries, transport, where)

    def derive(self, leg: LegMaps, store: Store, gradients: StoreGradients) -> None:
        """Waits for the leg's guests, and derives their gradients and those of the keys that they read."""
        self._outward.arrive(leg.queries)
        self._calls.derive_stored(leg.guests, store, gradients)

    def send_home(self, leg: LegMaps, transport: Transport, where: str) -> None:
        """Sends gradients of the leg's queries home."""
        self._homeward.start(leg.queries, transport, where)

    def land(self, dq: torch.Tensor) -> None:
        """Puts gradients that came home into `dq`."""
        self._homeward.land([dq])
