"""Two lines: short documents and long ones are dealt apart, so that window layers are even, too.

Ranks meet in every layer. So layers with full attention have to be even among ranks, and layers with a sliding window
as well; an even sum of both is not enough. Placement by full attention gives one rank the dense end of a long document
beside dust, another one documents of medium length. In window layers dust is light work, and all else costs a window
per token:

    rank 0     | end of 128K | dust dust dust dust |     full: even     window of 4K: 0.6
    rank 1     |  12K  |  11K  |  13K  |  12K | 9K |     full: even     window of 4K: 1.3

Therefore documents up to a limit are one line, and longer ones another. Every rank gets an equal part of either line:
equal tokens, and equal work of full attention. This bounds the difference in window layers. In the short line

    window work = full work - pairs that the window leaves out of documents between the window and the limit,

and full work is even there. In the long line

    window work = window x tokens - pairs that documents lack where they begin,

and tokens are even there. A document of twice the window loses as much in one line as in the other. It is the limit
with the lowest bound. Lower limits move fewer keys, because mostly documents near the limit are cut.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, Cost, DocumentCost, LayerMasks, Mask


# Limits between the lines that are tried, in windows, lowest first.
LIMITS_IN_WINDOWS = (1.0, 1.5, 2.0)
# Expected excess of the busiest rank in window layers over the mean, as a fraction of it, up to which a limit will do.
MOST_UNEVEN = 0.14
# Part of the bound that two lines reach beyond the part that one line reaches, at most, on real lengths.
MARGIN = 0.1
# Time of a query in a window layer beside its pairs, in pairs of full attention. FlashAttention 4 on an H200 needs
# 6.0, 1.5 and 1.13 times as long for a pair as in full attention, for windows of 128, 1024 and 4096 tokens.
WINDOW_QUERY_PAIRS = 512


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of layers that differ for one micro-batch.

    Attributes:
        widest: the mask with most pairs, full attention in nearly all models. Its work is made even exactly.
        windows: the other masks, all of them windows, with the number of layers that have each.
        widest_layers: layers that have the widest mask.
    """

    widest: Mask
    widest_layers: int
    windows: LayerMasks

    @classmethod
    def of(cls, layer_masks: LayerMasks, longest_document_tokens: int) -> "LayerKinds":
        """Sorts the layers of a model by mask. A window as long as every document is full attention.

        Raises:
            ConfigError: there are no layers, or fewer than 1 of a mask.
        """
        layers: Counter[Mask] = Counter()
        for mask, count in Cost(layer_masks).layers:
            window_tokens = mask.window_tokens
            is_full = window_tokens is None or window_tokens >= longest_document_tokens
            layers[CAUSAL_MASK if is_full else mask] += count
        (widest, widest_layers), *windows = sorted(layers.items(), key=lambda layer: -_width(layer[0]))
        return cls(widest, widest_layers, tuple(windows))

    @cached_property
    def cost(self) -> DocumentCost:
        """Cost of the widest mask."""
        return Cost(((self.widest, 1),))

    def limit_tokens(self, sorted_tokens: IntArray, one_line_uneven: float) -> int | None:
        """Chooses the limit between the lines: the lowest one that is expected to make windows about even.

        Where one line stays far below its bound, two lines stay below theirs.

        Args:
            sorted_tokens: `[documents]` lengths, rising.
            one_line_uneven: excess of the busiest ranks in window layers over the mean with one line, as a fraction.

        Returns:
            Length of the longest document of the short line; None where one line is about as even.
        """
        one_line_bound = min(self.uneven_bound(sorted_tokens, limit) for limit in (0, int(sorted_tokens[-1])))
        reached = min(1.0, MARGIN + one_line_uneven / max(one_line_bound, one_line_uneven, 1e-9))
        in_windows = [times * (mask.window_tokens or 0) for mask, _ in self.windows for times in LIMITS_IN_WINDOWS]
        limits = [limit for limit in sorted(map(int, in_windows)) if sorted_tokens[0] <= limit < sorted_tokens[-1]]
        expected = {limit: reached * self.uneven_bound(sorted_tokens, limit) for limit in limits}
        enough = [limit for limit in limits if expected[limit] <= min(MOST_UNEVEN, one_line_uneven)]
        if enough or one_line_uneven <= MOST_UNEVEN:
            return min(enough, default=None)
        return min(limits, key=expected.__getitem__, default=None)

    def uneven_bound(self, document_tokens: IntArray, limit_tokens: int) -> float:
        """Bounds what a rank's time in window layers exceeds the mean by, as a fraction, if two lines are even."""
        starts = np.zeros_like(document_tokens)
        widest_pairs = self.widest.pairs_of(starts, document_tokens)
        left_out = whole = 0.0
        for mask, count in self.windows:
            weight, pairs = count * pair_time(mask), mask.pairs_of(starts, document_tokens)
            in_short = widest_pairs - pairs
            in_long = _width(mask) * document_tokens - pairs
            left_out += weight * float(np.where(document_tokens <= limit_tokens, in_short, in_long).sum())
            whole += weight * float(pairs.sum())
        return left_out / max(1.0, whole)


def pair_time(mask: Mask) -> float:
    """Returns the time of a pair in a layer with this mask, in pairs of full attention."""
    return 1.0 if mask.window_tokens is None else 1.0 + WINDOW_QUERY_PAIRS / mask.window_tokens


def tokens_of_lines(rank_tokens: Sequence[int], short_tokens: int) -> list[list[int]]:
    """Divides the tokens of every rank between the short and the long line.

    Args:
        rank_tokens: tokens of each rank, which differ by one at most.
        short_tokens: tokens of all documents of the short line.

    Returns:
        The tokens of each rank in either line. They differ by one at most, too, and sum to the rank's tokens.
    """
    total = np.array(rank_tokens, dtype=np.int64)
    each, more = divmod(short_tokens, len(total))
    short = np.full(len(total), each)
    fuller = total > total.min()
    most = int(fuller.sum())
    # Remainders go to ranks with a token more; what is left of them evenly to the others.
    short[fuller] += _evenly(min(more, most), most)
    short[~fuller] += _evenly(max(0, more - most), len(total) - most)
    return [short.tolist(), (total - short).tolist()]


def _evenly(tokens: int, parts: int) -> IntArray:
    """Divides tokens into parts that differ by one at most, spread over all of them."""
    return np.diff(tokens * np.arange(parts + 1) // max(1, parts))


def _width(mask: Mask) -> float:
    return np.inf if mask.window_tokens is None else mask.window_tokens
