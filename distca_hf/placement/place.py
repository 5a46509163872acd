"""Placement: which rank holds which tokens, so that all hold equal tokens *and* equal attention work. Three levels.

    documents ──accordion──▶ nodes ──long parts──▶ stripes over all ranks of the node
                                   └──the rest──accordion──▶ ranks

Nodes are filled exactly, like ranks: hardly a document crosses from one node to another, so that keys and values
travel inside nodes. With one node, the first level gives everything to it. See `accordion` for why tokens and work can
both be equal, `longest_first` for why few documents are cut.

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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import not_

import numpy as np

from distca_hf.arrays import IntArray, offsets
from distca_hf.cost import CAUSAL, CAUSAL_MASK, DocumentCost, Mask, Work
from distca_hf.errors import PackingError
from distca_hf.layout import Layout, Stripe, check_document_tokens, join_neighbours
from distca_hf.placement.accordion import Goal, deal_lightest_first, largest_miss
from distca_hf.placement.heuristics import deal_with_best, heuristics_to_try
from distca_hf.placement.longest_first import deal_longest_first
from distca_hf.placement.piece_pool import Piece, PiecePool, Segment, joined, work_of
from distca_hf.topology import Topology


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


# Maximum miss of a node's work, as a fraction of it, up to which long documents are not cut. Together with `RANKS_OFF`
# it is below 1 %: many nodes must find their long documents.
NODES_OFF = 6e-3
# Miss of a node's work, where ranks have unequal shares, beyond which nodes are filled in another order.
MOST_OFF = 1e-2
# As `NODES_OFF` where nodes are few: below 0.5 % together with `RANKS_OFF`.
FEW_NODES_OFF = 1.5e-3
# Maximum miss of a rank's work inside a node, as a fraction of it, up to which long documents are not cut.
RANKS_OFF = 3e-3
# Number of nodes up to which `FEW_NODES_OFF` holds.
FEW_NODES = 7
# Longest document, in tokens, that is cut readily between nodes: its keys and values are few bytes, 16 MB per layer of
# an 8B Llama. `heuristics` has the lengths inside a node.
SHORT_FOR_NODES = 4096
# Maximum spread of the nodes' needs for short documents, in mean cost per token, as a fraction of the largest. It is
# below that of ranks, since the miss of a node weighs more than the miss of one rank.
ALIKE_NODES = 0.5


def place(
    document_tokens: Sequence[int] | IntArray,
    num_ranks: int,
    *,
    topology: Topology | None = None,
    cost: DocumentCost = CAUSAL,
    head_groups: int = 1,
    rank_shares: Sequence[float] | None = None,
) -> Layout:
    """Places documents on ranks: tokens equal to within one, work to within 0.5 % and one token's cost.

    Which document is where depends on lengths alone: documents in another order give the same layout, up to the names
    of equally long ones.

    Args:
        document_tokens: `[documents]` integers: length of each document of the global micro-batch, in tokens.
        num_ranks: ranks to place them on.
        topology: ranks that share a node; by default all do.
        cost: cost that is made equal on all ranks.
        head_groups: groups that the heads of stripes can be divided in; 1 makes no stripes.
        rank_shares: work of each rank in proportion, near 1; by default equal. For ranks, or tasks, of unequal speed.

    Returns:
        A layout without padding, each rank's segments in the order its tasks are computed, and its stripes.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1, a document's cost is beyond int64, or numbers of ranks
            disagree.
    """
    # 1. Documents by length, and the tokens of each rank.
    lengths = check_document_tokens(document_tokens)
    topology = _checked_topology(topology, num_ranks)
    shares = _checked_shares(rank_shares, num_ranks)
    order = np.argsort(lengths, kind="stable")
    sorted_tokens = lengths[order]
    pool = PiecePool.of_documents(sorted_tokens, cost)
    rule = StripeRule(head_groups, pool.work_left / num_ranks, sorted_tokens.tolist(), pool.work)
    rank_tokens = np.diff([int(lengths.sum()) * rank // num_ranks for rank in range(num_ranks + 1)]).tolist()

    # 2. Documents to nodes.
    nodes = [topology.ranks_of(node) for node in range(topology.num_nodes)]
    tokens_of = [rank_tokens[ranks.start : ranks.stop] for ranks in nodes]
    shares_of = [shares[ranks.start : ranks.stop] for ranks in nodes]
    goals = _goals(map(sum, tokens_of), map(sum, shares_of), pool.work_left)
    off = FEW_NODES_OFF if len(nodes) <= FEW_NODES else NODES_OFF
    ranks_off = RANKS_OFF if len(nodes) > 1 else RANKS_OFF + FEW_NODES_OFF
    held_by_node = deal_longest_first(pool, goals, SHORT_FOR_NODES, off, ALIKE_NODES)
    if rank_shares is not None and largest_miss(held_by_node, goals) > MOST_OFF:
        again = PiecePool(joined(list(chain.from_iterable(held_by_node))), pool.work)
        held_by_node = min(held_by_node, deal_lightest_first(again, goals), key=lambda held: largest_miss(held, goals))

    # 3. Documents of each node to stripes and ranks.
    segments: list[list[Segment]] = []
    stripes: list[Stripe] = []
    for node, held in enumerate(held_by_node):
        on_ranks, of_node = _place_on_node(
            joined(held), nodes[node], tokens_of[node], shares_of[node], rule, ranks_off, num_ranks
        )
        segments += on_ranks
        stripes += of_node
    return _layout(lengths, order, segments, stripes)


def fill_in_order(document_tokens: Sequence[int] | IntArray, num_ranks: int) -> Layout:
    """Packs documents in order on ranks of equal tokens: plain packing, with which placement is compared.

        documents   | d0   | d1      | d2 | d3           |
        ranks       | rank 0     | rank 1     | rank 2   |    cut at both kinds of borders

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    borders = np.array([total * (rank + 1) // num_ranks for rank in range(num_ranks)], dtype=np.int64)
    stops = np.sort(np.concatenate([ends, borders[borders > 0]]))
    stops = stops[np.diff(stops, prepend=0) > 0]  # once where a document ends at a border
    starts = np.concatenate([[0], stops])[: len(stops)]
    document = np.searchsorted(ends, starts, side="right")
    first = (ends - lengths)[document]
    return Layout(
        document_tokens=lengths,
        segment_document=document,
        segment_start=starts - first,
        segment_stop=stops - first,
        rank_segments=np.concatenate([[0], np.searchsorted(stops, borders, side="right")]),
        rank_rows=np.diff(borders, prepend=0),
    )


def work_in_order(document_tokens: Sequence[int] | IntArray, num_ranks: int, mask: Mask = CAUSAL_MASK) -> IntArray:
    """Counts `[ranks]` attended pairs of ranks that are packed by `fill_in_order`."""
    return fill_in_order(document_tokens, num_ranks).rank_work_of(mask)


def _place_on_node(
    pieces: list[Piece],
    ranks: range,
    tokens: list[int],
    shares: list[float],
    rule: StripeRule,
    off: float,
    num_ranks: int,
) -> tuple[list[list[Segment]], list[Stripe]]:
    """Places the pieces of a node: segments of each of its ranks, and the stripes among them."""
    if len(ranks) == 1:
        return [[piece[1:4] for piece in pieces]], []
    # 1. Stripes: tokens spread evenly, work divided equally.
    is_striped = rule.striped(pieces, len(ranks))
    striped = list(compress(pieces, is_striped))
    rest = list(compress(pieces, map(not_, is_striped)))
    on_ranks = spread(striped, tokens)
    striped_work = work_of(striped) / len(ranks)

    # 2. The other pieces, for the tokens and the work that ranks still need.
    goals_of_rest = [
        Goal(
            goal.tokens - sum([stop - start for _, start, stop in held]), max(0.0, goal.work - striped_work), goal.load
        )
        for goal, held in zip(_goals(tokens, shares, work_of(pieces)), on_ranks, strict=True)
    ]
    dealt = deal_with_best(
        lambda: PiecePool(rest, rule.work), goals_of_rest, off, heuristics_to_try(len(rest), len(ranks), num_ranks)
    )
    for held, more in zip(on_ranks, dealt, strict=True):
        held += [(document, start, stop) for _, document, start, stop, _ in more]
    return on_ranks, stripes_of(striped, ranks)


def _goals(tokens: Iterable[int], shares: Iterable[float], work: int) -> list[Goal]:
    """Divides work in proportion to shares, and makes it goals."""
    parts = list(shares)
    whole = sum(parts)
    works = [work * part / whole for part in parts]
    return [Goal(*goal) for goal in zip(tokens, works, works, strict=True)]


def _layout(lengths: IntArray, order: IntArray, segments: list[list[Segment]], stripes: list[Stripe]) -> Layout:
    """Makes the layout, with documents numbered as the caller numbers them.

    A rank's segments that begin their document come first, then by document: the order in which tasks are computed.

    Args:
        lengths: `[documents]` tokens, as the caller numbers them.
        order: `[documents]` the caller's number of each document by length.
        segments: (document by length, start, stop) of each rank.
        stripes: stripes of documents by length.
    """
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(segments)), dtype=np.int64).reshape(-1, 3)
    rank = np.repeat(np.arange(len(segments)), [len(of_rank) for of_rank in segments])
    document, start, stop, rank = join_neighbours(order[numbers[:, 0]], numbers[:, 1], numbers[:, 2], rank)
    in_order = np.argsort(2 * rank + (start > 0), kind="stable")
    tokens_before = offsets(stop - start)
    rank_segments = np.searchsorted(rank, np.arange(len(segments) + 1))
    layout = Layout(
        document_tokens=lengths,
        segment_document=document[in_order],
        segment_start=start[in_order],
        segment_stop=stop[in_order],
        rank_segments=rank_segments,
        rank_rows=np.diff(tokens_before[rank_segments]),
        stripes=tuple(replace(stripe, document=int(order[stripe.document])) for stripe in stripes),
    )
    layout.validate()
    return layout


def _checked_topology(topology: Topology | None, num_ranks: int) -> Topology:
    if num_ranks < 1:
        raise PackingError(f"documents cannot be placed on {num_ranks} ranks; there must be at least 1")
    if topology is None:
        return Topology(num_ranks, num_ranks)
    if topology.num_ranks != num_ranks:
        raise PackingError(f"the topology has {topology.num_ranks} ranks, documents are to be placed on {num_ranks}")
    return topology


def _checked_shares(rank_shares: Sequence[float] | None, num_ranks: int) -> list[float]:
    if rank_shares is None:
        return [1.0] * num_ranks
    shares = [float(share) for share in rank_shares]
    if len(shares) != num_ranks:
        raise PackingError(f"there are {len(shares)} rank_shares for {num_ranks} ranks")
    bad = [rank for rank, share in enumerate(shares) if not (0 < share < math.inf)]
    if bad:
        raise PackingError(f"rank {bad[0]} is to have a share of {shares[bad[0]]} of the work; shares are above 0")
    return shares
