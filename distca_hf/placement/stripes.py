"""Stripes: parts of documents whose heads the ranks of a node divide.

A *stripe* is a part of a document that is spread over all ranks of a node, whose heads these ranks divide.
A document on k ranks costs its keys and values k times, as every rank needs the keys of all tokens before its own.
Divided by heads, a rank needs one part of the heads from every token. Queries, keys, values and outputs then travel
once, at the speed inside a node, for any number of ranks. So a part of a document is striped

- if it is the work of several ranks (more of them with few head groups, since each group is then on several ranks); or
- if its document goes on from, or to, another node. Each rank then receives its part of the heads from there and sends
  its own tokens. Otherwise one rank would send and receive everything.

The work of a stripe is divided equally among the ranks of its node, whichever tokens they hold. Tokens are spread
evenly too, and with them the bytes that ranks send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distca_hf.cost import Work
from distca_hf.layout import Stripe
from distca_hf.placement.piece_pool import Piece, Segment


# Bytes of queries and outputs of a token, as a multiple of the bytes of its keys and values (8B Llama). A stripe moves
# them, too.
QUERY_AND_OUTPUT_PARTS = 4
# Minimum tokens of a document whose keys and values cross to another node, at which its parts are striped.
CROSSING_TOKENS = 4096
# The part of a document before a node's border is striped for the sake of the sending rank alone. It is striped up to
# this many tokens, since a short part costs little,
LEAVING_TOKENS = 32768
# or from this work of the document on, as a multiple of a rank's mean work, since its keys go to several ranks.
LEAVING_RANK_LOADS = 2.25


@dataclass(frozen=True)
class StripeRule:
    """Rule by which nodes stripe parts of documents.

    Attributes:
        head_groups: groups that the heads can be divided into.
        rank_load: mean work of a rank.
        document_tokens: length of each document.
        work: work of a query range, `work(document, start, stop)`.
    """

    head_groups: int
    rank_load: float
    document_tokens: Sequence[int]
    work: Work

    def striped(self, pieces: Sequence[Piece], num_ranks: int) -> list[bool]:
        """Decides for each piece of a node with `num_ranks` ranks whether it is striped."""
        if self.head_groups < 2 or num_ranks < 2:
            return [False] * len(pieces)
        heavy = self.rank_load * (QUERY_AND_OUTPUT_PARTS + max(1.0, num_ranks / self.head_groups))
        every_rank_has_heads = self.head_groups >= num_ranks
        return [
            stop - start >= num_ranks
            and (
                work >= heavy
                or (every_rank_has_heads and stop >= CROSSING_TOKENS and self._crosses(document, start, stop))
            )
            for _, document, start, stop, work in pieces
        ]

    def _crosses(self, document: int, start: int, stop: int) -> bool:
        """Checks whether a piece that ends beyond `CROSSING_TOKENS` goes on from, or to, another node."""
        return start >= CROSSING_TOKENS or self._leaves(document, stop)

    def _leaves(self, document: int, stop: int) -> bool:
        tokens = self.document_tokens[document]
        return stop < tokens and (
            stop <= LEAVING_TOKENS or self.work(document, 0, tokens) >= LEAVING_RANK_LOADS * self.rank_load
        )


def spread(striped: Sequence[Piece], rank_tokens: Sequence[int]) -> list[list[Segment]]:
    """Divides every striped piece evenly among the ranks of a node.

    Args:
        striped: pieces of the node.
        rank_tokens: tokens of each rank of the node, which differ by one at most and are enough for the pieces.

    Returns:
        The segments of each rank; no rank gets more than its tokens.
    """
    spread_to: list[list[Segment]] = [[] for _ in rank_tokens]
    # Remainders go round-robin, ranks with room for one token more first: sums then differ by one at most, like room.
    turns = sorted(range(len(rank_tokens)), key=lambda rank: (-rank_tokens[rank], rank))
    turn = 0
    for _, document, start, stop, _ in striped:
        each, more = divmod(stop - start, len(rank_tokens))
        with_more = {turns[(turn + step) % len(rank_tokens)] for step in range(more)}
        turn += more
        for rank, held in enumerate(spread_to):
            tokens = each + (rank in with_more)
            held.append((document, start, start + tokens))
            start += tokens
    return spread_to


def stripes_of(striped: Sequence[Piece], ranks: range) -> list[Stripe]:
    """Returns the marks of pieces that are striped over consecutive ranks."""
    return [Stripe(document, start, stop, ranks.start, ranks.stop) for _, document, start, stop, _ in striped]
