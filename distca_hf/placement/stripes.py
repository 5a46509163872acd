"""Stripes: which parts of documents are spread over all ranks of a node, to be divided by heads.

A document on k ranks costs its keys and values k times over, as every rank needs those of all tokens before its own.
Divided by heads, a rank needs one part of the heads from every token: queries, keys, values and outputs travel once,
at the speed inside a node, however many ranks share the work. So a part of a document is striped

- if it is the work of several ranks: with few head groups each group is on several ranks again, so more is asked; or
- if its document goes on from, or to, another node: each rank then fetches its part of the heads from there, and each
  sends what it holds, instead of one rank everything.

The work of a stripe is divided equally among the ranks of its node, whoever holds which tokens. These are spread
evenly too, so that what is sent is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distca_hf.cost import Work
from distca_hf.layout import Stripe
from distca_hf.placement.piece_pool import Piece, Segment


# Queries and outputs of a token are as large as its keys and values this many times: a stripe moves them too.
QUERY_AND_OUTPUT_PARTS = 4
# A document goes on from, or to, another node if this many tokens' keys and values cross.
CROSSING_TOKENS = 4096
# The part before it leaves is striped for the sake of the sender alone: if it is short, or the document is heavy.
LEAVING_TOKENS = 32768
LEAVING_RANK_LOADS = 2.25


@dataclass(frozen=True)
class StripeRule:
    """Decides what nodes stripe.

    Attributes:
        head_groups: groups that the heads can be divided in.
        rank_load: mean work of a rank.
        document_tokens: length of each document.
        work: work of a query range, `work(document, start, stop)`.
    """

    head_groups: int
    rank_load: float
    document_tokens: Sequence[int]
    work: Work

    def striped(self, pieces: Sequence[Piece], num_ranks: int) -> list[bool]:
        """Which pieces are to be striped, of all parts of documents that a node of so many ranks holds."""
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
        """Whether a piece that ends beyond `CROSSING_TOKENS` goes on from, or to, another node."""
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
    # Who may hold a token more takes one more first, and so on in turn: sums then differ by one at most, alike.
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
    """The marks of pieces that are striped over consecutive ranks."""
    return [Stripe(document, start, stop, ranks.start, ranks.stop) for _, document, start, stop, _ in striped]
