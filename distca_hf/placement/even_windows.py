"""Even windows: hands out long documents such that layers with a sliding window are even among ranks, too.

Ranks meet in every layer. So layers with full attention must be even, and layers with a window as well; an even sum of
both is not enough. Placement that balances only full attention may give one rank the dense end of a long document and
dust, and another one documents of medium length. In window layers dust is light work, and all else costs a window per
token:

    rank 0     | end of 128K | dust dust dust dust |     full: even     window of 4K: 0.6
    rank 1     |  12K  |  11K  |  13K  |  12K | 9K |     full: even     window of 4K: 1.3

In each layer

    window work = full work - pairs that the window leaves out,

and full work is even in any case. So window work is as even as the pairs left out. Short documents have hardly any.
Shares (nodes, or the ranks of one) are filled in two steps:

1. Long documents are handed out, longest first, each to the share that lacks most pairs left out. They stay whole if
   they can. One with more pairs left out than the share lacks is cut, and the share gets its tail.
2. Short documents make up for tokens and work. The accordion deals them, and their cuts cost few bytes.

Ends of long documents have far more pairs left out for their tokens than beginnings. If the first shares take all that
they lack from ends, the beginnings remain for the last shares, which have too few tokens for them. Then every share
takes only a part of what it lacks at once, the largest part that works. If none works, the accordion deals long and
short documents separately, and every share gets an equal part of the tokens and of the work of both.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Self

from distca_hf.arrays import IntArray
from distca_hf.layout import TILE_TOKENS
from distca_hf.placement.accordion import Goal, deal_lightest_first, largest
from distca_hf.placement.heuristics import ALIKE, ALIKE_NODES, deal_by_need
from distca_hf.placement.piece_pool import Piece, PiecePool, work_of
from distca_hf.placement.predicted import LayersByMask


# Parts of the missing pairs that a share takes at once, in the order in which they are tried. Smaller ones cut more.
PARTS = (1.0, 0.85, 0.7)
# Remainder, as a part of the pairs that a share may lack in the end, that is not left for another piece.
REMAINDER = 0.5
# Deviation of the work for which short documents are cut, as a fraction of the allowed one.
FINISH = 0.65
# Length of a document, in windows, above which its pairs left out count.
LONG_WINDOWS = 1.6
# Maximum excess of a node's work in windows over the mean, as a fraction of it, for which long documents are not cut.
NODES_UNEVEN = 0.05
# The same for a rank, including its node's excess.
RANKS_UNEVEN = 0.12
# Excess of a rank over its node's mean that is always allowed.
LEAST_UNEVEN = 0.02


@dataclass(frozen=True)
class EvenWindows:
    """A deal to shares with equal tokens, equal work, and equal pairs left out by windows.

    Attributes:
        kinds: kinds of layers of the model.
        window_time: time of window layers, as a fraction of the work of all documents.
        time_left_out: time of the pairs that windows leave out of long documents, as a fraction of the same.
        may_miss: pairs left out that a share may lack, as a fraction of its work.
        alike: see `heuristics.deal_longest_first`.
    """

    kinds: LayersByMask
    window_time: float
    time_left_out: float
    may_miss: float
    alike: float

    @classmethod
    def of_nodes(cls, kinds: LayersByMask, document_tokens: IntArray, first_own: IntArray, work: int) -> Self:
        """Returns the deal to nodes of documents with this much work, each from its first own token on."""
        is_long = document_tokens > int(LONG_WINDOWS * kinds.longest_window)
        time = (kinds.window_time(document_tokens) - kinds.window_time(first_own)) / max(1, work)
        left_out, shared = (sum(map(kinds.left_out_before, x[is_long].tolist())) for x in (document_tokens, first_own))
        time_left_out = (left_out - shared) / max(1, work)
        return cls(kinds, time, time_left_out, NODES_UNEVEN * time, ALIKE_NODES)

    def of_ranks(self, pieces: list[Piece]) -> "EvenWindows":
        """Returns the deal of a node's pieces to its ranks. If the node has more pairs left out than the mean, its
        ranks may lack more."""
        more = self.left_out(pieces) / max(1, work_of(pieces)) - self.time_left_out
        may_miss = max(RANKS_UNEVEN * self.window_time + more, LEAST_UNEVEN * self.window_time)
        return replace(self, may_miss=may_miss, alike=ALIKE)

    @cached_property
    def long_tokens(self) -> int:
        """Documents beyond this length are long."""
        return int(LONG_WINDOWS * self.kinds.longest_window)

    def left_out(self, pieces: Iterable[Piece]) -> float:
        """Sums the pairs left out of pieces of long documents."""
        before, long_tokens = self.kinds.left_out_before, self.long_tokens
        ranges = [(start, stop) for _, _, start, stop, _ in pieces if stop > long_tokens]
        return sum([before(stop) - before(start) if start else before(stop) for start, stop in ranges])

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals out a whole pool.

        Args:
            pool: pieces to deal; it is not used afterwards.
            goals: goals of the shares. Their tokens sum to the pool's, their work to its work.
            off: maximum deviation of a share's work, as a fraction of it; if all `PARTS` exceed it, long and short
                documents are dealt separately.

        Returns:
            The pieces of each share.
        """
        if len(goals) == 1:
            return [pool.take_all()]
        pieces = pool.copy().take_all()
        long = [piece for piece in pieces if piece[3] > self.long_tokens]
        short_tokens = sum([goal.tokens for goal in goals]) - _tokens_of(long)
        short_cost = (pool.work_left - work_of(long)) / max(1, short_tokens)
        missing_per_work = self.left_out(long) / max(1.0, sum([goal.work for goal in goals]))
        missing = [missing_per_work * goal.work for goal in goals]
        for part in PARTS:
            left = pool.copy()
            handed_out = _hand_out(left, goals, missing, short_cost, part, self)
            if handed_out is None:
                continue
            (shares, needs), miss = handed_out, 0.0
            for share, short in deal_by_need(left, dict(enumerate(needs)), FINISH * off, self.alike).items():
                miss = max(miss, abs(work_of(short) - needs[share].work) / max(1.0, goals[share].load))
                shares[share] += short
            if miss <= off:
                return shares
        return _deal_two_lines(long, [piece for piece in pieces if piece[3] <= self.long_tokens], goals, pool)


def _hand_out(
    pool: PiecePool, goals: Sequence[Goal], missing: list[float], short_cost: float, part: float, even: EvenWindows
) -> tuple[list[list[Piece]], list[Goal]] | None:
    """Takes all long documents from a pool. Returns the pieces of each share, and what shares still need; None if a
    share lacks too many pairs. A share takes a `part` of the pairs that it lacks at once. Tokens of short documents
    have the mean cost `short_cost`."""
    shares: list[list[Piece]] = [[] for _ in goals]
    tokens, work = [goal.tokens for goal in goals], [goal.work for goal in goals]
    missing = list(missing)  # minus infinity for a closed share
    may_miss = [even.may_miss * goal.load for goal in goals]
    before, least_tail = even.kinds.left_out_before, max(1, even.kinds.longest_window // 2)
    has_room = partial(_has_room, pool, tokens, work, short_cost)

    def tail_of(share: int, piece: Piece, most_left_out: float) -> int:
        """Returns the tokens of the largest tail of the densest piece that fits a share, with at most this many pairs
        left out."""
        _, document, start, stop, _ = piece
        least_before = before(stop) - most_left_out

        def fits(tiles: int) -> bool:
            cut = stop - tiles * TILE_TOKENS
            return before(cut) >= least_before and has_room(share, stop - cut, pool.work(document, cut, stop))

        return TILE_TOKENS * largest((stop - start - 1) // TILE_TOKENS, fits)

    while (piece := pool.densest) is not None and piece[3] > even.long_tokens and (most := max(missing)) > -math.inf:
        share = missing.index(most)
        _, _, start, stop, of_piece = piece
        left_out = before(stop) - before(start) if start else before(stop)
        # Later pieces have fewer pairs left out for their tokens. If these are too few, the share will lack some.
        if (most - may_miss[share]) * (stop - start) > left_out * tokens[share]:
            return None
        is_last = (1 - part) * most <= REMAINDER * may_miss[share]
        at_once = most if is_last else part * most
        if left_out <= at_once + is_last * may_miss[share] and has_room(share, stop - start, of_piece):
            taken = pool.take_densest()
        else:
            tail = tail_of(share, piece, at_once)
            if tail < least_tail:
                if most > may_miss[share]:
                    return None
                missing[share] = -math.inf
                continue
            taken = pool.take_tail(pool.indices[-1], tail)
            left_out = before(stop) - before(stop - tail)
        shares[share].append(taken)
        tokens[share] -= taken[3] - taken[2]
        work[share] -= taken[4]
        missing[share] -= left_out
    if any(of_share > most for of_share, most in zip(missing, may_miss, strict=True)):
        return None
    return shares, [Goal(*need) for need in zip(tokens, work, [goal.load for goal in goals], strict=True)]


def _has_room(
    pool: PiecePool, tokens: list[int], work: list[float], short_cost: float, share: int, taken: int, taken_work: int
) -> bool:
    """Checks whether the pool has tokens light enough for what all shares need, if one of them takes these tokens and
    this work."""
    rest_tokens, rest_work = tokens[share] - taken, work[share] - taken_work
    if rest_tokens < 0 or rest_work < 0:
        return False
    if rest_work >= short_cost * rest_tokens:
        return True
    rest = rest_work / max(1, rest_tokens), rest_tokens, rest_work
    lighter = [
        (of_share / max(1, missing), missing, of_share)
        for other, (missing, of_share) in enumerate(zip(tokens, work, strict=True))
        if other != share and of_share < short_cost * missing
    ]
    tokens_needed: int = 0
    work_needed: float = 0.0
    for cost, needed_tokens, needed_work in sorted([rest, *lighter]):
        tokens_needed, work_needed = tokens_needed + needed_tokens, work_needed + needed_work
        if cost >= rest[0] and work_needed < pool.light_work(tokens_needed):
            return False
    return True


def _deal_two_lines(
    long: list[Piece], short: list[Piece], goals: Sequence[Goal], pool: PiecePool
) -> list[list[Piece]]:
    """Deals long and short pieces of a pool separately: every share gets an equal part of both."""
    # 1. Long ones, to goals in proportion to the goals for all.
    long_tokens, tokens = _tokens_of(long), sum([goal.tokens for goal in goals])
    borders = [long_tokens * before // max(1, tokens) for before in accumulate([g.tokens for g in goals], initial=0)]
    long_pool, short_pool = PiecePool(long, pool.work), PiecePool(short, pool.work)
    part = long_pool.work_left / max(1, pool.work_left)
    long_goals = [
        Goal(stop - start, part * goal.work, goal.load)
        for goal, (start, stop) in zip(goals, pairwise(borders), strict=True)
    ]
    shares = deal_lightest_first(long_pool, long_goals)

    # 2. Short ones, which make up for deviations of the long ones.
    short_goals = [
        Goal(goal.tokens - of_long.tokens, max(0.0, goal.work - work_of(held)), goal.load)
        for goal, of_long, held in zip(goals, long_goals, shares, strict=True)
    ]
    return [held + more for held, more in zip(shares, deal_lightest_first(short_pool, short_goals), strict=True)]


def _tokens_of(pieces: list[Piece]) -> int:
    return sum([stop - start for _, _, start, stop, _ in pieces])
