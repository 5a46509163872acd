"""Heavy documents: each gets ranks for itself, a group of them, and light documents that fill them up.

A document of more work than one rank is to have is divided over several, and each of them but one needs keys and
values that others hold. Where ranks hold few documents, most bytes are of these. So it is settled first over how many
ranks each of them is divided, and light documents are handed out accordingly:

    | r0     r1     r2 | r3     r4     r5 | r6     r7 | r8     r9 | r10 |
    | 64K + 128K light | 64K + 128K light | 58K + 70K | 50K + 78K | 46K + 18K |

1. A heavy document gets as many ranks as it needs at least. Those that are left are apportioned as seats of a
   parliament are: each to the document that has most work per rank.
2. Light documents are handed out to groups as `whole` does it. A group is large enough for nearly all to stay whole.
3. The accordion deals each group to its ranks. Only there its heavy document is cut.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from distca_hf.cost import Work
from distca_hf.placement.accordion import Goal, deal, largest
from distca_hf.placement.longest_first import hand_out_whole
from distca_hf.placement.piece_pool import Piece, PiecePool, piece_of


# A document of this part of a rank's work is heavy: what is nearly a rank's work leaves room for the lightest tokens
# only, which a rank of its own has. Where groups cannot be filled so, fewer documents are heavy.
HEAVY = (0.8, 0.9, 1.0)
# Documents up to this length may be cut to fill groups up.
SHORT_FOR_GROUPS = 2048
# Groups are served one after the other if the mean costs of what they still need differ by this part at most.
ALIKE_GROUPS = 0.5
# A heavy document's head of this part of a rank's work is cut off beforehand: the first 22 % of the tokens, if the
# document is one rank's work. That costs few bytes, and leaves the accordion light tokens in every group, beside which
# parts can be large.
HEAD = 0.05


def deal_in_groups(pieces: Sequence[Piece], work: Work, goals: Sequence[Goal], off: float) -> list[list[Piece]] | None:
    """Deals pieces to ranks, in groups of consecutive ones: one for each heavy piece.

    Args:
        pieces: what there is to deal.
        work: work of a query range, `work(document, start, stop)`.
        goals: what each rank is to get. Their tokens sum to those of the pieces, their work to their work.
        off: part of its work that a rank may miss.

    Returns:
        The pieces of each rank; None if there are not two groups, or if one of them cannot be filled.
    """
    by_work = sorted(pieces, key=lambda piece: (-piece[4], piece[1:4]))
    rank_work = _mean_work(goals)
    counts = [sum(piece[4] > part * rank_work for piece in by_work) for part in HEAVY]
    for num_heavy in dict.fromkeys(counts):  # each number once
        shares = _dealt(by_work[:num_heavy], by_work[num_heavy:], work, goals, off)
        if shares is not None:
            return shares
    return None


def _dealt(
    heavy: list[Piece], light: list[Piece], work: Work, goals: Sequence[Goal], off: float
) -> list[list[Piece]] | None:
    """Pieces of each rank with a group for each heavy piece; None if that fails."""
    num_ranks = _apportioned([piece[4] for piece in heavy], goals)
    if num_ranks is None:
        return None
    goals_of = [goals[first:stop] for first, stop in pairwise(accumulate(num_ranks, initial=0))]
    to_fill = [
        Goal.sum(of_group) - Goal(stop - start, of_piece, 0)
        for of_group, (_, _, start, stop, of_piece) in zip(goals_of, heavy, strict=True)
    ]
    if any(goal.tokens < 0 or goal.work < 0 for goal in to_fill):
        return None
    filled, excess = hand_out_whole(PiecePool(light, work), to_fill, SHORT_FOR_GROUPS, off, ALIKE_GROUPS)
    if max(map(abs, excess)) > off:
        return None
    shares: list[list[Piece]] = []
    for piece, others, of_group, more in zip(heavy, filled, goals_of, excess, strict=True):
        if len(of_group) == 1:
            shares.append([piece, *others])
            continue
        pool = PiecePool([*_parted(piece, work, HEAD * of_group[0].load), *others], work)
        in_proportion = [replace(goal, work=goal.work + more * goal.load) for goal in of_group]
        shares += deal(pool, in_proportion, off=off - abs(more))
    return shares


def _parted(piece: Piece, work: Work, head_work: float) -> list[Piece]:
    """A piece in two: the head has so much work at most."""
    _, document, start, stop, _ = piece
    cut = start + largest(stop - start, lambda tokens: work(document, start, start + tokens) <= head_work)
    return [piece_of(document, *part, work(document, *part)) for part in pairwise(sorted({start, cut, stop}))]


def _apportioned(works: Sequence[int], goals: Sequence[Goal]) -> list[int] | None:
    """Ranks of each heavy piece; None for less than two pieces, or if they need more ranks than there are."""
    rank_work = _mean_work(goals)
    if len(works) < 2 or not rank_work:  # stripes may have used up all work that ranks are to have
        return None
    num_ranks = [math.ceil(of_piece / rank_work) for of_piece in works]
    left = len(goals) - sum(num_ranks)
    if left < 0:
        return None
    queue = [(-of_piece / ranks, at) for at, (of_piece, ranks) in enumerate(zip(works, num_ranks, strict=True))]
    heapq.heapify(queue)
    for _ in range(left):
        _, at = queue[0]
        num_ranks[at] += 1
        heapq.heapreplace(queue, (-works[at] / num_ranks[at], at))
    return num_ranks


def _mean_work(goals: Sequence[Goal]) -> float:
    return sum(goal.work for goal in goals) / len(goals)
