"""Longest first (LPT, longest processing time first): long documents stay whole if they can, so that fewer keys move.

The accordion alone fills share after share. The first shares use up the pieces that would balance the last ones, so
the last must divide long documents. Here all shares (nodes, or the ranks of one) are filled at the same time:

1. Long pieces are handed out, longest first, each to the share with most missing work beyond the mean work of its
   missing tokens. A piece that does not fit is cut: the share takes its tail and gets no more long pieces. The
   front is handed out later.
2. Short documents are left, which may be cut anywhere for few bytes. Shares that need lighter documents are parted
   from shares that need denser ones, until the accordion can fill them one after the other.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from distca_hf.arrays import ceil_div
from distca_hf.layout import TILE_TOKENS
from distca_hf.placement.accordion import OFF, Goal, deal, fill, largest
from distca_hf.placement.piece_pool import Piece, PiecePool, joined, work_of


# Minimum mean cost of a share's need, as a fraction of the pool's mean cost per token, at which light tokens suffice
# without a closer look.
LIGHT_ENOUGH = 0.9
# Miss of the work for which short documents are cut, as a fraction of that for long ones. Cuts of short ones cost
# fewer bytes.
FINISH = 1 / 2


def deal_longest_first(
    pool: PiecePool, goals: Sequence[Goal], short_tokens: int, off: float, alike: float
) -> list[list[Piece]]:
    """Deals a whole pool out, long pieces whole wherever they fit.

    Args:
        pool: pieces to deal; it is empty afterwards.
        goals: goals of the shares. Their tokens sum to those of the pool, their work to its work.
        short_tokens: documents up to this length are short.
        off: maximum miss of a share's work, as a fraction of it; beyond it the accordion deals everything instead.
        alike: maximum spread of the shares' needs for short documents, in mean cost per token, as a fraction of the
            largest. Shares within it are filled one after the other.

    Returns:
        The pieces of each share.
    """
    if len(goals) == 1:
        return [pool.take_all()]
    shares, excess = hand_out_longest_first(pool, goals, short_tokens, off, alike)
    if max(map(abs, excess)) > off:
        return deal(PiecePool(joined(list(chain.from_iterable(shares))), pool.work), goals, off=min(off, OFF))
    return shares


def hand_out_longest_first(
    pool: PiecePool, goals: Sequence[Goal], short_tokens: int, off: float, alike: float
) -> tuple[list[list[Piece]], list[float]]:
    """Deals as `deal_longest_first` does, but never anew: pieces of each share, and its excess as a fraction of its
    work."""
    shares, left = _hand_out_long(pool, goals, short_tokens)
    excess = [0.0] * len(goals)
    for share, short in deal_by_need(pool, dict(enumerate(left)), off * FINISH, alike).items():
        shares[share] += short
        excess[share] = (work_of(short) - left[share].work) / max(1.0, left[share].load)
    return shares, excess


def _hand_out_long(pool: PiecePool, goals: Sequence[Goal], short_tokens: int) -> tuple[list[list[Piece]], list[Goal]]:
    """Takes the long pieces off a pool: those of each share, and the goals that are left."""
    shares: list[list[Piece]] = [[] for _ in goals]
    need = _Need(goals)
    tokens_left = sum(goal.tokens for goal in goals)
    light_cost = _light_cost(pool, goals)
    while (piece := pool.densest) is not None and piece[3] > short_tokens:
        mean_cost = pool.work_left / tokens_left
        share = need.neediest(mean_cost)
        if share is None:
            break
        _, _, start, stop, work = piece
        # A whole piece if it fits, else its largest tail that does; without a tail the share is closed.
        if need.has_room(share, piece, max(LIGHT_ENOUGH * mean_cost, light_cost)):
            shares[share].append(pool.take_densest())
            need.reduce(share, stop - start, work)
            tokens_left -= stop - start
            continue
        take = need.fitting_tail(share, pool)
        if take < min(stop - start, short_tokens):
            need.close(share)
            continue
        shares[share].append(pool.take_tail(pool.indices[-1], take))
        need.reduce(share, take, shares[share][-1][4])
        tokens_left -= take
    return shares, need.goals()


def _light_cost(pool: PiecePool, goals: Sequence[Goal]) -> float:
    """Returns the mean cost of the lightest tokens of a pool, as many as the largest share needs. Fewer tokens cost no
    more each, and the cost does not rise while tails are taken."""
    most = max(goal.tokens for goal in goals)
    return pool.light_work(most) / max(1, most)


class _Need:
    """Tokens and work that shares still need."""

    def __init__(self, goals: Sequence[Goal]) -> None:
        self._loads = [goal.load for goal in goals]
        self._tokens = [goal.tokens for goal in goals]
        self._work = [goal.work for goal in goals]
        self._open_work = list(self._work)  # minus infinity where a share is closed

    def goals(self) -> list[Goal]:
        """Returns the needs as goals."""
        return [Goal(*goal) for goal in zip(self._tokens, self._work, self._loads, strict=True)]

    def reduce(self, share: int, tokens: int, work: int) -> None:
        """Subtracts tokens and work that a share got."""
        self._tokens[share] -= tokens
        self._work[share] -= work
        self._open_work[share] -= work

    def close(self, share: int) -> None:
        """Closes a share: it gets no further long pieces."""
        self._open_work[share] = -math.inf

    def neediest(self, mean_cost: float) -> int | None:
        """Finds the share that misses most work beyond its missing tokens at a mean cost; the first of equals, None if
        all are closed."""
        most, neediest = -math.inf, None
        for share, work in enumerate(self._open_work):
            need = work - mean_cost * self._tokens[share]
            if need > most:
                most, neediest = need, share
        return neediest

    def has_room(self, share: int, piece: Piece, cost: float) -> bool:
        """Checks whether a share, with the whole piece, still needs tokens of at least this mean cost."""
        _, _, start, stop, work = piece
        rest_tokens = self._tokens[share] - (stop - start)
        return rest_tokens >= 0 and self._work[share] - work >= cost * rest_tokens

    def fitting_tail(self, share: int, pool: PiecePool) -> int:
        """Returns tokens of the densest piece, or of its largest tail, that fit a share.

        Afterwards the pool must have tokens light enough for this share, for all with the same need together, and for
        all together that need lighter tokens than the mean.
        """
        _, document, start, stop, _ = pool.piece(pool.indices[-1])
        whole, tokens, work = stop - start, self._tokens[share], self._work[share]
        mean_cost = pool.work_left / sum(self._tokens)
        lighter = _Lighter([(self._tokens[s], self._work[s]) for s in range(len(self._tokens)) if s != share])

        def fits(tiles: int) -> bool:
            cut = max(start, stop - tiles * TILE_TOKENS)
            rest_tokens, rest_work = tokens - (stop - cut), work - pool.work(document, cut, stop)
            return (
                rest_tokens >= 0
                and rest_work >= pool.light_work(rest_tokens)
                and lighter.leave_light_tokens(rest_work / max(1, rest_tokens), rest_tokens, rest_work, pool)
                and lighter.leave_light_tokens(mean_cost, rest_tokens, rest_work, pool)
            )

        tiles = ceil_div(whole, TILE_TOKENS)
        return whole if fits(tiles) else TILE_TOKENS * largest(tiles - 1, fits)


class _Lighter:
    """Shares by the mean cost of what they need, as (tokens, work), lightest first, and their sums."""

    def __init__(self, needs: list[tuple[int, float]]) -> None:
        needs = sorted(needs, key=lambda need: need[1] / max(1, need[0]))
        self._costs = [work / max(1, tokens) for tokens, work in needs]
        self._tokens = list(accumulate((tokens for tokens, _ in needs), initial=0))
        self._work = list(accumulate((work for _, work in needs), initial=0.0))

    def leave_light_tokens(self, cost: float, tokens: int, work: float, pool: PiecePool) -> bool:
        """Checks whether a pool has tokens light enough for `tokens` with `work`, and for all shares whose need is no
        denser than `cost`."""
        shares = bisect_right(self._costs, cost)
        return work + self._work[shares] >= pool.light_work(tokens + self._tokens[shares])


def deal_by_need(pool: PiecePool, goals: dict[int, Goal], off: float, alike: float) -> dict[int, list[Piece]]:
    """Deals a whole pool out to shares with different needs, parted at the largest step between these.

    Args:
        pool: pieces to deal; it is empty afterwards.
        goals: goals of the shares, by their number.
        off: maximum miss of a share's work, as a fraction of it, for which pieces are not cut.
        alike: see `deal_longest_first`.
    """
    shares = sorted(goals, key=lambda share: (_mean_cost(goals[share]), share))
    costs = [_mean_cost(goals[share]) for share in shares]
    if len(shares) < 3 or costs[-1] - costs[0] <= alike * costs[-1]:
        dealt = deal(pool, [goals[share] for share in shares], peel=False, off=off)
        return dict(zip(shares, dealt, strict=True))
    steps = [dense - light for light, dense in pairwise(costs)]
    parting = 1 + steps.index(max(steps))
    light, dense = ({share: goals[share] for share in part} for part in (shares[:parting], shares[parting:]))
    pieces = fill(pool, Goal.sum(list(light.values())), Goal.sum(list(dense.values())), peel=False, off=off)
    return deal_by_need(PiecePool(pieces, pool.work), light, off, alike) | deal_by_need(pool, dense, off, alike)


def _mean_cost(goal: Goal) -> float:
    return goal.work / max(1, goal.tokens)
