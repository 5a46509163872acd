"""Exchange: two ranks change tokens, as many as they get, until both take equally long.

The slowest rank gives dense segments, of the last one the beginning, which needs fewer keys than its end, and takes
the lightest tokens of a fast rank for them. How many, bisection tells: the more, the more time goes over. With whom
and where it starts is tried: a short piece of a long document may cost more time than it is worth.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.layout import Layout, join_neighbours
from distca_hf.placement.accordion import TILE_TOKENS
from distca_hf.placement.piece_pool import Segment


Seconds = Callable[[list[Segment]], float]

# Exchanges per rank at most, and the part of the mean by which the slowest rank may stay above it.
EXCHANGES_PER_RANK = 4
CLOSE = 5e-3
# Ranks that are tried, the fastest ones, and segments to start with, of different density.
PARTNERS = 4
STARTS = 8


@dataclass(frozen=True)
class Held:
    """What a rank holds that it may exchange, and the seconds of what it may not."""

    segments: list[Segment]
    fixed_seconds: float

    def seconds(self, seconds_of: Seconds) -> float:
        """Seconds of all."""
        return seconds_of(self.segments) + self.fixed_seconds


def even_out(layout: Layout, seconds_of: Seconds, fixed_seconds: NDArray[np.float64]) -> Layout:
    """Exchanges tokens between ranks of a layout until the slowest is close to the mean, or nothing helps any more.

    Args:
        layout: the layout; its stripes stay as they are.
        seconds_of: seconds that segments take together on one rank.
        fixed_seconds: `[ranks]` seconds of stripes.
    """
    of_stripes, free = _parted(layout)
    ranks = [Held(segments, float(fixed)) for segments, fixed in zip(free, fixed_seconds, strict=True)]
    seconds = [rank.seconds(seconds_of) for rank in ranks]
    for _ in range(EXCHANGES_PER_RANK * layout.num_ranks):
        slow, *fast = (int(rank) for rank in [np.argmax(seconds), *np.argsort(seconds, kind="stable")[:PARTNERS]])
        if seconds[slow] * len(seconds) <= (1 + CLOSE) * sum(seconds):
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
    held = [sorted([*stay, *rank.segments], key=_task_order) for stay, rank in zip(of_stripes, ranks, strict=True)]
    return Layout.from_segments(layout.document_tokens, held, stripes=layout.stripes)


def _parted(layout: Layout) -> tuple[list[list[Segment]], list[list[Segment]]]:
    """Segments of each rank that are of stripes, and those that are not."""
    of_stripes: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    free: list[list[Segment]] = [[] for _ in range(layout.num_ranks)]
    for rank in range(layout.num_ranks):
        for document, start, stop in layout.held_by(rank):
            in_stripe = any(s.document == document and s.start <= start and stop <= s.stop for s in layout.stripes)
            (of_stripes if in_stripe else free)[rank].append((document, start, stop))
    return of_stripes, free


def _starts(segments: list[Segment]) -> list[int]:
    """Places in the order from dense to light at which density falls, from the densest on."""
    means = [_mean_position(segment)[0] for segment in sorted(segments, key=_mean_position, reverse=True)]
    return [at for at, mean in enumerate(means) if at == 0 or mean < means[at - 1]][:STARTS]


def _evened(slow: Held, fast: Held, start: int, seconds_of: Seconds) -> tuple[Held, Held]:
    """Two ranks after they have exchanged as many tokens as make both equally slow, as nearly as tiles allow."""

    def after(tiles: int) -> tuple[Held, Held]:
        return _exchanged(slow, fast, start, tiles * TILE_TOKENS)

    def is_enough(tiles: int) -> bool:
        one, other = after(tiles)
        return one.seconds(seconds_of) <= other.seconds(seconds_of)

    dense = sorted(slow.segments, key=_mean_position, reverse=True)[start:]
    most = min(sum(stop - begin for _, begin, stop in held) for held in (dense, fast.segments)) // TILE_TOKENS
    tiles = bisect_left(range(most), True, key=is_enough)
    pairs = [after(max(0, tiles - 1)), after(tiles)]
    return min(pairs, key=lambda pair: max(pair[0].seconds(seconds_of), pair[1].seconds(seconds_of)))


def _exchanged(slow: Held, fast: Held, start: int, tokens: int) -> tuple[Held, Held]:
    """Two ranks after the one has given so many dense tokens for as many light ones, from a place in its order on."""
    dense = sorted(slow.segments, key=_mean_position, reverse=True)
    given, kept = _first_tokens(dense[start:], tokens)
    taken, left = _first_tokens(sorted(fast.segments, key=_mean_position), tokens)
    return (
        Held(_joined([*dense[:start], *kept, *taken]), slow.fixed_seconds),
        Held(_joined([*left, *given]), fast.fixed_seconds),
    )


def _first_tokens(segments: list[Segment], tokens: int) -> tuple[list[Segment], list[Segment]]:
    """The first so many tokens of segments in order, and the others."""
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
    """Segments with neighbours joined: what two ranks had of one document."""
    document, start, stop = np.array(segments, dtype=np.int64).reshape(-1, 3).T
    columns = join_neighbours(document, start, stop, np.zeros_like(document))[:3]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _mean_position(segment: Segment) -> tuple[int, Segment]:
    return segment[1] + segment[2], segment


def _task_order(segment: Segment) -> tuple[bool, Segment]:
    return segment[1] > 0, segment
