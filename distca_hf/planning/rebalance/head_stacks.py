"""Stacks: the queries of one document on one rank, piled up from first to last for every head group.

A query late in its document attends the most keys for the same bytes, so queries leave from the top:

    position   stop ┬────┬────┬────┬────┐
                    │ r2 │ r2 │ r3 │    │   head groups 0 and 1 down to `cut` moved to rank 2, group 2 to rank 3;
               cut  ├────┼────┤    │    │   group 3 stays, and so do all queries below
                    │    │    ├────┤    │
              start └────┴────┴────┴────┘
               head    0    1    2    3
"""

from dataclasses import dataclass, field

import numpy as np

from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.tasks import ALL_HEADS, Tasks


Held = list[tuple[int, int]]  # ranges [start, stop) of a document that a rank holds
Holders = dict[int, Held]  # rank -> its ranges
Move = tuple[int, int, int, int]  # head group, start, stop, server


@dataclass(slots=True)
class Stack:
    """Queries [start, stop) of a document on `server`, and the ones among them that it gave to other servers.

    Attributes:
        document, server, start, stop: the queries, and the rank that computes all of them at first.
        own_stop: end of the tokens that the server holds; later ones were merged (see `donors.merge_short_tails`).
        holders: ranks that hold tokens of the document; empty if the server holds all of them.
        tops: `[head_groups]` end of each head's queries that are left.
        mask: keys that queries attend.
        place: order of equally long stacks. It depends on the layout, not on the numbers of documents.
        moves: queries that were given away.
        pairs_before_tops: `[head_groups]` attended pairs of the document's queries before each top; empty until they
            are counted by `count_pairs`.
    """

    document: int
    server: int
    start: int
    own_stop: int
    stop: int
    holders: Holders
    tops: list[int]
    mask: Mask
    place: int = 0
    moves: list[Move] = field(default_factory=list)
    pairs_before_tops: list[int] = field(default_factory=list)
    pairs_before_start: int = 0

    def count_pairs(self) -> list[int]:
        """Counts pairs before the start and before each top, once; returns the latter."""
        if not self.pairs_before_tops:
            if self.tops.count(self.stop) == len(self.tops):  # as of nearly every stack before its first move
                self.pairs_before_tops = [self.mask.pairs_before(self.stop)] * len(self.tops)
            else:
                self.pairs_before_tops = [self.mask.pairs_before(top) for top in self.tops]
            self.pairs_before_start = self.mask.pairs_before(self.start)
        return self.pairs_before_tops

    def pairs_left(self) -> int:
        """Counts attended pairs x head groups of the queries that are left."""
        return sum(self.count_pairs()) - len(self.tops) * self.pairs_before_start

    @property
    def has_queries(self) -> bool:
        """Whether any query is left."""
        return max(self.tops) > self.start

    def give(self, heads: list[int], cut: int, server: int) -> int:
        """Gives queries [cut, top) of some heads to a server; returns their pairs x head groups."""
        before_tops, before_cut = self.count_pairs(), self.mask.pairs_before(cut)
        pairs = 0
        for head in heads:
            pairs += before_tops[head] - before_cut
            self.moves.append((head, cut, self.tops[head], server))
            self.tops[head], before_tops[head] = cut, before_cut
        return pairs

    def parts(self) -> list[Move]:
        """Lists all queries of the stack: ranges that moved, and ranges that are left."""
        start, server = self.start, self.server
        return self.moves + [(head, start, top, server) for head, top in enumerate(self.tops) if top > start]


def tokens_held(held: Held, start: int, stop: int) -> int:
    """Counts tokens of [start, stop) in the ranges that a rank holds."""
    return sum([max(0, min(stop, last) - max(start, first)) for first, last in held])


Range = tuple[int, int, int]  # start, stop, server


def tasks_of(layout: Layout, stacks: list[Stack], head_groups: int, mask: Mask) -> Tasks:
    """Makes the tasks of a layout: documents with stacks as these say, all others on their owner ranks.

    A document gets tasks of single head groups only if its groups are cut or moved differently.
    """
    in_place = plan_in_place(layout, mask=mask).tasks

    # 1. Documents with stacks: ranges of each head, joined where neighbours have one server.
    by_document: dict[int, list[list[Range]]] = {}
    for stack in stacks:
        heads = by_document.setdefault(stack.document, [[] for _ in range(head_groups)])
        for head, start, stop, server in stack.parts():
            heads[head].append((start, stop, server))
    rows: list[tuple[int, int, int, int, int]] = []
    for document, heads in by_document.items():
        joined = [_join(parts) for parts in heads]
        if all(parts == joined[0] for parts in joined):
            rows += [(document, *part, ALL_HEADS) for part in joined[0]]
        else:
            rows += [(document, *part, head) for head, parts in enumerate(joined) for part in parts]

    # 2. All other documents, as they are in place.
    stays = np.ones(layout.num_documents, dtype=bool)
    stays[list(by_document)] = False
    kept = np.flatnonzero(stays[in_place.document])
    columns_in_place = (in_place.document, in_place.start, in_place.stop, in_place.server, in_place.head)
    untouched = np.stack(columns_in_place, axis=1)[kept]
    columns = np.concatenate([untouched, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Tasks.sort(columns[0], columns[1], columns[2], columns[3], columns[4], head_groups, mask)


def _join(parts: list[Range]) -> list[Range]:
    """Sorts ranges, and joins neighbours of one server."""
    joined: list[Range] = []
    for start, stop, server in sorted(parts):
        if joined and joined[-1][1:] == (start, server):
            start = joined.pop()[0]
        joined.append((start, stop, server))
    return joined
