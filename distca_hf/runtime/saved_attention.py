"""Saved attention: a checkpointed region keeps the outputs of its attention calls, and recomputation takes them.

    forward         operator ── outputs ──▶ region
    recomputation   operator ◀── outputs ── region      no kernel runs, and nothing is exchanged

Torch's selective checkpointing does the same with a mode that sees every operator of a layer, in Python. That costs
the host more than attention does. Here only our operators look whether they are in a region. Calls are matched by
their order.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self, TypeVarTuple

import torch


Inputs = TypeVarTuple("Inputs")
Outputs = tuple[torch.Tensor, ...]


class Region(Protocol):
    """Keeps outputs of the attention calls of one checkpointed region."""

    def begin(self) -> None:
        """Begins recomputation; with `retain_graph` perhaps not for the first time."""
        ...

    def save(self, outputs: Outputs) -> None:
        """Keeps the outputs of the next call in forward."""
        ...

    def take(self) -> Outputs:
        """Returns the outputs of the next call, as new tensors."""
        ...


class DeviceRegion:
    """Keeps outputs where they are."""

    def __init__(self) -> None:
        self._saved: list[list[tuple[torch.Tensor, int]]] = []
        self._taken = 0

    def begin(self) -> None:
        """Begins recomputation; with `retain_graph` perhaps not for the first time."""
        self._taken = 0

    def save(self, outputs: Outputs) -> None:
        """Keeps detached aliases: an operator's outputs get a history, which would hold the region in turn."""
        self._saved.append([(x.detach(), x._version) for x in outputs])

    def take(self) -> Outputs:
        """Returns the outputs of the next call.

        Raises:
            RuntimeError: recomputation makes more calls than forward did, or outputs were changed in place since.
        """
        check_call(self._taken, len(self._saved))
        saved, self._taken = self._saved[self._taken], self._taken + 1
        if any(x._version != version for x, version in saved):
            raise RuntimeError(
                "the output of an attention call was changed in place after it was saved for recomputation; change a "
                "copy of it, or attend again with checkpointed_attention='recompute'"
            )
        return tuple(x.detach() for x, _ in saved)


def check_call(number: int, num_calls: int) -> None:
    """Checks that forward made a call, counted from 0.

    Raises:
        RuntimeError: there were fewer calls.
    """
    if number >= num_calls:
        raise RuntimeError(
            f"recomputation made more than the {num_calls} attention calls of its forward pass; "
            "checkpointed_attention='recompute' attends again"
        )


class RegionPass:
    """One pass of a region, forward or recomputation: a context of `torch.utils.checkpoint.checkpoint`."""

    def __init__(self, region: Region, *, recomputes: bool) -> None:
        self._region, self._recomputes = region, recomputes
        self._outer: RegionPass | None = None

    def __enter__(self) -> Self:
        if self._recomputes:
            self._region.begin()
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.set(self._outer)
        self._outer = None

    def run(self, operator: Callable[[], Outputs]) -> Outputs:
        """Returns the outputs of a call of attention, computed or saved. A region around this one keeps them, too: its
        recomputation runs forward of this one again."""
        if self._recomputes:
            return self._region.take()
        outputs = operator() if self._outer is None else self._outer.run(operator)
        self._region.save(outputs)
        return outputs


# Of a thread and context, because autograd recomputes in threads of its own.
_current: ContextVar[RegionPass | None] = ContextVar("distca_saved_region", default=None)


def saved_in_regions(function: Callable[[*Inputs], Any]) -> Callable[[*Inputs], Any]:
    """Returns an operator's function that takes its outputs from the region that is recomputed, if there is one."""

    @functools.wraps(function)
    def call(*given: *Inputs) -> Any:
        current = _current.get()
        return function(*given) if current is None else current.run(functools.partial(function, *given))

    return call


def saving_contexts() -> tuple[RegionPass, RegionPass]:
    """Returns contexts as the `context_fn` of checkpointed modules; called once for each region and forward pass."""
    return region_passes(DeviceRegion())


def region_passes(region: Region) -> tuple[RegionPass, RegionPass]:
    """Returns forward and recomputation of a region."""
    return RegionPass(region, recomputes=False), RegionPass(region, recomputes=True)
