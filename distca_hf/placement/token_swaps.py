"""Token swaps: a local search in which the slowest rank and a fast one swap equally many tokens.

    slowest    | dense segments .... | [ first tokens of one ] |          ──▶ to the fast rank
    fast       | lightest tokens     |                                    ──▶ to the slowest rank

The slowest rank gives dense segments. The last of them is cut, and its beginning given, which needs fewer keys than
its end. It receives the lightest tokens of a fast rank. Bisection finds the number at which both take the same time.
Several partners and first segments are tried: a short piece of a long document may cost more time than it wins.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import BoolArray
from distca_hf.layout import TILE_TOKENS, Layout, join_neighbours
from distca_hf.placement.piece_pool import Segment


Seconds = Callable[[list[Segment]], float]

# Maximum number of swaps, per rank: bounds the time of planning.
SWAPS_PER_RANK = 4
# Excess of the slowest rank's seconds over the mean, as a fraction of it, at which the search ends. It is below the
# error of predicted seconds.
CLOSE_TO_MEAN = 5e-3
# Maximum number of partners that are tried for one swap, fastest first.
PARTNERS = 4
# Maximum number of segments to begin with that are tried for one swap, each of another density.
STARTS = 8


@dataclass(frozen=True)
class Held:
    """Segments that a rank may swap, and the seconds of the others."""

    segments: list[Segment]
    fixed_seconds: float

    def seconds(self, seconds_of: Seconds) -> float:
        """Sums the seconds of all segments of the rank."""
        return seconds_of(self.segments) + self.fixed_seconds


def even_out(layout: Layout, seconds_of: Seconds, fixed_seconds: NDArray[np.float64]) -> Layout:
    """Swaps tokens between ranks of a layout until the slowest is close to the mean, or no swap helps.

    Args:
        layout: the layout; its stripes stay as they are.
        seconds_of: seconds that segments take together on one rank.
        fixed_seconds: `[ranks]` seconds of stripes.
    """
    # 1. Seconds of each rank; segments of stripes are not swapped.
    of_stripes, free = _parted(layout)
    ranks = [Held(segments, float(fixed)) for segments, fixed in zip(free, fixed_seconds, strict=True)]
    seconds = [rank.seconds(seconds_of) for rank in ranks]

    # 2. The best swap of the slowest rank, again and again.
    for _ in range(SWAPS_PER_RANK * layout.num_ranks):
        slow, *fast = (int(rank) for rank in [np.argmax(seconds), *np.argsort(seconds, kind="stable")[:PARTNERS]])
        if seconds[slow] * len(seconds) <= (1 + CLOSE_TO_MEAN) * sum(seconds):
            break
        tried = [
            (partner, *_evened(ranks[slow], ranks[partner], start, seconds_of))
            for partner in fast
            if partner != slow
            for start in _starts(ranks[slow].segments)
        ]
        times = [max(one.seconds(seconds_of), other.seconds(seconds_of)) for _, one, other in tried]
        if not tried or min(times) >= seconds[slow]:
            break
        partner, ranks[slow], ranks[partner] = tried[times.index(min(times))]
        seconds[slow], seconds[partner] = ranks[slow].seconds(seconds_of), ranks[partner].seconds(seconds_of)

    # 3. A layout of all segments, in the order in which tasks are computed.
    held = [sorted([*stay, *rank.segments], key=_task_order) for stay, rank in zip(of_stripes, ranks, strict=True)]
    return Layout.from_segments(layout.document_tokens, held, stripes=layout.stripes)


def find_striped(layout: Layout) -> BoolArray:
    """Marks segments that are parts of stripes: `[segments]`."""
    in_stripe = np.zeros(len(layout.segment_document), dtype=bool)
    for stripe in layout.stripes:
        in_stripe |= (
            (layout.segment_document == stripe.document)
            & (layout.segment_start >= stripe.start)
            & (layout.segment_stop <= stripe.stop)
        )
    return in_stripe


def _parted(layout: Layout) -> tuple[list[list[Segment]], list[list[Segment]]]:
    """Parts the segments of each rank: segments of stripes, and all others."""
    of_stripes: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    free: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    in_stripe = find_striped(layout)
    for rank in range(layout.num_ranks):
        for segment, of_stripe in zip(layout.held_by(rank), in_stripe[layout.segments_of(rank)], strict=True):
            (of_stripes if of_stripe else free)[rank].append(segment)
    return of_stripes, free


def _starts(segments: list[Segment]) -> list[int]:
    """Returns the places, in the order from dense to light, at which density falls."""
    means = [_mean_position(segment)[0] for segment in sorted(segments, key=_mean_position, reverse=True)]
    return [at for at, mean in enumerate(means) if at == 0 or mean < means[at - 1]][:STARTS]


def _evened(slow: Held, fast: Held, start: int, seconds_of: Seconds) -> tuple[Held, Held]:
    """Swaps as many tokens as make two ranks equally slow, as nearly as tiles allow."""

    def after(tiles: int) -> tuple[Held, Held]:
        return _swapped(slow, fast, start, tiles * TILE_TOKENS)

    def is_enough(tiles: int) -> bool:
        one, other = after(tiles)
        return one.seconds(seconds_of) <= other.seconds(seconds_of)

    dense = sorted(slow.segments, key=_mean_position, reverse=True)[start:]
    most = min(sum(stop - begin for _, begin, stop in held) for held in (dense, fast.segments)) // TILE_TOKENS
    tiles = bisect_left(range(most), True, key=is_enough)
    pairs = [after(max(0, tiles - 1)), after(tiles)]
    return min(pairs, key=lambda pair: max(pair[0].seconds(seconds_of), pair[1].seconds(seconds_of)))


def _swapped(slow: Held, fast: Held, start: int, tokens: int) -> tuple[Held, Held]:
    """Swaps dense tokens of one rank, from a place in its order on, for as many light tokens of another."""
    dense = sorted(slow.segments, key=_mean_position, reverse=True)
    given, kept = _first_tokens(dense[start:], tokens)
    taken, left = _first_tokens(sorted(fast.segments, key=_mean_position), tokens)
    return (
        Held(_joined([*dense[:start], *kept, *taken]), slow.fixed_seconds),
        Held(_joined([*left, *given]), fast.fixed_seconds),
    )


def _first_tokens(segments: list[Segment], tokens: int) -> tuple[list[Segment], list[Segment]]:
    """Parts segments in order: their first `tokens` tokens, and all others."""
    first: list[Segment] = []
    others: list[Segment] = []
    for document, start, stop in segments:
        cut = min(stop, start + tokens)
        tokens -= cut - start
        if cut > start:
            first.append((document, start, cut))
        if cut < stop:
            others.append((document, cut, stop))
    return first, others


def _joined(segments: list[Segment]) -> list[Segment]:
    """Joins segments that follow each other in a document, which came from two ranks."""
    document, start, stop = np.array(segments, dtype=np.int64).reshape(-1, 3).T
    columns = join_neighbours(document, start, stop, np.zeros_like(document))[:3]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _mean_position(segment: Segment) -> tuple[int, Segment]:
    return segment[1] + segment[2], segment


def _task_order(segment: Segment) -> tuple[bool, Segment]:
    return segment[1] > 0, segment
