"""Saved attention: a checkpointed region keeps the outputs of its attention calls, and recomputation takes them.

No kernel runs then, and nothing is exchanged. Torch's selective checkpointing does the same with a mode that sees
every operator of a layer, in Python. That costs the host more than attention does. Here only our operators look
whether they are in a region.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVarTuple

import torch

from distca_hf.runtime.regions import RegionRun, check_call, current_run, runs_of
from distca_hf.runtime.retention import RetainingRegion


Inputs = TypeVarTuple("Inputs")
Outputs = tuple[torch.Tensor, ...]
REMEDY = "checkpointed_attention='recompute' attends again"


class DeviceRegion:
    """Keeps the outputs of its attention calls where they are."""

    def __init__(self) -> None:
        self._saved: list[list[tuple[torch.Tensor, int]]] = []
        self._taken = 0

    def begin(self, recomputes: bool) -> None:
        """See `Region`."""
        self._taken = 0

    def save(self, outputs: Outputs) -> None:
        """Keeps detached aliases: an operator's outputs get a history, which would hold the region in turn."""
        self._saved.append([(x.detach(), x._version) for x in outputs])

    def take(self) -> Outputs:
        """Returns the outputs of the next call, as new tensors.

        Raises:
            RuntimeError: recomputation makes more calls than forward did, or outputs were changed in place since.
        """
        check_call(self._taken, len(self._saved), REMEDY)
        saved, self._taken = self._saved[self._taken], self._taken + 1
        if any(x._version != version for x, version in saved):
            raise RuntimeError(
                "the output of an attention call was changed in place after it was saved for recomputation; change a "
                "copy of it, or attend again with checkpointed_attention='recompute'"
            )
        return tuple(x.detach() for x, _ in saved)


def saved_in_regions(function: Callable[[*Inputs], Any]) -> Callable[[*Inputs], Any]:
    """Returns an operator's function that takes its outputs from the region that is recomputed, if there is one."""

    @functools.wraps(function)
    def call(*given: *Inputs) -> Any:
        run = current_run()
        return function(*given) if run is None else _outputs(run, functools.partial(function, *given))

    return call


def _outputs(run: RegionRun[Any] | None, operator: Callable[[], Outputs]) -> Outputs:
    """Returns the outputs of a call of attention, computed or saved. A region around this one keeps them, too: its
    recomputation runs forward of this one again."""
    if run is None or isinstance(run.region, RetainingRegion):
        return operator()
    if run.recomputes:
        taken: Outputs = run.region.take()
        return taken
    outputs = _outputs(run.outer, operator)
    run.region.save(outputs)
    return outputs


def saving_contexts() -> tuple[RegionRun[DeviceRegion], RegionRun[DeviceRegion]]:
    """Returns contexts as the `context_fn` of checkpointed modules; called once for each region and forward pass."""
    return runs_of(DeviceRegion())
