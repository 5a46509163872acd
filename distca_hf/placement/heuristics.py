"""Ways to deal documents to the ranks of a node: which are tried, and which of them moves least.

None is best for all documents. Several are tried where documents and ranks are few: it takes little time there, and
most is to be won, because every document counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distca_hf.placement.accordion import OFF, Goal, deal
from distca_hf.placement.heavy_documents import deal_in_groups
from distca_hf.placement.longest_first import deal_whole
from distca_hf.placement.piece_pool import Line, Piece


@dataclass(frozen=True)
class Way:
    """One way to deal.

    Attributes:
        short_tokens: documents up to this length are cut readily, longer ones stay whole where they can: few bytes of
            keys and values, 32 MB per layer of an 8B Llama for 8K. None: the accordion deals all alike.
        peel: see `accordion.deal`.
        most_off: part of its work by which the accordion may let a rank miss it.
    """

    short_tokens: int | None
    peel: bool = False
    most_off: float = OFF

    def deal(self, line: Line, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """Deals a whole line out; ranks may miss their work by `off` before long documents are cut for it."""
        if self.short_tokens is None:
            return deal(line, goals, self.peel, min(off, self.most_off))
        return deal_whole(line, goals, self.short_tokens, off, ALIKE)


@dataclass(frozen=True)
class InGroups:
    """Heavy documents get ranks for themselves, and light ones fill these up: see `heavy`.

    Attributes:
        otherwise: the way where there are no such groups.
    """

    otherwise: Way

    def deal(self, line: Line, goals: Sequence[Goal], off: float) -> list[list[Piece]]:
        """As `Way.deal`."""
        pieces, work = line.take_all(), line.work
        in_groups = deal_in_groups(pieces, work, goals, off)
        return self.otherwise.deal(Line(pieces, work), goals, off) if in_groups is None else in_groups


# How much needs for short documents may differ.
ALIKE = 1.0
# With this many documents per rank or fewer there are ways of their own. Groups stand in for the way behind
# `otherwise`, which rarely moves less and would cost time.
FEW_DOCUMENTS = 12
SOME_DOCUMENTS = 25
# With more ranks than this on one node long documents are more work than a rank, and cut anyway.
FEW_RANKS = 16
# In a small world; in one of many nodes; on one node of many ranks. The first of them is the one for many documents.
WAYS = (Way(8192), Way(2048))
WAYS_OF_MANY_NODES = (Way(8192), Way(None))
WAYS_OF_MANY_RANKS = (Way(None, peel=True, most_off=3e-3),)
# The same for few documents, each of which counts: in a small world; on one node of many ranks.
WAYS_OF_FEW_DOCUMENTS = (Way(8192), InGroups(otherwise=Way(2048)), Way(32768), Way(None))
WAYS_OF_FEW_DOCUMENTS_AND_MANY_RANKS = (InGroups(otherwise=Way(None, most_off=3e-3)),)


def ways_to_try(documents: int, ranks_of_node: int, num_ranks: int) -> Sequence[Way | InGroups]:
    """Ways for so many documents on a node of so many ranks, in a world of `num_ranks`."""
    documents_per_rank = documents / ranks_of_node
    few = documents_per_rank <= FEW_DOCUMENTS
    if ranks_of_node > FEW_RANKS:
        return WAYS_OF_FEW_DOCUMENTS_AND_MANY_RANKS if few else WAYS_OF_MANY_RANKS
    if num_ranks > FEW_RANKS:
        return WAYS_OF_MANY_NODES[: 2 if few else 1]
    return WAYS_OF_FEW_DOCUMENTS if few else WAYS[: 2 if documents_per_rank <= SOME_DOCUMENTS else 1]


def deal_in_best_way(
    make_line: Callable[[], Line], goals: Sequence[Goal], off: float, ways: Sequence[Way | InGroups]
) -> list[list[Piece]]:
    """What the way deals that moves fewest keys; `make_line` is called once for each."""
    dealt = [way.deal(make_line(), goals, off) for way in ways]
    return min(dealt, key=_key_tokens) if len(dealt) > 1 else dealt[0]


def _key_tokens(shares: list[list[Piece]]) -> int:
    """Tokens whose keys the shares need: of each document all before a share's last."""
    needed = 0
    for pieces in shares:
        last: dict[int, int] = {}
        for _, document, _, stop, _ in pieces:
            last[document] = max(stop, last.get(document, 0))
        needed += sum(last.values())
    return needed
