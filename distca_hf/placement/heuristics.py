"""Heuristics that deal documents to shares (nodes, or the ranks of one), and the choice among them.

**Longest first** (LPT, longest processing time first). The accordion fills one share after another. The first shares
use up the pieces that would balance the last ones, which must then divide long documents. This heuristic fills all
shares at the same time. Long documents stay whole if they can, and fewer keys move:

1. Long pieces are handed out, longest first, each to the share with most missing work beyond the mean work of its
   missing tokens. A piece that does not fit is cut: the share takes its tail and gets no more long pieces. The
   front is handed out later.
2. Short documents are left, which may be cut anywhere for few bytes. Shares that need lighter documents are separated
   from shares that need denser ones, until the accordion can fill them one after the other.

**Heavy documents.** A document with more work than one rank's share is divided over several ranks. All of them except
one need keys and values of the others. If ranks hold few documents, most bytes are due to heavy ones. So the number of
ranks of each heavy document is settled first, and light documents are handed out accordingly:

    | r0     r1     r2 | r3     r4     r5 | r6     r7 | r8     r9 | r10 |
    | 64K + 128K light | 64K + 128K light | 58K + 70K | 50K + 78K | 46K + 18K |

1. A heavy document gets the fewest ranks that it needs. The remaining ranks are apportioned like seats of a
   parliament: each to the document with most work per rank.
2. Light documents are handed out to groups, longest first. Groups are so large that nearly all stay whole.
3. The accordion deals each group to its ranks, and only then cuts its heavy document.

No heuristic is best for all documents. With few documents and ranks, several are tried, and the deal that moves the
fewest keys is kept. That takes little time then, and gains most, because every document counts.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from distca_hf.arrays import ceil_div
from distca_hf.cost import Work
from distca_hf.layout import TILE_TOKENS
from distca_hf.placement.accordion import OFF, Goal, deal, fill, largest
from distca_hf.placement.piece_pool import Piece, PiecePool, joined, piece_of, work_of


# Minimum mean cost of a share's need, as a fraction of the pool's mean cost per token, at which light tokens suffice
# without a closer look.
LIGHT_ENOUGH = 0.9
# Deviation of the work for which short documents are cut, as a fraction of the one for long documents: cuts of short
# ones cost fewer bytes.
FINISH = 1 / 2
# Maximum spread of the ranks' needs for short documents, in mean cost per token, as a fraction of the largest. At 1.0
# all ranks are served one after the other.
ALIKE = 1.0
# The same for nodes. It is lower, because the deviation of a node weighs more than a rank's.
ALIKE_NODES = 0.5
# Minimum work of a heavy document, as fractions of a rank's mean work, in the order in which they are tried. Next to
# nearly a rank's work only the lightest tokens fit, so the document gets its own ranks. If groups cannot be filled,
# the next fraction makes fewer documents heavy.
HEAVY = (0.8, 0.9, 1.0)
# Longest document, in tokens, that may be cut to fill up groups: its keys and values are few bytes.
SHORT_FOR_GROUPS = 2048
# Maximum spread of the groups' needs, in mean cost per token, as a fraction of the largest. Groups within it are
# filled one after the other.
ALIKE_GROUPS = 0.5
# Work of the front that is cut off a heavy document beforehand, as a fraction of a rank's work: the first 22 % of the
# tokens of a document with one rank's work. The cut costs few bytes, and gives the accordion light tokens in every
# group, next to which parts can be large.
FRONT_SHARE = 0.05


def deal_longest_first(
    pool: PiecePool, goals: Sequence[Goal], short_tokens: int, off: float, alike: float
) -> list[list[Piece]]:
    """Deals out a whole pool, keeping long pieces whole if they fit.

    Args:
        pool: pieces to deal; it is empty afterwards.
        goals: goals of the shares. Their tokens sum to the pool's, their work to its work.
        short_tokens: documents up to this length are short.
        off: maximum deviation of a share's work, as a fraction of it; beyond it the accordion deals everything
            instead.
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
    """Deals as `deal_longest_first` does, but never with the accordion instead. Returns the pieces of each share, and
    its excess as a fraction of its work."""
    shares, left = _hand_out_long(pool, goals, short_tokens)
    excess = [0.0] * len(goals)
    for share, short in deal_by_need(pool, dict(enumerate(left)), off * FINISH, alike).items():
        shares[share] += short
        excess[share] = (work_of(short) - left[share].work) / max(1.0, left[share].load)
    return shares, excess


def _hand_out_long(pool: PiecePool, goals: Sequence[Goal], short_tokens: int) -> tuple[list[list[Piece]], list[Goal]]:
    """Takes the long pieces from a pool. Returns the pieces of each share, and the remaining goals."""
    shares: list[list[Piece]] = [[] for _ in goals]
    tokens, work = [goal.tokens for goal in goals], [goal.work for goal in goals]
    open_work = list(work)  # minus infinity for a closed share, which gets no further long pieces
    tokens_left, most = sum(tokens), max(tokens)
    # Mean cost of the lightest tokens, as many as the largest share needs. Fewer tokens cost no more each, and the
    # cost does not rise while tails are taken.
    light_cost = pool.light_work(most) / max(1, most)
    while (piece := pool.densest) is not None and piece[3] > short_tokens:
        # 1. The share that lacks most work beyond its missing tokens at the mean cost; the first of equals.
        mean_cost = pool.work_left / tokens_left
        needs = [of_share - mean_cost * missing for of_share, missing in zip(open_work, tokens, strict=True)]
        most_need = max(needs)
        if most_need == -math.inf:
            break
        share = needs.index(most_need)

        # 2. The whole piece if it fits, else its largest tail that fits; if none fits, the share is closed.
        _, _, start, stop, of_piece = piece
        rest_tokens, least_cost = tokens[share] - (stop - start), max(LIGHT_ENOUGH * mean_cost, light_cost)
        if rest_tokens >= 0 and work[share] - of_piece >= least_cost * rest_tokens:
            taken = pool.take_densest()
        else:
            tail = _fitting_tail(pool, share, tokens, work, mean_cost)
            if tail < min(stop - start, short_tokens):
                open_work[share] = -math.inf
                continue
            taken = pool.take_tail(pool.indices[-1], tail)
        _, _, start, stop, of_piece = taken
        shares[share].append(taken)
        tokens[share] -= stop - start
        tokens_left -= stop - start
        work[share] -= of_piece
        open_work[share] -= of_piece
    left = zip(tokens, work, [goal.load for goal in goals], strict=True)
    return shares, [Goal(*goal) for goal in left]


def _fitting_tail(pool: PiecePool, share: int, tokens: list[int], work: list[float], mean_cost: float) -> int:
    """Returns the tokens of the densest piece, or of its largest tail, that fit a share, given what all shares need.

    Afterwards the pool must have tokens light enough for this share, for it together with all shares that need no
    denser ones, and for all shares together that need lighter tokens than the mean.
    """
    _, document, start, stop, _ = pool.piece(pool.indices[-1])
    others = [(tokens[other], work[other]) for other in range(len(tokens)) if other != share]
    others.sort(key=lambda need: need[1] / max(1, need[0]))
    costs = [of_share / max(1, missing) for missing, of_share in others]
    tokens_below = list(accumulate((missing for missing, _ in others), initial=0))
    work_below = list(accumulate((of_share for _, of_share in others), initial=0.0))

    def fits(tiles: int) -> bool:
        cut = max(start, stop - tiles * TILE_TOKENS)
        rest_tokens, rest_work = tokens[share] - (stop - cut), work[share] - pool.work(document, cut, stop)
        if rest_tokens < 0 or rest_work < pool.light_work(rest_tokens):
            return False
        for cost in (rest_work / max(1, rest_tokens), mean_cost):
            lighter = bisect_right(costs, cost)
            if rest_work + work_below[lighter] < pool.light_work(rest_tokens + tokens_below[lighter]):
                return False
        return True

    tiles = ceil_div(stop - start, TILE_TOKENS)
    return stop - start if fits(tiles) else TILE_TOKENS * largest(tiles - 1, fits)


def deal_by_need(pool: PiecePool, goals: dict[int, Goal], off: float, alike: float) -> dict[int, list[Piece]]:
    """Deals out a whole pool to shares with different needs, separated at the largest step between needs.

    Args:
        pool: pieces to deal; it is empty afterwards.
        goals: goals of the shares, by their number.
        off: maximum deviation of a share's work, as a fraction of it, for which pieces are not cut.
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


def deal_in_groups(pieces: Sequence[Piece], work: Work, goals: Sequence[Goal], off: float) -> list[list[Piece]] | None:
    """Deals pieces to ranks in groups of consecutive ranks, one group for each heavy piece.

    Args:
        pieces: pieces to deal.
        work: work of a query range, `work(document, start, stop)`.
        goals: goals of the ranks. Their tokens sum to the pieces' tokens, their work to the pieces' work.
        off: maximum deviation of a rank's work, as a fraction of it.

    Returns:
        The pieces of each rank; None if there are fewer than two groups, or one of them cannot be filled.
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
    # 1. Ranks of each group, and the light tokens and work that it needs next to the heavy piece.
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

    # 2. Light pieces for each group, then the accordion within it.
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
    """Cuts a piece in two, with at most this much work in the front."""
    _, document, start, stop, _ = piece
    cut = start + largest(stop - start, lambda tokens: work(document, start, start + tokens) <= front_work)
    return [piece_of(document, *part, work(document, *part)) for part in pairwise(sorted({start, cut, stop}))]


def _apportioned(works: Sequence[int], goals: Sequence[Goal]) -> list[int] | None:
    """Returns the number of ranks of each heavy piece; None for fewer than two pieces, or if ranks are too few."""
    rank_work = _mean_work(goals)
    if len(works) < 2 or not rank_work:  # stripes may have used up the work of all ranks
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
        short_tokens: documents up to this length are cut readily, longer ones stay whole if they can. A cut costs few
            bytes of keys and values, 32 MB per layer of an 8B Llama for 8K. None: the accordion deals all documents.
        in_groups: whether heavy documents get their own ranks, if groups can be made.
        peel: see `accordion.deal`.
        most_off: maximum deviation of a rank's work in the accordion, as a fraction of it.
    """

    short_tokens: int | None
    in_groups: bool = False
    peel: bool = False
    most_off: float = OFF

    def deal(self, pool: PiecePool, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals out a whole pool. Ranks' work may deviate by `off` before long documents are cut."""
        if self.in_groups:
            pieces = pool.take_all()
            shares = deal_in_groups(pieces, pool.work, goals, off)
            if shares is not None:
                return shares
            pool = PiecePool(pieces, pool.work)
        if self.short_tokens is None:
            return deal(pool, goals, self.peel, min(off, self.most_off))
        return deal_longest_first(pool, goals, self.short_tokens, off, ALIKE)


# Documents per rank up to which the heuristics of few documents are tried. A heuristic with groups replaces the same
# one without, which rarely moves less and would cost time.
FEW_DOCUMENTS = 12
# Documents per rank up to which a second heuristic is tried: with more, both deals are about equally good.
SOME_DOCUMENTS = 25
# Ranks up to which a node, or the world, is small. In larger ones long documents have more work than a rank, and are
# cut in any case.
FEW_RANKS = 16
# Heuristics of a small world, in the order in which they are tried; for many documents only the first one.
HEURISTICS = (Heuristic(8192), Heuristic(2048))
# Heuristics of a world of many nodes.
HEURISTICS_OF_MANY_NODES = (Heuristic(8192), Heuristic(None))
# Heuristics of one node of many ranks.
HEURISTICS_OF_MANY_RANKS = (Heuristic(None, peel=True, most_off=3e-3),)
# Heuristics for few documents, each of which counts, in a small world.
HEURISTICS_OF_FEW_DOCUMENTS = (
    Heuristic(8192),
    Heuristic(2048, in_groups=True),
    Heuristic(32768),
    Heuristic(None),
)
# Heuristics for few documents on one node of many ranks.
HEURISTICS_OF_FEW_DOCUMENTS_AND_MANY_RANKS = (Heuristic(None, in_groups=True, most_off=3e-3),)


def heuristics_to_try(documents: int, ranks_of_node: int, num_ranks: int) -> Sequence[Heuristic]:
    """Selects the heuristics for a node with this many documents and ranks, in a world of `num_ranks`."""
    documents_per_rank = documents / ranks_of_node
    few = documents_per_rank <= FEW_DOCUMENTS
    if ranks_of_node > FEW_RANKS:
        return HEURISTICS_OF_FEW_DOCUMENTS_AND_MANY_RANKS if few else HEURISTICS_OF_MANY_RANKS
    if num_ranks > FEW_RANKS:
        return HEURISTICS_OF_MANY_NODES[: 2 if few else 1]
    return HEURISTICS_OF_FEW_DOCUMENTS if few else HEURISTICS[: 2 if documents_per_rank <= SOME_DOCUMENTS else 1]


def key_tokens(shares: Iterable[list[Piece]]) -> int:
    """Counts tokens whose keys the shares need: for each document all tokens up to a share's last one."""
    needed = 0
    for pieces in shares:
        last: dict[int, int] = {}
        for _, document, _, stop, _ in pieces:
            last[document] = max(stop, last.get(document, 0))
        needed += sum(last.values())
    return needed
