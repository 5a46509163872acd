"""Pass layers: what ranks must know about the layers and calls of a forward pass before it begins.

Layers differ in how long they hold rows of other ranks for backward:

    forward    layer 0 holds all until backward   │ layer 1 recomputed: holds what it received, or nothing
    backward                                      │ layers of one checkpointed region hold all at the same time

Every pass must make the same calls, so that ranks know each other's exchanges. A layer's window decides which of its
rows travel; dtypes and heads decide how many bytes a row has.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, Mask
from distca_hf.errors import PlanError


# For each checkpointed region whose attention is recomputed: masks of its layers.
Regions = tuple[tuple[Mask, ...], ...]


class HeldLayers(NamedTuple):
    """How many layers of one kind hold rows of other ranks, and when.

    Attributes:
        saved: layers that hold the rows that backward needs from forward on.
        recomputed: all other layers; they attend again before their backward.
        together: most of the recomputed layers in one region; they hold the rows at the same time.
    """

    saved: int = 1
    recomputed: int = 0
    together: int = 0


class PassLayers(NamedTuple):
    """Layers of a forward pass.

    Attributes:
        attention_calls: number of attention calls of the pass, as far as it is known before the first pass.
        layer_masks: masks of the model's layers, each with the number of its layers.
        regions: regions whose attention is recomputed.
    """

    attention_calls: int = 1
    layer_masks: LayerMasks = CAUSAL_LAYERS
    regions: Regions = ()

    def of(self, kind: Mask, longest_document_tokens: int) -> HeldLayers:
        """Returns the layers of one kind, at least one. If no layer is known to have this mask, all may have it.

        Args:
            longest_document_tokens: a window that is at least this long counts as no window.
        """

        def in_kind(mask: Mask) -> bool:
            return mask.within(longest_document_tokens) == kind

        return self._held(in_kind if any(in_kind(mask) for mask, _ in self.layer_masks) else lambda mask: True)

    def _held(self, counts: Callable[[Mask], bool]) -> HeldLayers:
        total = sum(count for _, count in self.layer_masks)
        layers = sum(count for mask, count in self.layer_masks if counts(mask))
        of_regions = [sum(map(counts, masks)) for masks in self.regions]
        calls = self.attention_calls / total  # of a layer: some models run a layer several times
        recomputed = round(calls * sum(of_regions))
        saved = max(0 if recomputed else 1, round(calls * layers) - recomputed)
        return HeldLayers(saved, recomputed, max(of_regions, default=0))


# Layers of a pass about which nothing is known.
ONE_LAYER = PassLayers()


class CallTensors(NamedTuple):
    """Dtypes of an attention call's queries, keys and values, and their heads with dimensions."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    heads: tuple[torch.Size, torch.Size, torch.Size]

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> "CallTensors":
        """Returns dtypes and heads of these tensors."""
        return cls((q_TNH.dtype, k_TGH.dtype, v_TGV.dtype), (q_TNH.shape[1:], k_TGH.shape[1:], v_TGV.shape[1:]))

    @property
    def dtypes_in_words(self) -> str:
        """The dtypes as text; one if all three are the same."""
        return str(self.dtypes[0]) if len(set(self.dtypes)) == 1 else ", ".join(map(str, self.dtypes))

    @property
    def heads_in_words(self) -> str:
        """Number and dimension of heads, as text."""
        return ", ".join(f"{name} {tuple(heads)}" for name, heads in zip("qkv", self.heads, strict=True))


class PassCalls(NamedTuple):
    """Attention calls of a forward pass, without recomputed ones.

    Attributes:
        masks: mask of each call.
        tensors: dtypes and heads of each call.
    """

    masks: list[Mask]
    tensors: list[CallTensors]


def other_mask(now: Mask, before: Mask, where: str) -> PlanError:
    """Returns the error for a call whose mask is not that of the previous pass.

    Args:
        where: rank and call.
    """
    return PlanError(
        f"{where}: the layer attends with {now.in_words}, and with {before.in_words} in the pass before; other ranks "
        "exchange rows for that. Windows of layers cannot change after the first pass: enable the model again, on all "
        "ranks"
    )


def other_tensors(now: CallTensors, before: CallTensors, where: str) -> PlanError:
    """Returns the error to raise for a call with other dtypes or heads than in the pass before.

    Args:
        where: rank and call.
    """
    if now.dtypes != before.dtypes:
        words = f"in {now.dtypes_in_words}, and in {before.dtypes_in_words}"
    else:
        words = f"with heads {now.heads_in_words}, and with {before.heads_in_words}"
    return PlanError(
        f"{where}: the layer attends {words} in the pass before; other ranks exchange rows for that, and none of this "
        "layer were sent. Dtypes and heads of layers cannot change after the first pass: compute the layer as before, "
        "or enable the model again, on all ranks"
    )
