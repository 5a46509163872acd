"""Stacks: what a rank may hand to others, for every head the queries of one document piled up from first to last.

A query late in its document attends the most keys for the same bytes, so queries leave from the top:

    position   stop ┬────┬────┬────┬────┐
                    │ r2 │ r2 │ r3 │    │   head groups 0 and 1 down to `cut` went to rank 2, group 2 to rank 3,
               cut  ├────┼────┤    │    │   group 3 stays, and so does what is below
                    │    │    ├────┤    │
              start └────┴────┴────┴────┘
               head    0    1    2    3
"""

from dataclasses import dataclass, field

from distca_hf.cost import causal_pairs


Holders = dict[int, list[tuple[int, int]]]  # rank -> ranges of a document that it holds
Move = tuple[int, int, int, int]  # head group, start, stop, server


@dataclass(slots=True)
class Stack:
    """Queries [start, stop) of a document, computed by `server` but for what it gives away.

    Attributes:
        document, server, start, stop: the queries, and the rank that begins with all of them.
        own_stop: the server holds tokens [start, own_stop) itself; what follows was merged with them (see `slivers`).
        holders: who else holds tokens of the document; empty if the server holds all of it.
        tops: `[head_groups]` where each head's queries that are still here end.
        place: settles between equally long stacks; depends on who holds what, not on how documents are numbered.
        moves: what was given away.
    """

    document: int
    server: int
    start: int
    own_stop: int
    stop: int
    holders: Holders
    tops: list[int]
    place: int = 0
    moves: list[Move] = field(default_factory=list)

    def pairs_left(self) -> int:
        """Attended pairs x groups of heads that are still here."""
        squares = sum([top * (top + 1) for top in self.tops])
        return (squares - len(self.tops) * self.start * (self.start + 1)) // 2

    @property
    def has_queries(self) -> bool:
        """Whether any query is still here."""
        return max(self.tops) > self.start

    def give(self, heads: list[int], cut: int, server: int) -> int:
        """Hands queries [cut, top) of some heads to a server; returns their pairs x groups of heads."""
        pairs = 0
        for head in heads:
            pairs += causal_pairs(cut, self.tops[head])
            self.moves.append((head, cut, self.tops[head], server))
            self.tops[head] = cut
        return pairs

    def parts(self) -> list[Move]:
        """All queries of the stack, those that stay included."""
        start, server = self.start, self.server
        return self.moves + [(head, start, top, server) for head, top in enumerate(self.tops) if top > start]


def tokens_held(holders: Holders, rank: int, start: int, stop: int) -> int:
    """Tokens of [start, stop) that a rank holds."""
    return sum([max(0, min(stop, last) - max(start, first)) for first, last in holders.get(rank, ())])
