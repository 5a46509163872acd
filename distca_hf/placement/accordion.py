"""The accordion: deals a pool of pieces out so that every share has its tokens *and* its work.

A share is what one rank gets, or one node. It takes a few dense pieces, tail first, and fills up with light ones:

    light end                                                     dense end
    | d7 | d2 | d9 |     ...     | d5[0:60K] | d1[0:90K]  ·  d1[90K:120K] |
      ^^^^^^^^^                                               ^^^^^^^^^^^^
      fill up to the share's tokens                           take up to the share's work

Why it always works: read from the dense end, the first n tokens of the pool weigh at least n times the mean, the last
n at most that, because the cost of a token never falls along a document. Exchanging one token at a time moves the work
of (dense prefix + light suffix) across the goal in steps of at most one token's cost, so some mixture has exactly
the share's tokens and its work to within one token. Removing a set of mean cost leaves a pool with the same mean:
repeat for the next share. A tail needs the keys of its whole document, the head that is left needs nothing, so tails
are taken as large as they fit: at most three cuts per share, mostly one or two, and few bytes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distca_hf.placement.piece_pool import Piece, PiecePool


# Cuts fall on multiples of this many tokens where they are free to: kernels work in tiles.
TILE_TOKENS = 128
# If a share's work, or what is left for each of the others, misses the goal by this part, the guaranteed mixture is
# used instead. Until it misses by less than half of that, more cuts are made.
OFF = 4e-3


@dataclass(frozen=True)
class Goal:
    """What a share, or several together, are still to get.

    Attributes:
        tokens: met exactly.
        work: met to within `OFF` of `load`, and one token.
        load: work of the whole share, with what it has already.
    """

    tokens: int
    work: float
    load: float

    def __sub__(self, part: "Goal") -> "Goal":
        return Goal(self.tokens - part.tokens, self.work - part.work, self.load - part.load)

    @classmethod
    def sum(cls, goals: Sequence["Goal"]) -> "Goal":
        """What several shares are to get together."""
        return cls(sum(g.tokens for g in goals), sum(g.work for g in goals), sum(g.load for g in goals))


def deal(pool: PiecePool, goals: Sequence[Goal], peel: bool = True, off: float = OFF) -> list[list[Piece]]:
    """Deals the whole pool out; goals are met if their work is in proportion to their tokens, or nearly so.

    Args:
        pool: what there is to deal; it is empty afterwards.
        goals: what each share is to get. Their tokens sum to those of the pool, their work to its work.
        peel: whether every share begins with the densest piece, or with its tail if that is too much.

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


def fill(pool: PiecePool, goal: Goal, others: Goal, peel: bool = True, off: float = OFF) -> list[Piece]:
    """Takes one share off a pool.

    Args:
        pool: what there is; if it has more or less work than all are to get, all give way in proportion.
        goal: what the share is to get.
        others: what all others are to get of the rest.
        peel: whether the share begins with the densest piece, or with its tail if that is too much.
    """
    work = _share_of_work(pool, goal, others)
    work_left, tails = pool.work_left, _take_dense(pool, goal.tokens, work, off / 2 * goal.load, peel)
    light_tokens = goal.tokens - sum([stop - start for _, _, start, stop, _ in tails])
    left = pool.work_left - pool.light_work(light_tokens)
    if abs(work_left - left - goal.work) <= off * goal.load and abs(left - others.work) <= off * others.load:
        return tails + pool.take_light(light_tokens)
    pool.put_back(len(tails))
    return _take_exactly(pool, goal.tokens, work)


def _share_of_work(pool: PiecePool, goal: Goal, others: Goal) -> float:
    """What a goal is to get of the work that there is: in proportion to what it asks for, or to its tokens if nobody
    asks for any."""
    asked = goal.work + others.work
    if asked:
        return goal.work * (pool.work_left / asked)
    return pool.work_left * goal.tokens / max(1, goal.tokens + others.tokens)


def _take_dense(pool: PiecePool, tokens: int, missing: float, near: float, peel: bool) -> list[Piece]:
    """Dense pieces and tails, so that with the lightest tokens beside them no more than `near` work is missing."""
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
        elif peel:  # even the densest piece alone is too much
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
    """The guaranteed mixture: a prefix of the pool's dense end and a suffix of its light end."""
    pool.settle()
    taken: list[Piece] = []
    most_light_work = pool.light_work(tokens)  # fewer tokens have no more
    while (piece := pool.densest) is not None and _fits(pool, piece, tokens, goal, most_light_work):
        _, _, start, stop, work = pool.take_densest()
        taken.append(piece)
        goal -= work
        tokens -= stop - start
    if piece is not None and (take := _largest_tail(pool, tokens, goal, most_light_work)):
        taken.append(pool.take_tail(pool.indices[-1], take, stay=True))  # or the light end would be another one
        tokens -= take
    taken += pool.take_light(tokens)
    pool.settle()
    return taken


def _densest_fitting(pool: PiecePool, tokens: int, missing: float, most_light_work: int) -> int:
    """Index of the densest piece that fits whole, the lightest tokens beside it; before the first if there is none.
    Light tokens alone weigh `most_light_work`."""

    def is_too_much(piece: Piece) -> bool:
        return not _fits(pool, piece, tokens, missing, most_light_work)

    indices = pool.indices
    if not is_too_much(pool.piece(indices[-1])):
        return indices[-1]
    return pool.first_index(is_too_much) - 1


def _fits(pool: PiecePool, piece: Piece, tokens: int, missing: float, most_light_work: int) -> bool:
    """Whether a piece fits whole, the lightest tokens beside it. `tokens` light ones alone weigh `most_light_work` at
    most."""
    _, _, start, stop, work = piece
    rest = missing - work
    if stop - start > tokens or rest < 0:
        return False
    return rest >= most_light_work or pool.light_work(tokens - stop + start) <= rest


def _gain(pool: PiecePool, index: int, tokens: int, light_work: int) -> int:
    """Work the share gains by a piece, over the lightest tokens in its place."""
    _, _, start, stop, work = pool.piece(index)
    return work + pool.light_work(tokens - stop + start) - light_work


def _tail(pool: PiecePool, index: int, tokens: int, missing: float, most_light_work: int) -> int:
    """Tokens of the largest tail of a piece that fits, cut on a tile where that leaves a tail of some size."""
    _, _, start, stop, _ = pool.piece(index)
    fits = _fitting(pool, index, tokens, missing, most_light_work)
    most, small = min(tokens, stop - start), 2 * TILE_TOKENS
    if fits(most):
        return most
    if most > small and fits(small + 1):
        cuts = range(-(-(stop - most) // TILE_TOKENS), stop // TILE_TOKENS + 1)
        return stop - TILE_TOKENS * cuts[bisect_left(cuts, True, key=lambda cut: fits(stop - cut * TILE_TOKENS))]
    return largest(min(most, small), fits)


def _largest_tail(pool: PiecePool, tokens: int, missing: float, most_light_work: int) -> int:
    """Tokens of the largest tail of the densest piece that fits."""
    index = pool.indices[-1]
    _, _, start, stop, _ = pool.piece(index)
    fits, most = _fitting(pool, index, tokens, missing, most_light_work), min(tokens, stop - start)
    return most if fits(most) else largest(most, fits)


def _fitting(pool: PiecePool, index: int, tokens: int, missing: float, most_light_work: int) -> Callable[[int], bool]:
    """Whether so many last tokens of a piece, with the lightest tokens beside them, stay within the share and its
    work. `tokens` light ones alone weigh `most_light_work` at most."""
    _, document, _, stop, _ = pool.piece(index)

    def fits(tail: int) -> bool:
        rest = missing - pool.work(document, stop - tail, stop)
        return rest >= 0 and (rest >= most_light_work or pool.light_work(tokens - tail) <= rest)

    return fits


def _dense_enough(pool: PiecePool, first: int, tokens: int, missing: float) -> int:
    """Index of the lightest piece whose tail alone can bring the missing work; beyond the last if there is none."""

    def is_enough(piece: Piece) -> bool:
        _, document, start, stop, _ = piece
        most = min(tokens, stop - start)
        return pool.work(document, stop - most, stop) + pool.light_work(tokens - most) >= missing

    return pool.first_index(is_enough, first)


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Largest n in [0, upper] for which `fits(n)`; `fits` is true up to some n and false beyond, `fits(0)` counts as
    true."""
    return bisect_left(range(1, upper + 1), True, key=lambda n: not fits(n))
