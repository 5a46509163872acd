"""Pass layers: which layers of a forward pass hold rows of other ranks for backward, and when.

forward    layer 0 holds all until backward   │ layer 1 recomputed: holds what it received, or nothing
backward                                      │ layers of one checkpointed region hold all at the same time
"""

from collections.abc import Callable
from typing import NamedTuple

from distca_hf.cost import CAUSAL_LAYERS, LayerMasks


# Of each checkpointed region whose attention is recomputed: windows of its layers in tokens, 0 without one.
Regions = tuple[tuple[int, ...], ...]


class HeldLayers(NamedTuple):
    """Layers of one kind that hold rows of other ranks.

    Attributes:
        saved: layers that hold what backward needs from forward on.
        recomputed: all other layers: they attend again before their backward.
        together: most of these that one region recomputes, so that they hold what backward needs at the same time.
    """

    saved: int = 1
    recomputed: int = 0
    together: int = 0


class PassLayers(NamedTuple):
    """Layers of a forward pass.

    Attributes:
        attention_calls: of the pass, as far as is known before the first one.
        layer_masks: masks of the model, each with the number of its layers.
        regions: whose attention is recomputed.
    """

    attention_calls: int = 1
    layer_masks: LayerMasks = CAUSAL_LAYERS
    regions: Regions = ()

    def of(self, window_tokens: int, longest_document_tokens: int) -> HeldLayers:
        """Returns those of one kind, of which there is at least one. Where no layer was known to have this window, all
        may have it.

        Args:
            window_tokens: 0 for layers without a window.
            longest_document_tokens: a window of so many tokens is none.
        """

        def in_kind(tokens: int) -> bool:
            return (tokens if tokens < longest_document_tokens else 0) == window_tokens

        layers = [(mask.window_tokens or 0, count) for mask, count in self.layer_masks]
        if not any(in_kind(tokens) for tokens, _ in layers):
            return self._held(lambda tokens: True)
        return self._held(in_kind)

    def _held(self, counts: Callable[[int], bool]) -> HeldLayers:
        total = sum(count for _, count in self.layer_masks)
        layers = sum(count for mask, count in self.layer_masks if counts(mask.window_tokens or 0))
        of_regions = [sum(map(counts, windows)) for windows in self.regions]
        calls = self.attention_calls / total  # of a layer: some models run a layer several times
        recomputed = round(calls * sum(of_regions))
        saved = max(0 if recomputed else 1, round(calls * layers) - recomputed)
        return HeldLayers(saved, recomputed, max(of_regions, default=0))


# Of a pass of which nothing is known.
ONE_LAYER = PassLayers()
