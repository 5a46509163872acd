"""Predicted time of a layout's attention, by which ways to place documents are compared.

Ranks meet in every layer, so a layer takes as long as its busiest rank. Time is counted in pairs of full attention.
Keys that move count in proportion, as if nothing hid them: of two ways that are about as even, the one with fewer keys
is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.placement.layer_kinds import LayerKinds, pair_time
from distca_hf.placement.stripes import QUERY_AND_OUTPUT_PARTS


# Time of one token's keys and values, moved forwards and their gradients backwards, in pairs: 12 KB at 200 GB/s, and
# pairs of 32 heads of 128 at 600 TFLOP/s, for an 8B Llama.
KEY_TOKEN_PAIRS = 640


@dataclass(frozen=True)
class PredictedTime:
    """Time of the attention of all layers, forward and backward, in pairs of full attention.

    Attributes:
        attention: busiest ranks of each kind of layer.
        even: the same if every kind were even.
        keys: keys and values that move.
        windows_uneven: excess of the busiest ranks in window layers over the mean, as a fraction of it.
    """

    attention: float
    even: float
    keys: float
    windows_uneven: float

    @property
    def total(self) -> float:
        return self.attention + self.keys

    @classmethod
    def of(cls, layout: Layout, kinds: LayerKinds, rank_shares: Sequence[float]) -> "PredictedTime":
        """Predicts the time of a layout.

        Args:
            layout: documents, placed; ranks divide the widest layers' work on stripes, and each computes its own
                tokens in windows.
            kinds: kinds of layers of the model.
            rank_shares: work that each rank is to have, in proportion.
        """
        shares = np.array(rank_shares) / np.mean(rank_shares)
        widest_work = _striped_work(layout, kinds.widest)
        attention = kinds.widest_layers * pair_time(kinds.widest) * float((widest_work / shares).max())
        even = kinds.widest_layers * pair_time(kinds.widest) * float(widest_work.mean())
        busiest_windows = even_windows = 0.0
        for mask, layers in kinds.windows:
            work = layers * pair_time(mask) * layout.rank_work_of(mask)
            busiest_windows += float((work / shares).max())
            even_windows += float(work.mean())
        rows = kinds.widest_layers * moved_rows(layout)
        rows += sum(layers * _halo_rows(layout, mask) for mask, layers in kinds.windows)
        return cls(
            attention=attention + busiest_windows,
            even=even + even_windows,
            keys=KEY_TOKEN_PAIRS * rows / layout.num_ranks,
            windows_uneven=busiest_windows / max(1.0, even_windows) - 1,
        )


def moved_rows(layout: Layout) -> float:
    """Counts the rows that a layout moves in a layer with full attention, in keys and values of one token.

    A rank needs those of all tokens of a document up to its last one, less its own. Stripes also move queries and
    outputs, and the keys of each head to one rank.
    """
    moved = 0.0
    for stripe in layout.stripes:
        ranks, tokens = stripe.stop_rank - stripe.first_rank, stripe.stop - stripe.start
        moved += (1 + QUERY_AND_OUTPUT_PARTS) * tokens * (ranks - 1) / ranks + stripe.start
    alone = ~layout.segment_in_stripe
    held = (layout.segment_rank * layout.num_documents + layout.segment_document)[alone]
    last = np.zeros(layout.num_ranks * layout.num_documents, dtype=np.int64)
    np.maximum.at(last, held, layout.segment_stop[alone])
    return moved + int(last.sum()) - int(layout.segment_tokens[alone].sum())


def _halo_rows(layout: Layout, mask: Mask) -> int:
    """Counts the rows before each part of a document that its window reaches."""
    return int((layout.segment_start - mask.first_key(layout.segment_start)).sum())


def _striped_work(layout: Layout, mask: Mask) -> NDArray[np.float64]:
    """Returns `[ranks]` attended pairs, with those of stripes divided equally among their ranks."""
    pairs = np.where(layout.segment_in_stripe, 0, mask.pairs_of(layout.segment_start, layout.segment_stop))
    work = np.bincount(layout.segment_rank, weights=pairs, minlength=layout.num_ranks).astype(np.float64)
    for stripe in layout.stripes:
        ranks = slice(stripe.first_rank, stripe.stop_rank)
        work[ranks] += mask.pairs(stripe.start, stripe.stop) / (stripe.stop_rank - stripe.first_rank)
    return work
