"""Predicted time of a layout's attention, to compare ways to place documents; and what windows leave out.

Ranks meet in every layer, so a layer takes as long as its busiest rank. Time is counted in pairs of full attention.
Keys that move count in proportion, as if nothing hid them: of two layouts that are about equally even, the one with
fewer keys is taken.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import Cost, DocumentCost, LayerMasks, Mask
from distca_hf.layout import Layout


# Time to move one token's keys and values forwards and their gradients backwards, in pairs, for an 8B Llama: 12 KB at
# 200 GB/s, and pairs of 32 heads of 128 at 600 TFLOP/s.
KEY_TOKEN_PAIRS = 640
# Bytes of queries and outputs of a token, as a multiple of the bytes of its keys and values (8B Llama). Stripes move
# them, too.
QUERY_AND_OUTPUT_PARTS = 4
# Time of a query in a window layer in addition to its pairs, in pairs of full attention. FlashAttention 4 on an H200
# needs 6.0, 1.5 and 1.13 times as long for a pair as in full attention, for windows of 128, 1024 and 4096 tokens.
WINDOW_QUERY_PAIRS = 512


@dataclass(frozen=True)
class LayersByMask:
    """The layers of a model by mask. Masks are distinct if they differ for the documents of one micro-batch.

    Attributes:
        widest: the mask with most pairs, full attention in nearly all models. Its work is made exactly even.
        windows: the other masks, all of them windows, each with its number of layers.
        widest_layers: layers that have the widest mask.
    """

    widest: Mask
    widest_layers: int
    windows: LayerMasks

    @classmethod
    def of(cls, layer_masks: LayerMasks, longest_document_tokens: int) -> "LayersByMask":
        """Sorts the layers of a model by mask. A window as long as every document is full attention.

        Raises:
            ConfigError: layers are missing, or fewer than 1 of a mask.
        """
        layers: Counter[Mask] = Counter()
        for mask, count in Cost(layer_masks).layers:
            layers[mask.within(longest_document_tokens)] += count
        (widest, widest_layers), *windows = sorted(
            layers.items(), key=lambda layer: -(layer[0].window_tokens or np.inf)
        )
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
        """Function of a position: time of the pairs that the windows of all window layers leave out of the queries
        before it, in pairs of full attention."""
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


@dataclass(frozen=True)
class PredictedTime:
    """Time of the attention of all layers, forward and backward, in pairs of full attention.

    Attributes:
        attention: time of the busiest rank of each kind of layer, in total.
        even: the same if every kind were even.
        keys: time of keys and values that move.
    """

    attention: float
    even: float
    keys: float

    @property
    def total(self) -> float:
        return self.attention + self.keys

    @classmethod
    def of(cls, layout: Layout, kinds: LayersByMask, rank_shares: Sequence[float]) -> "PredictedTime":
        """Predicts the time of a layout.

        Args:
            layout: of the documents. Ranks divide the widest layers' work on stripes, and each computes its own tokens
                in window layers.
            kinds: kinds of layers of the model.
            rank_shares: relative work that each rank should have.
        """
        # 1. The widest layers. Stripes are divided equally among their ranks.
        widest, shares = kinds.widest, np.array(rank_shares) / np.mean(rank_shares)
        pairs = np.where(layout.segment_in_stripe, 0, widest.pairs_of(layout.segment_start, layout.segment_stop))
        work = np.bincount(layout.segment_rank, weights=pairs, minlength=layout.num_ranks).astype(np.float64)
        for stripe in layout.stripes:
            ranks = slice(stripe.first_rank, stripe.stop_rank)
            work[ranks] += widest.pairs(stripe.start, stripe.stop) / (stripe.stop_rank - stripe.first_rank)
        attention = kinds.widest_layers * pair_time(widest) * float((work / shares).max())
        even = kinds.widest_layers * pair_time(widest) * float(work.mean())
        rows = kinds.widest_layers * moved_rows(layout)

        # 2. Layers with windows, which reach some rows before each part of a document.
        busiest_windows = even_windows = 0.0
        window_rows = 0
        for mask, layers in kinds.windows:
            in_windows = layers * pair_time(mask) * layout.rank_work_of(mask)
            busiest_windows += float((in_windows / shares).max())
            even_windows += float(in_windows.mean())
            window_rows += layers * int((layout.segment_start - mask.first_key(layout.segment_start)).sum())
        keys = KEY_TOKEN_PAIRS * (rows + window_rows) / layout.num_ranks
        return cls(attention + busiest_windows, even + even_windows, keys)


def moved_rows(layout: Layout) -> float:
    """Counts the rows that a layout moves in a layer with full attention, in keys and values of one token.

    A rank needs the keys of all tokens of a document up to its last one, prefixes included, except its own. Stripes
    also move queries and outputs, and the keys of each head to one rank.
    """
    moved = 0.0
    for stripe in layout.stripes:
        ranks, tokens = stripe.stop_rank - stripe.first_rank, stripe.stop - stripe.start
        moved += (1 + QUERY_AND_OUTPUT_PARTS) * tokens * (ranks - 1) / ranks + stripe.start
    unstriped = ~layout.segment_in_stripe
    rank, document, stop = (x[unstriped] for x in (layout.segment_rank, layout.segment_document, layout.segment_stop))
    if layout.shared is not None:
        index, document, _, stop = layout.shared.held(document, np.zeros_like(stop), stop)
        rank = rank[index]
    last = np.zeros(layout.num_ranks * layout.num_documents, dtype=np.int64)
    np.maximum.at(last, rank * layout.num_documents + document, stop - layout.first_own[document])
    return moved + int(last.sum()) - int(layout.segment_tokens[unstriped].sum())
