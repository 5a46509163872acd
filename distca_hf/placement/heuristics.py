"""Heuristics that deal documents to the ranks of a node, and the choice among them.

No heuristic is best for all documents. Where documents and ranks are few, several are tried, and the deal that moves
the fewest keys is kept. That takes little time, and wins most, because every document counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distca_hf.placement.accordion import OFF, Goal, deal
from distca_hf.placement.heavy_documents import deal_in_groups
from distca_hf.placement.longest_first import deal_longest_first
from distca_hf.placement.piece_pool import Piece, PiecePool


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
    """A deal in which heavy documents get ranks for themselves: see `heavy_documents`.

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


def deal_with_best(
    make_pool: Callable[[], PiecePool],
    goals: Sequence[Goal],
    off: float,
    heuristics: Sequence[Heuristic | GroupedHeuristic],
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
