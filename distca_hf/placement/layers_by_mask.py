"""Layers by mask: the masks of a model that differ for one micro-batch, and the pairs that windows leave out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import Cost, DocumentCost, LayerMasks, Mask


# Time of a query in a window layer beside its pairs, in pairs of full attention. FlashAttention 4 on an H200 needs
# 6.0, 1.5 and 1.13 times as long for a pair as in full attention, for windows of 128, 1024 and 4096 tokens.
WINDOW_QUERY_PAIRS = 512


@dataclass(frozen=True)
class LayersByMask:
    """The layers of a model by mask, where masks differ for one micro-batch.

    Attributes:
        widest: the mask with most pairs, full attention in nearly all models. Its work is made even exactly.
        windows: the other masks, all of them windows, with the number of layers that have each.
        widest_layers: layers that have the widest mask.
    """

    widest: Mask
    widest_layers: int
    windows: LayerMasks

    @classmethod
    def of(cls, layer_masks: LayerMasks, longest_document_tokens: int) -> "LayersByMask":
        """Sorts the layers of a model by mask. A window as long as every document is full attention.

        Raises:
            ConfigError: there are no layers, or fewer than 1 of a mask.
        """
        layers: Counter[Mask] = Counter()
        for mask, count in Cost(layer_masks).layers:
            layers[mask.within(longest_document_tokens)] += count
        (widest, widest_layers), *windows = sorted(layers.items(), key=lambda layer: -_width(layer[0]))
        return cls(widest, widest_layers, tuple(windows))

    @cached_property
    def cost(self) -> DocumentCost:
        """Cost of the widest mask."""
        return Cost(((self.widest, 1),))

    @property
    def longest_window(self) -> int:
        """Tokens of the longest window; 0 without windows."""
        return max((mask.window_tokens or 0 for mask, _ in self.windows), default=0)

    @cached_property
    def left_out_before(self) -> Callable[[int], float]:
        """Function of a position: time of the pairs that windows leave out of the queries before it, of all window
        layers together, in pairs of full attention."""
        weights = [(count * pair_time(mask), mask) for mask, count in self.windows]

        @cache
        def before(position: int) -> float:
            widest, left_out = self.widest.pairs_before(position), 0.0
            for weight, mask in weights:
                left_out += weight * (widest - mask.pairs_before(position))
            return left_out

        return before

    def window_time(self, document_tokens: IntArray) -> float:
        """Returns the time of all window layers for these documents together, in pairs of full attention."""
        starts = np.zeros_like(document_tokens)
        return sum(
            count * pair_time(mask) * float(mask.pairs_of(starts, document_tokens).sum())
            for mask, count in self.windows
        )


def pair_time(mask: Mask) -> float:
    """Returns the time of a pair in a layer with this mask, in pairs of full attention."""
    return 1.0 if mask.window_tokens is None else 1.0 + WINDOW_QUERY_PAIRS / mask.window_tokens


def _width(mask: Mask) -> float:
    return np.inf if mask.window_tokens is None else mask.window_tokens
