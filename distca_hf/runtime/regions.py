"""Regions: parts of a model that activation checkpointing runs in forward, and once more in backward.

    forward         attention ── what is kept ──▶ region
    recomputation   attention ◀── what is kept ── region

Checkpointing enters a context for each of the two (`context_fn` of `torch.utils.checkpoint.checkpoint`), and attention
reads from it which region runs. Calls are matched by their order.
"""

from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar


class Region(Protocol):
    """Keeps something of each attention call until recomputation."""

    def begin(self, recomputes: bool) -> None:
        """Begins a run, forward or recomputation. With `retain_graph` there may be several recomputations."""
        ...


AnyRegion = TypeVar("AnyRegion", bound=Region)


class RegionRun(Generic[AnyRegion]):
    """One run of a region: a context.

    Attributes:
        region: what it is a run of.
        recomputes: whether it is a recomputation.
        outer: the run around this one while it is entered; None if there is none.
    """

    def __init__(self, region: AnyRegion, *, recomputes: bool) -> None:
        self.region, self.recomputes = region, recomputes
        self.outer: RegionRun[Any] | None = None

    def __enter__(self) -> Self:
        self.region.begin(self.recomputes)
        self.outer = _current.get()
        _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.set(self.outer)
        self.outer = None


# Per thread and context, because autograd recomputes in its own threads.
_current: ContextVar[RegionRun[Any] | None] = ContextVar("distca_region", default=None)


def current_run() -> RegionRun[Any] | None:
    """Returns the innermost run that the caller's thread is in; None outside of our regions."""
    return _current.get()


def runs_of(region: AnyRegion) -> tuple[RegionRun[AnyRegion], RegionRun[AnyRegion]]:
    """Returns the contexts of forward and of recomputation."""
    return RegionRun(region, recomputes=False), RegionRun(region, recomputes=True)


def check_call(number: int, num_calls: int, remedy: str) -> None:
    """Checks that forward made a call, counted from 0.

    Raises:
        RuntimeError: there were fewer calls.
    """
    if number >= num_calls:
        raise RuntimeError(
            f"recomputation made more than the {num_calls} attention calls of its forward pass; {remedy}"
        )
