"""Regions: parts of a model that activation checkpointing runs in forward, and again in backward.

    forward         attention ── what is kept ──▶ region
    recomputation   attention ◀── what is kept ── region

Checkpointing enters a context for each of the two (`context_fn` of `torch.utils.checkpoint.checkpoint`), which tells
attention the region that runs. Calls are matched by their order.

    RetainingRegion   keeps the rows that calls received: attention is computed again, without an exchange
    SavingRegion      keeps the outputs of calls: no kernel runs again, either
    TileRegion        the same for a part of a layer, inside another region or not

Layers with a state are computed again in both, from the halos and summaries that they received.

Torch's selective checkpointing also saves outputs, with a mode that sees every operator of a layer, in Python. That
costs the host more than attention does. Here only our operators check whether they are in a region.
"""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from distca_hf.runtime.retention import Received


Outputs = tuple[torch.Tensor, ...]
REMEDY = "checkpointed_attention='recompute' attends again"
EXCHANGES_AGAIN = "kv_residency='refetch' exchanges again"


class Region(Protocol):
    """Keeps something of each attention call until recomputation."""

    def begin(self, recomputes: bool) -> None:
        """Begins a run: forward or recomputation. With `retain_graph` there may be several recomputations."""
        ...


AnyRegion = TypeVar("AnyRegion", bound=Region)


class RegionRun(Generic[AnyRegion]):
    """One run of a region: a context."""

    def __init__(self, region: AnyRegion, *, recomputes: bool) -> None:
        self.region, self.recomputes = region, recomputes
        self.outer: RegionRun[Any] | None = None  # the enclosing run while this one is entered; None if there is none

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


# Returns the innermost run in the caller's thread; None outside our regions.
current_run = _current.get


def runs_of(region: AnyRegion) -> tuple[RegionRun[AnyRegion], RegionRun[AnyRegion]]:
    """Returns the contexts of forward and of recomputation."""
    return RegionRun(region, recomputes=False), RegionRun(region, recomputes=True)


def check_call(number: int, num_calls: int, remedy: str) -> None:
    """Checks that forward made a call, counted from 0. Raises RuntimeError if there were fewer calls."""
    if number >= num_calls:
        raise RuntimeError(f"recomputation made more than the {num_calls} calls of its forward pass; {remedy}")


class SavingRegion:
    """Keeps the outputs of its calls in place. `remedy` says what to do if recomputation makes more calls than forward
    did."""

    def __init__(self, remedy: str = REMEDY) -> None:
        self._remedy = remedy
        self._saved: list[list[tuple[torch.Tensor, int]]] = []
        self._taken = 0

    def begin(self, recomputes: bool) -> None:
        self._taken = 0

    def save(self, outputs: Outputs) -> None:
        """Keeps detached aliases: an operator's outputs get a history, which would in turn hold the region."""
        self._saved.append([(x.detach(), x._version) for x in outputs])

    def take(self) -> Outputs:
        """Returns the outputs of the next call, as new tensors. Raises RuntimeError if recomputation makes more calls
        than forward did, or outputs were changed in place since."""
        check_call(self._taken, len(self._saved), self._remedy)
        saved, self._taken = self._saved[self._taken], self._taken + 1
        if any(x._version != version for x, version in saved):
            raise RuntimeError(
                "the output of an attention call was changed in place after it was saved for recomputation; change a "
                "copy of it, or attend again with checkpointed_attention='recompute'"
            )
        return tuple(x.detach() for x, _ in saved)


class RetainingRegion:
    """Received rows of every attention call of a checkpointed region; None if they are not kept."""

    def __init__(self) -> None:
        self.states = SavingRegion(EXCHANGES_AGAIN)  # what layers with a state received
        self._received: list[Received | None] = []
        self._taken = 0

    def begin(self, recomputes: bool) -> None:
        """See `Region`. Forward forgets the calls of an earlier pass."""
        self._taken = 0
        if recomputes:
            self.states.begin(recomputes)
        else:
            self.states = SavingRegion(EXCHANGES_AGAIN)
            self._received.clear()

    def keep(self, received: Received | None) -> None:
        """Keeps the rows of the next call in forward."""
        self._received.append(received)

    def take(self) -> Received | None:
        """Returns the rows that the next call received in forward. Raises RuntimeError if recomputation makes more
        calls than forward did."""
        check_call(self._taken, len(self._received), EXCHANGES_AGAIN)
        received, self._taken = self._received[self._taken], self._taken + 1
        return None if received is None else received.once_more()


class TileRegion:
    """Keeps the outputs of its calls as saved tensors of autograd. So checkpointing around it, of any kind, drops them
    after forward, and restores them before backward."""

    def __init__(self) -> None:
        self._calls: list[Outputs] = []
        self._sizes: list[int] = []
        self._held: Any = None

    def begin(self, recomputes: bool) -> None:
        if recomputes:
            tensors = iter(self._held.grad_fn.saved_tensors)
            self._calls = [tuple(islice(tensors, size)) for size in self._sizes]

    def save(self, outputs: Outputs) -> None:
        """Does nothing: `note` is given the outputs of all calls, also those that selective checkpointing kept."""

    def note(self, outputs: Outputs) -> None:
        """Keeps detached aliases until `hold`: outputs have a history, which would hold the region."""
        self._calls.append(tuple(x.detach() for x in outputs))

    def is_only_output(self, output: torch.Tensor) -> bool:
        """Returns whether this is the output of the only call, perhaps in another shape."""
        outputs = self._calls[0][0] if len(self._calls) == 1 else None
        return outputs is not None and (outputs.data_ptr(), outputs.numel()) == (output.data_ptr(), output.numel())

    def hold(self) -> None:
        """Lets autograd save the outputs of all calls; called after forward."""
        anchor = torch.empty(0, requires_grad=True)  # a tensor with a history would hold the region
        # Kept whole, not only its node: older torch frees saved tensors with it.
        self._held = _Held.apply(anchor, *(x for outputs in self._calls for x in outputs))
        self._sizes, self._calls = [len(outputs) for outputs in self._calls], []

    def take(self) -> Outputs:
        """Returns the outputs of the next call, and keeps them no longer."""
        check_call(len(self._sizes) - len(self._calls), len(self._sizes), REMEDY)
        return self._calls.pop(0)


class _Held(torch.autograd.Function):
    """Saves tensors; its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return None, *[None for _ in ctx.saved_tensors]


def outputs_in(run: RegionRun[Any] | None, operator: Callable[[], Outputs], of_states: bool = False) -> Outputs:
    """Returns the outputs of a call, computed or saved. An enclosing region also keeps them: its recomputation runs
    forward of this one again. With `of_states` a layer with a state calls, not attention."""
    saving = _saving(run, of_states)
    if run is None or saving is None:
        return operator()
    if run.recomputes:
        taken: Outputs = saving.take()
        return taken
    outputs = outputs_in(run.outer, operator, of_states)
    saving.save(outputs)
    return outputs


def retaining_run(run: RegionRun[Any] | None) -> RegionRun[RetainingRegion] | None:
    """Returns the innermost run that keeps received rows: this one or one around it; None if there is none."""
    while run is not None and not isinstance(run.region, RetainingRegion):
        run = run.outer
    return run


def is_saved(run: RegionRun[Any] | None, of_states: bool = False) -> bool:
    """Returns whether forward saved the outputs of a call: then `outputs_in` does not compute them."""
    if run is None or _saving(run, of_states) is None:
        return False
    return run.recomputes or is_saved(run.outer, of_states)


def _saving(run: RegionRun[Any] | None, of_states: bool) -> Any:
    """Returns what saves outputs in a region; None if nothing does."""
    if run is None or not isinstance(run.region, RetainingRegion):
        return None if run is None else run.region
    return run.region.states if of_states else None


def retaining_contexts() -> tuple[RegionRun[RetainingRegion], RegionRun[RetainingRegion]]:
    """Returns contexts as the `context_fn` of checkpointed modules; called once for each region and forward pass."""
    return runs_of(RetainingRegion())


def saving_contexts() -> tuple[RegionRun[SavingRegion], RegionRun[SavingRegion]]:
    """Returns contexts as the `context_fn` of checkpointed modules; called once for each region and forward pass."""
    return runs_of(SavingRegion())
