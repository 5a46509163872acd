"""The accordion: a two-ended fill that deals out a pool of pieces, giving every share its tokens *and* its work.

A share is the part of one rank, or of one node. It takes a few dense pieces, tail first, and fills up with light ones:

    light end                                                     dense end
    | d7 | d2 | d9 |     ...     | d5[0:60K] | d1[0:90K]  ·  d1[90K:120K] |
      ^^^^^^^^^                                               ^^^^^^^^^^^^
      fill up to the share's tokens                           take up to the share's work

It always works, because the cost of a token never falls along a document. Read from the dense end, the first n tokens
of the pool weigh at least n times the mean, and the last n at most that. Swapping one token at a time moves the work
of (dense prefix + light suffix) across the goal in steps of at most one token's cost. So some mixture has exactly the
share's tokens, and its work to within one token. Removing a set of mean cost leaves a pool with the same mean: repeat
for the next share. A tail needs the keys of its whole document, and the remaining front needs none. So each tail is
the largest that fits: at most three cuts per share, mostly one or two, and few bytes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distca_hf.arrays import ceil_div
from distca_hf.layout import TILE_TOKENS
from distca_hf.placement.piece_pool import Piece, PiecePool, work_of


# Maximum deviation of a share's work, or of the others' mean, as a fraction of the work. Cuts are made until half of
# it is reached; if it is exceeded, the guaranteed mixture is used. It keeps the placement's promise of 0.5 %.
OFF = 4e-3


@dataclass(frozen=True)
class Goal:
    """Tokens and work that a share, or several together, still need.

    Attributes:
        tokens: tokens, met exactly.
        work: work, met to within `OFF` of `load` and one token's cost.
        load: work of the whole share, including its present pieces.
    """

    tokens: int
    work: float
    load: float

    def __sub__(self, part: "Goal") -> "Goal":
        return Goal(self.tokens - part.tokens, self.work - part.work, self.load - part.load)

    @classmethod
    def sum(cls, goals: Sequence["Goal"]) -> "Goal":
        """Sums the goals of several shares."""
        return cls(sum(g.tokens for g in goals), sum(g.work for g in goals), sum(g.load for g in goals))


def deal(pool: PiecePool, goals: Sequence[Goal], peel: bool = True, off: float = OFF) -> list[list[Piece]]:
    """Deals out the whole pool. Meets goals whose work is proportional to their tokens, or nearly so.

    Args:
        pool: pieces to deal; it is empty afterwards.
        goals: goals of the shares. Their tokens sum to the pool's, their work to its work.
        peel: whether every share begins with the densest piece, or with its tail if that is too much.
        off: maximum deviation of a share's work, see `OFF`.

    Returns:
        The pieces of each share.
    """
    others = Goal.sum(goals)
    shares: list[list[Piece]] = []
    for goal in goals[:-1]:
        others -= goal
        shares.append(fill(pool, goal, others, peel, off))
    shares.append(pool.take_all())
    return shares


def deal_lightest_first(pool: PiecePool, goals: Sequence[Goal], off: float = OFF) -> list[list[Piece]]:
    """Deals as `deal` does, but first to the share that needs the lightest tokens.

    A late share finds the mean of the pool. It cannot be much lighter, but remaining dense pieces can make it denser.
    """
    order = sorted(range(len(goals)), key=lambda share: goals[share].work / max(1, goals[share].tokens))
    dealt = deal(pool, [goals[share] for share in order], off=off)
    return [dealt[order.index(share)] for share in range(len(goals))]


def largest_miss(shares: Sequence[list[Piece]], goals: Sequence[Goal]) -> float:
    """Returns the largest deviation of a share's work, as a fraction of it."""
    return max(abs(work_of(held) - goal.work) / max(1.0, goal.load) for held, goal in zip(shares, goals, strict=True))


def fill(pool: PiecePool, goal: Goal, others: Goal, peel: bool = True, off: float = OFF) -> list[Piece]:
    """Takes one share from a pool.

    Args:
        pool: pieces to take from; if its work is not the sum of all goals, all goals change in proportion.
        goal: goal of the share.
        others: goals of all later shares, together.
        peel: whether the share begins with the densest piece, or with its tail if that is too much.
        off: maximum deviation of the share's work, see `OFF`.
    """
    asked = goal.work + others.work
    if asked:
        work = goal.work * (pool.work_left / asked)
    else:  # goals of no work are in proportion to their tokens
        work = pool.work_left * goal.tokens / max(1, goal.tokens + others.tokens)
    work_left, tails = pool.work_left, _take_dense(pool, goal.tokens, work, off / 2 * goal.load, peel)
    light_tokens = goal.tokens - sum([stop - start for _, _, start, stop, _ in tails])
    left = pool.work_left - pool.light_work(light_tokens)
    if abs(work_left - left - goal.work) <= off * goal.load and abs(left - others.work) <= off * others.load:
        return tails + pool.take_light(light_tokens)
    pool.put_back(len(tails))
    return _take_exactly(pool, goal.tokens, work)


def _take_dense(pool: PiecePool, tokens: int, missing: float, near: float, peel: bool) -> list[Piece]:
    """Takes dense pieces and tails until, with the lightest tokens next to them, at most `near` work is missing."""
    # In each round: the densest piece that fits whole, else a tail. The last round cuts a lighter piece to measure.
    taken: list[Piece] = []
    last_cut = False
    while tokens and (indices := pool.indices) and not last_cut:
        light_work = pool.light_work(tokens)
        if not peel and missing - light_work <= near:
            break
        index, densest = _densest_fitting(pool, tokens, missing, light_work), indices[-1]
        is_fitting = index in indices and (not peel or index == densest)
        if is_fitting and _gain(pool, index, tokens, light_work) > near / 4:
            _, _, start, stop, _ = pool.piece(index)
            take = stop - start
        elif peel:  # even only the densest piece is too much
            index, take = densest, _tail(pool, densest, tokens, missing, light_work)
        else:  # finish with the tail of the lightest piece that is dense enough
            index, last_cut = _dense_enough(pool, index + 1, tokens, missing), True
            take = _tail(pool, index, tokens, missing, light_work) if index in indices else 0
        if take == 0:
            break
        taken.append(pool.take_tail(index, take))
        missing -= taken[-1][4]
        tokens -= take
        peel = False
    return taken


def _take_exactly(pool: PiecePool, tokens: int, goal: float) -> list[Piece]:
    """Takes the guaranteed mixture: a prefix of the pool's dense end and a suffix of its light end."""
    pool.settle()
    taken: list[Piece] = []
    most_light_work = pool.light_work(tokens)  # fewer tokens have no more
    while (piece := pool.densest) is not None and _fits(pool, piece, tokens, goal, most_light_work):
        _, _, start, stop, work = pool.take_densest()
        taken.append(piece)
        goal -= work
        tokens -= stop - start
    if piece is not None:
        index, most = pool.indices[-1], min(tokens, piece[3] - piece[2])
        fits = _fitting(pool, index, tokens, goal, most_light_work)
        take = most if fits(most) else largest(most, fits)
        if take:
            taken.append(pool.take_tail(index, take, stay=True))  # otherwise the light end would change
            tokens -= take
    taken += pool.take_light(tokens)
    pool.settle()
    return taken


def _densest_fitting(pool: PiecePool, tokens: int, missing: float, most_light_work: int) -> int:
    """Finds the densest piece that fits whole, with the lightest tokens next to it; the index before the first if none
    fits. `tokens` light tokens by themselves weigh `most_light_work`."""
    densest = pool.indices[-1]
    if _fits(pool, pool.piece(densest), tokens, missing, most_light_work):
        return densest
    return pool.first_index(lambda piece: not _fits(pool, piece, tokens, missing, most_light_work)) - 1


def _fits(pool: PiecePool, piece: Piece, tokens: int, missing: float, most_light_work: int) -> bool:
    """Checks whether a piece fits whole, together with the lightest tokens. `tokens` light tokens weigh at most
    `most_light_work`."""
    _, _, start, stop, work = piece
    rest = missing - work
    if stop - start > tokens or rest < 0:
        return False
    return rest >= most_light_work or pool.light_work(tokens - stop + start) <= rest


def _gain(pool: PiecePool, index: int, tokens: int, light_work: int) -> int:
    """Returns the work that the share gains by a piece, compared with the lightest tokens in its place."""
    _, _, start, stop, work = pool.piece(index)
    return work + pool.light_work(tokens - stop + start) - light_work


def _tail(pool: PiecePool, index: int, tokens: int, missing: float, most_light_work: int) -> int:
    """Returns tokens of the largest tail of a piece that fits, cut on a tile if the tail is longer than two tiles."""
    _, _, start, stop, _ = pool.piece(index)
    fits = _fitting(pool, index, tokens, missing, most_light_work)
    most, small = min(tokens, stop - start), 2 * TILE_TOKENS
    if fits(most):
        return most
    if most > small and fits(small + 1):
        cuts = range(ceil_div(stop - most, TILE_TOKENS), stop // TILE_TOKENS + 1)
        index = bisect_left(cuts, True, key=lambda cut: fits(stop - cut * TILE_TOKENS))
        if index < len(cuts):  # otherwise a chunk begins inside the tail: a shorter one may have more work
            return stop - TILE_TOKENS * cuts[index]
    return largest(min(most, small), fits)


def _fitting(pool: PiecePool, index: int, tokens: int, missing: float, most_light_work: int) -> Callable[[int], bool]:
    """Makes the predicate `fits(tail)`: a tail of a piece, with the lightest tokens next to it, is within the share's
    work. `tokens` light tokens by themselves weigh at most `most_light_work`."""
    _, document, _, stop, _ = pool.piece(index)

    def fits(tail: int) -> bool:
        rest = missing - pool.work(document, stop - tail, stop)
        return rest >= 0 and (rest >= most_light_work or pool.light_work(tokens - tail) <= rest)

    return fits


def _dense_enough(pool: PiecePool, first: int, tokens: int, missing: float) -> int:
    """Finds the lightest piece whose tail by itself has the missing work; the index beyond the last if none has."""

    def is_enough(piece: Piece) -> bool:
        _, document, start, stop, _ = piece
        most = min(tokens, stop - start)
        return pool.work(document, stop - most, stop) + pool.light_work(tokens - most) >= missing

    return pool.first_index(is_enough, first)


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Finds the largest n in [0, upper] with `fits(n)`. `fits` is true up to some n and false beyond; it is not called
    with 0, which counts as true."""
    return bisect_left(range(1, upper + 1), True, key=lambda n: not fits(n))
