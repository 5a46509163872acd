"""Waiting: what came from other ranks in forward waits for checkpointing to compute attention again.

    forward     attend ── keys and queries of other ranks ──┐          backward    attend again, without fetching them
                                                            └────────▶

Otherwise the same rows would travel once more, just when gradients and weights of sharded layers travel, too. They
take less memory than attention outputs: only rows of documents that span ranks, and no queries if all stay where they
are. Results of guests are computed again, and sent home again.

Checkpointing runs a region of a model in one context, and its recomputation in another (`context_fn` of
`torch.utils.checkpoint.checkpoint`). They tell the operator which of the two it is in; which call is which is known by
their order.
"""

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

from distca_hf.runtime.residency import Received


class Region:
    """Attention calls of a checkpointed region: what each received, or None if that does not wait."""

    def __init__(self) -> None:
        self._received: list[Received | None] = []

    def begin(self) -> None:
        """The region runs forward: nothing has been received yet."""
        self._received.clear()

    def keep(self, received: Received | None) -> None:
        """The next call's, in forward."""
        self._received.append(received)

    def of_call(self, number: int) -> Received | None:
        """What a call received in forward.

        Raises:
            RuntimeError: there were fewer calls.
        """
        if number >= len(self._received):
            raise RuntimeError(
                f"recomputation made more than the {len(self._received)} attention calls of its forward pass; "
                "kv_residency='refetch' exchanges again"
            )
        return self._received[number]


class Scope:
    """The time in which a region runs forward, or is recomputed; with `retain_graph` perhaps several times."""

    def __init__(self, region: Region, *, recomputes: bool) -> None:
        self.recomputes = recomputes
        self._region, self._calls = region, 0
        self._outer: Token[Scope | None] | None = None

    def __enter__(self) -> Self:
        self._calls = 0
        if not self.recomputes:
            self._region.begin()
        self._outer = _scope.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outer is not None
        _scope.reset(self._outer)
        self._outer = None

    def keep(self, received: Received | None) -> None:
        """Keeps what a call of forward received."""
        self._region.keep(received)

    def take(self) -> Received | None:
        """What the next call received in forward."""
        number, self._calls = self._calls, self._calls + 1
        received = self._region.of_call(number)
        return None if received is None else received.once_more()


_scope: ContextVar[Scope | None] = ContextVar("distca_waiting", default=None)


def current_scope() -> Scope | None:
    """Where the caller's thread is; None outside checkpointed regions that keep what they receive."""
    return _scope.get()


def waiting_contexts() -> tuple[Scope, Scope]:
    """The `context_fn` of checkpointed modules; called once for each region and forward pass."""
    region = Region()
    return Scope(region, recomputes=False), Scope(region, recomputes=True)
