"""Heuristics that deal documents to the ranks of a node, and the choice among them.

No heuristic is best for all documents. Where documents and ranks are few, several are tried, and the deal that moves
the fewest keys is kept. That takes little time, and wins most, because every document counts.

**Heavy documents.** A document with more work than one rank's share is divided over several ranks. Each of them but
one needs keys and values of the others. Where ranks hold few documents, most bytes are theirs. So the number of ranks
of each heavy document is settled first, and light documents are handed out accordingly:

    | r0     r1     r2 | r3     r4     r5 | r6     r7 | r8     r9 | r10 |
    | 64K + 128K light | 64K + 128K light | 58K + 70K | 50K + 78K | 46K + 18K |

1. A heavy document gets as many ranks as it needs at least. The remaining ranks are apportioned like seats of a
   parliament: each to the document with most work per rank.
2. Light documents are handed out to groups as in `longest_first`. Groups are so large that nearly all stay whole.
3. The accordion deals each group to its ranks. Only there its heavy document is cut.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

from distca_hf.cost import Work
from distca_hf.placement.accordion import OFF, Goal, deal, largest
from distca_hf.placement.longest_first import deal_longest_first, hand_out_longest_first
from distca_hf.placement.piece_pool import Piece, PiecePool, piece_of


# Minimum work of a heavy document, as fractions of a rank's mean work, in the order in which they are tried. Beside
# nearly a rank's work only the lightest tokens fit, so the document gets ranks of its own. If groups cannot be filled,
# the next fraction makes fewer documents heavy.
HEAVY = (0.8, 0.9, 1.0)
# Longest document, in tokens, that is cut to fill groups up: its keys and values are few bytes.
SHORT_FOR_GROUPS = 2048
# Maximum spread of the groups' needs, in mean cost per token, as a fraction of the largest. Groups within it are
# filled one after the other.
ALIKE_GROUPS = 0.5
# Work of the front that is cut off a heavy document beforehand, as a fraction of a rank's work. Of a document of one
# rank's work it is the first 22 % of the tokens. The cut costs few bytes, and leaves the accordion light tokens in
# every group, beside which parts can be large.
FRONT_SHARE = 0.05


def deal_in_groups(pieces: Sequence[Piece], work: Work, goals: Sequence[Goal], off: float) -> list[list[Piece]] | None:
    """Deals pieces to ranks in groups of consecutive ranks, one group for each heavy piece.

    Args:
        pieces: pieces to deal.
        work: work of a query range, `work(document, start, stop)`.
        goals: goals of the ranks. Their tokens sum to those of the pieces, their work to their work.
        off: maximum miss of a rank's work, as a fraction of it.

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
    """Deals pieces with a group for each heavy piece; None if that fails."""
    # 1. Ranks of each group, and the light tokens and work that they need beside the heavy piece.
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

    # 2. Light pieces for each group, then the accordion inside of it.
    filled, excess = hand_out_longest_first(PiecePool(light, work), to_fill, SHORT_FOR_GROUPS, off, ALIKE_GROUPS)
    if max(map(abs, excess)) > off:
        return None
    shares: list[list[Piece]] = []
    for piece, others, of_group, more in zip(heavy, filled, goals_of, excess, strict=True):
        if len(of_group) == 1:
            shares.append([piece, *others])
            continue
        pool = PiecePool([*_parted(piece, work, FRONT_SHARE * of_group[0].load), *others], work)
        in_proportion = [replace(goal, work=goal.work + more * goal.load) for goal in of_group]
        shares += deal(pool, in_proportion, off=off - abs(more))
    return shares


def _parted(piece: Piece, work: Work, front_work: float) -> list[Piece]:
    """Cuts a piece in two, so that the front has at most this much work."""
    _, document, start, stop, _ = piece
    cut = start + largest(stop - start, lambda tokens: work(document, start, start + tokens) <= front_work)
    return [piece_of(document, *part, work(document, *part)) for part in pairwise(sorted({start, cut, stop}))]


def _apportioned(works: Sequence[int], goals: Sequence[Goal]) -> list[int] | None:
    """Returns the number of ranks of each heavy piece; None for fewer than two pieces, or if ranks are too few."""
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


@dataclass(frozen=True)
class Heuristic:
    """One way to deal documents to ranks.

    Attributes:
        short_tokens: documents up to this length are cut readily, longer ones stay whole where they can. A cut costs
            few bytes of keys and values, 32 MB per layer of an 8B Llama for 8K. None: the accordion deals all alike.
        peel: see `accordion.deal`.
        most_off: maximum miss of a rank's work in the accordion, as a fraction of it.
    """

    short_tokens: int | None
    peel: bool = False
    most_off: float = OFF

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals a whole pool out; ranks may miss their work by `off` before long documents are cut for it."""
        if self.short_tokens is None:
            return deal(pool, goals, self.peel, min(off, self.most_off))
        return deal_longest_first(pool, goals, self.short_tokens, off, ALIKE)


@dataclass(frozen=True)
class GroupedHeuristic:
    """A deal in which heavy documents get ranks for themselves.

    Attributes:
        otherwise: the heuristic where there are no such groups.
    """

    otherwise: Heuristic

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals as `Heuristic.deal` does."""
        pieces, work = pool.take_all(), pool.work
        in_groups = deal_in_groups(pieces, work, goals, off)
        return self.otherwise.deal(PiecePool(pieces, work), goals, off) if in_groups is None else in_groups


# Maximum spread of the ranks' needs for short documents, in mean cost per token, as a fraction of the largest. At 1.0
# all ranks are served one after the other.
ALIKE = 1.0
# Documents per rank up to which the heuristics of few documents are tried. Groups stand in for the heuristic behind
# `otherwise`, which rarely moves less and would cost time.
FEW_DOCUMENTS = 12
# Documents per rank up to which a second heuristic is tried: with more, both deals are about as good.
SOME_DOCUMENTS = 25
# Ranks of a node, or of the world, up to which it is small. In larger ones long documents have more work than a rank,
# and are cut in any case.
FEW_RANKS = 16
# Heuristics of a small world, in the order in which they are tried; the first one alone for many documents.
HEURISTICS = (Heuristic(8192), Heuristic(2048))
# Heuristics of a world of many nodes.
HEURISTICS_OF_MANY_NODES = (Heuristic(8192), Heuristic(None))
# Heuristics of one node of many ranks.
HEURISTICS_OF_MANY_RANKS = (Heuristic(None, peel=True, most_off=3e-3),)
# Heuristics for few documents, each of which counts, in a small world.
HEURISTICS_OF_FEW_DOCUMENTS = (
    Heuristic(8192),
    GroupedHeuristic(otherwise=Heuristic(2048)),
    Heuristic(32768),
    Heuristic(None),
)
# Heuristics for few documents on one node of many ranks.
HEURISTICS_OF_FEW_DOCUMENTS_AND_MANY_RANKS = (GroupedHeuristic(otherwise=Heuristic(None, most_off=3e-3)),)


def heuristics_to_try(documents: int, ranks_of_node: int, num_ranks: int) -> Sequence[Heuristic | GroupedHeuristic]:
    """Selects the heuristics for a node with this many documents and ranks, in a world of `num_ranks`."""
    documents_per_rank = documents / ranks_of_node
    few = documents_per_rank <= FEW_DOCUMENTS
    if ranks_of_node > FEW_RANKS:
        return HEURISTICS_OF_FEW_DOCUMENTS_AND_MANY_RANKS if few else HEURISTICS_OF_MANY_RANKS
    if num_ranks > FEW_RANKS:
        return HEURISTICS_OF_MANY_NODES[: 2 if few else 1]
    return HEURISTICS_OF_FEW_DOCUMENTS if few else HEURISTICS[: 2 if documents_per_rank <= SOME_DOCUMENTS else 1]


class Deal(Protocol):
    """A way to deal a pool to ranks."""

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals a whole pool out; ranks may miss their work by `off` before long documents are cut for it."""


def deal_with_best(
    make_pool: Callable[[], PiecePool],
    goals: Sequence[Goal],
    off: float,
    heuristics: Sequence[Deal],
) -> list[list[Piece]]:
    """Returns the deal of the heuristic that moves the fewest keys; `make_pool` is called once for each."""
    dealt = [heuristic.deal(make_pool(), goals, off) for heuristic in heuristics]
    return min(dealt, key=_key_tokens) if len(dealt) > 1 else dealt[0]


def _key_tokens(shares: list[list[Piece]]) -> int:
    """Counts tokens whose keys the shares need: of each document all tokens up to a share's last one."""
    needed = 0
    for pieces in shares:
        last: dict[int, int] = {}
        for _, document, _, stop, _ in pieces:
            last[document] = max(stop, last.get(document, 0))
        needed += sum(last.values())
    return needed
