"""Placement: which rank holds which tokens, so that all hold equal tokens *and* equal attention work. Three levels.

    documents ──accordion──▶ nodes ──long parts──▶ stripes over all ranks of the node
                                   └──the rest──accordion──▶ ranks

Nodes are filled exactly, like ranks: hardly any document crosses from one node to another, so keys and values travel
within nodes. With one node, the first level gives everything to it. See `accordion` for why tokens and work can both
be equal, and `heuristics` for why few documents are cut.

A *stripe* is a part of a document that is spread over all ranks of a node, which divide its heads. A document on k
ranks costs its keys and values k times, because every rank needs the keys of all tokens before its own. If heads are
divided, a rank needs one part of the heads from every token. Queries, keys, values and outputs then travel once, at
the speed within a node, for any number of ranks. So a part of a document is striped

- if it is the work of several ranks (more of them with few head groups, since each group is then on several ranks); or
- if its document continues from, or on, another node. Each rank then receives its part of the heads from there and
  sends its own tokens. Otherwise one rank would send and receive everything.

The work of a stripe is divided equally among the ranks of its node, whichever tokens they hold. Tokens are spread
evenly too, and with them the bytes that ranks send.

Documents that share a prefix are dealt together (`trees`), without stripes, unless ranks then have less even work.

Documents may be placed such that sliding windows are even, too (`even_windows`). Of both placements, the one with the
shorter predicted time is taken.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from operator import not_

import numpy as np

from distca_hf.arrays import IntArray, offsets, sum_by
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, DocumentCost, LayerMasks, Mask, Work, imbalance
from distca_hf.errors import PackingError
from distca_hf.layout import Layout, Stripe, Topology, check_document_tokens, join_neighbours
from distca_hf.placement.accordion import Goal, deal_lightest_first, largest_miss
from distca_hf.placement.even_windows import EvenWindows
from distca_hf.placement.heuristics import ALIKE_NODES, deal_longest_first, heuristics_to_try, key_tokens
from distca_hf.placement.piece_pool import Piece, PiecePool, Segment, joined, work_of
from distca_hf.placement.predicted import QUERY_AND_OUTPUT_PARTS, LayersByMask, PredictedTime
from distca_hf.placement.trees import Trees
from distca_hf.prefixes import SharedPrefixes


# A way to deal a pool to ranks with goals. Work may deviate from them by a fraction before long documents are cut.
Deal = Callable[[PiecePool, Sequence[Goal], float], list[list[Piece]]]

# Deviation of a node's work, as a fraction of it, up to which long documents are not cut. Together with `RANKS_OFF` it
# is below 1 %: many nodes must find their long documents.
NODES_OFF = 6e-3
# Deviation of a node's work beyond which nodes are filled in another order, if ranks have unequal shares.
MOST_OFF = 1e-2
# `NODES_OFF` for few nodes: below 0.5 % together with `RANKS_OFF`.
FEW_NODES_OFF = 1.5e-3
# Deviation of a rank's work within a node, as a fraction of it, up to which long documents are not cut.
RANKS_OFF = 3e-3
# Deviation of a node's or rank's work, as a fraction of it, up to which documents with a common prefix stay together.
TREES_OFF = 1e-3
# Number of nodes up to which `FEW_NODES_OFF` applies.
FEW_NODES = 7
# Longest document, in tokens, that is cut readily between nodes: its keys and values are few bytes, 16 MB per layer of
# an 8B Llama. `heuristics` has the lengths within a node.
SHORT_FOR_NODES = 4096
# Time that ranks lose by uneven layers, as a fraction of all attention, up to which windows count as even: the
# deviation of full attention.
LITTLE_UNEVEN = 5e-3
# Minimum tokens of a document whose keys and values cross to another node, from which on its parts are striped.
CROSSING_TOKENS = 4096
# The part of a document before a node's border is striped only to relieve the sending rank. It is striped up to this
# many tokens, since a short part costs little,
LEAVING_TOKENS = 32768
# or if the document has at least this work, as a multiple of a rank's mean work, since its keys go to several ranks.
LEAVING_RANK_LOADS = 2.25


def place(
    document_tokens: Sequence[int] | IntArray,
    num_ranks: int,
    *,
    topology: Topology | None = None,
    cost: DocumentCost | None = None,
    head_groups: int = 1,
    rank_shares: Sequence[float] | None = None,
    layer_masks: LayerMasks = CAUSAL_LAYERS,
    shared: SharedPrefixes | None = None,
) -> Layout:
    """Places documents on ranks: tokens equal to within one, work to within 0.5 % and one token's cost.

    The layout depends only on lengths: documents in another order give the same one, up to the names of equally long
    documents.

    Args:
        document_tokens: `[documents]` integers: length of each document of the global micro-batch, in tokens.
        num_ranks: ranks to place them on.
        topology: ranks that share a node; by default all do.
        cost: cost to make equal on all ranks; by default pairs of the widest of `layer_masks`.
        head_groups: groups into which the heads of stripes can be divided; 1 makes no stripes.
        rank_shares: relative work of each rank, near 1; by default equal. For ranks, or tasks, of unequal speed.
        layer_masks: each mask with the number of layers that have it. Work of the widest one is made equal, work in
            windows about equal (see `even_windows`).
        shared: prefixes that documents share, which are placed once; then heads are not divided.

    Returns:
        A layout without padding, with each rank's segments in the order in which its tasks are computed, and stripes.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1, a document's cost is beyond int64, or numbers of ranks
            disagree.
        ConfigError: layers are missing, or fewer than 1 of a mask.
    """
    lengths = check_document_tokens(document_tokens)
    kinds = LayersByMask.of(layer_masks, int(lengths.max(initial=0)))
    if num_ranks < 1:
        raise PackingError(f"documents cannot be placed on {num_ranks} ranks; there must be at least 1")
    topology = topology or Topology(num_ranks, num_ranks)
    if topology.num_ranks != num_ranks:
        raise PackingError(f"the topology has {topology.num_ranks} ranks, documents are to be placed on {num_ranks}")
    shares = [1.0] * num_ranks if rank_shares is None else [float(share) for share in rank_shares]
    if len(shares) != num_ranks:
        raise PackingError(f"there are {len(shares)} rank_shares for {num_ranks} ranks")
    bad = [rank for rank, share in enumerate(shares) if not (0 < share < math.inf)]
    if bad:
        raise PackingError(f"rank {bad[0]} is to have a share of {shares[bad[0]]} of the work; shares are above 0")
    documents = _Documents(
        lengths,
        np.argsort(lengths, kind="stable"),
        topology,
        kinds.cost if cost is None else cost,
        # No stripes for windows: their parts need few keys.
        head_groups if kinds.widest == CAUSAL_MASK and shared is None else 1,
        shares,
        has_shares=rank_shares is not None,
        shared=shared,
    )
    # 1. Only for full attention. That suffices without windows, or if they are even by chance.
    for_widest = documents.placed() if shared is None else documents.placed_with_trees(shared)
    if not kinds.windows:
        return for_widest
    time_for_widest = PredictedTime.of(for_widest, kinds, shares)
    if time_for_widest.attention <= (1 + LITTLE_UNEVEN) * time_for_widest.even:
        return for_widest

    # 2. With even windows, if that takes less time.
    for_all = documents.placed(kinds)
    time_for_all = PredictedTime.of(for_all, kinds, shares)
    return for_widest if time_for_widest.total <= time_for_all.total else for_all


def fill_in_order(document_tokens: Sequence[int] | IntArray, num_ranks: int) -> Layout:
    """Packs documents in order on ranks of equal tokens: plain packing, to compare placement with.

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
    stops = stops[np.diff(stops, prepend=0) > 0]  # once if a document ends at a border
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
    """Counts `[ranks]` attended pairs of ranks packed by `fill_in_order`."""
    return fill_in_order(document_tokens, num_ranks).rank_work_of(mask)


@dataclass(frozen=True, eq=False)
class _Documents:
    """Documents of a micro-batch by length, and the ranks to place them on.

    Attributes:
        lengths: `[documents]` tokens, as the caller numbers them.
        order: `[documents]` the caller's number of each document by length.
        topology, cost, head_groups: see `place`.
        shares: relative work of each rank.
        has_shares: whether shares may differ.
        shared: see `place`.
        trees: documents with a common prefix, which are placed together; None if each is placed by itself.
    """

    lengths: IntArray
    order: IntArray
    topology: Topology
    cost: DocumentCost
    head_groups: int
    shares: list[float]
    has_shares: bool
    shared: SharedPrefixes | None = None
    trees: Trees | None = None

    @cached_property
    def first_own(self) -> IntArray:
        """`[documents]` first token to place of each document, as the caller numbers them."""
        return np.zeros_like(self.lengths) if self.shared is None else self.shared.first_own

    @cached_property
    def sorted_tokens(self) -> IntArray:
        """`[documents]` lengths, rising."""
        return self.lengths[self.order]

    @cached_property
    def rank_tokens(self) -> list[int]:
        """Tokens of each rank."""
        tokens, num_ranks = int((self.lengths - self.first_own).sum()), len(self.shares)
        return np.diff([tokens * rank // num_ranks for rank in range(num_ranks + 1)]).tolist()

    @cached_property
    def pool(self) -> PiecePool:
        """All documents, or all trees; each way to place them takes from a copy of it."""
        if self.trees is not None:
            return self.trees.pool
        return PiecePool.of_documents(self.sorted_tokens, self.cost, self.first_own[self.order])

    def striped(self, pieces: Sequence[Piece], num_ranks: int) -> list[bool]:
        """Decides for each piece of a node with `num_ranks` ranks whether it is striped."""
        if self.head_groups < 2 or num_ranks < 2:
            return [False] * len(pieces)
        rank_load, work_of_range = self.pool.work_left / len(self.shares), self.pool.work
        heavy = rank_load * (QUERY_AND_OUTPUT_PARTS + max(1.0, num_ranks / self.head_groups))
        every_rank_has_heads = self.head_groups >= num_ranks

        def leaves(document: int, stop: int) -> bool:
            tokens = int(self.sorted_tokens[document])
            return stop < tokens and (
                stop <= LEAVING_TOKENS or work_of_range(document, 0, tokens) >= LEAVING_RANK_LOADS * rank_load
            )

        def crosses(document: int, start: int, stop: int) -> bool:
            """Whether keys of a piece go to another node, or come from one."""
            return stop >= CROSSING_TOKENS and (start >= CROSSING_TOKENS or leaves(document, stop))

        return [
            stop - start >= num_ranks and (work >= heavy or (every_rank_has_heads and crosses(document, start, stop)))
            for _, document, start, stop, work in pieces
        ]

    def placed_with_trees(self, shared: SharedPrefixes) -> Layout:
        """Places documents with a common prefix together. If work is uneven then, and more even if they are placed one
        by one, returns that layout."""

        def uneven(layout: Layout) -> float:
            held = layout.segment_start, layout.segment_stop, layout.document_tokens[layout.segment_document]
            return imbalance(sum_by(layout.segment_rank, self.cost.work_of(*held), layout.num_ranks), self.shares)

        together = replace(self, trees=Trees.of(self.lengths, shared, self.cost)).placed()
        return together if uneven(together) <= 1 + RANKS_OFF else min(together, self.placed(), key=uneven)

    def placed(self, kinds: LayersByMask | None = None) -> Layout:
        """Places the documents: only for the widest mask or, given `kinds`, with even windows, too."""
        # 1. Documents to nodes.
        nodes = [self.topology.ranks_of(node) for node in range(self.topology.num_nodes)]
        tokens_of = [self.rank_tokens[ranks.start : ranks.stop] for ranks in nodes]
        shares_of = [self.shares[ranks.start : ranks.stop] for ranks in nodes]
        pool = self.pool.copy()
        goals = _goals(map(sum, tokens_of), map(sum, shares_of), pool.work_left)
        off = FEW_NODES_OFF if len(nodes) <= FEW_NODES else NODES_OFF
        if self.trees is not None:
            off = TREES_OFF
        windows = EvenWindows.of_nodes(kinds, self.lengths, self.first_own, pool.work_left) if kinds else None
        if windows is None:
            held_by_node = deal_longest_first(pool, goals, SHORT_FOR_NODES, off, ALIKE_NODES)
        else:
            held_by_node = windows.deal(pool, goals, off)
        if (self.has_shares or windows) and largest_miss(held_by_node, goals) > MOST_OFF:
            again = PiecePool(joined(list(chain.from_iterable(held_by_node))), self.pool.work)
            lightest_first = deal_lightest_first(again, goals)
            held_by_node = min(held_by_node, lightest_first, key=lambda held: largest_miss(held, goals))

        # 2. Documents of each node to stripes and ranks.
        if self.trees is None:
            off = RANKS_OFF if len(nodes) > 1 else RANKS_OFF + FEW_NODES_OFF
        segments: list[list[Segment]] = []
        stripes: list[Stripe] = []
        for ranks, held, tokens, shares in zip(nodes, held_by_node, tokens_of, shares_of, strict=True):
            pieces = joined(held)
            if len(ranks) == 1:
                segments.append([piece[1:4] for piece in pieces])
                continue
            is_striped = self.striped(pieces, len(ranks))
            striped = list(compress(pieces, is_striped))
            rest = list(compress(pieces, map(not_, is_striped)))
            rank_goals = _goals(tokens, shares, work_of(pieces))
            ways: list[Deal]
            if windows is None:
                ways = [way.deal for way in heuristics_to_try(len(rest), len(ranks), len(self.shares))]
            else:
                ways = [windows.of_ranks(pieces).deal]
            keys = key_tokens if self.trees is None else self.trees.key_tokens
            segments += _deal_to_ranks(striped, rest, rank_goals, self.pool.work, off, ways, keys)
            stripes += [
                Stripe(document, start, stop, ranks.start, ranks.stop) for _, document, start, stop, _ in striped
            ]
        return self._layout(segments, stripes)

    def _layout(self, segments: list[list[Segment]], stripes: list[Stripe]) -> Layout:
        """Makes a layout with the caller's numbers of documents. A rank's segments that begin their document come
        first, then by document: the order in which tasks run. Documents with a common prefix follow each other."""
        numbers = np.fromiter(chain.from_iterable(chain.from_iterable(segments)), dtype=np.int64).reshape(-1, 3)
        num_ranks = len(self.shares)
        rank = np.repeat(np.arange(num_ranks), [len(of_rank) for of_rank in segments])
        document, start, stop = numbers.T
        if self.trees is None:
            document = self.order[document]
        else:
            document, start, stop, rank = self.trees.of_documents(document, start, stop, rank)
        document, start, stop, rank = join_neighbours(document, start, stop, rank)
        follows = document if self.shared is None else np.argsort(self.shared.order)[document]
        in_order = np.lexsort((start, follows, start > 0, rank))
        tokens_before = offsets(stop - start)
        rank_segments = np.searchsorted(rank, np.arange(num_ranks + 1))
        layout = Layout(
            document_tokens=self.lengths,
            segment_document=document[in_order],
            segment_start=start[in_order],
            segment_stop=stop[in_order],
            rank_segments=rank_segments,
            rank_rows=np.diff(tokens_before[rank_segments]),
            stripes=tuple(replace(stripe, document=int(self.order[stripe.document])) for stripe in stripes),
            shared=self.shared,
        )
        layout.validate()
        return layout


def _deal_to_ranks(
    striped: list[Piece],
    rest: list[Piece],
    goals: list[Goal],
    work: Work,
    off: float,
    ways: Sequence[Deal],
    keys: Callable[[Iterable[list[Piece]]], int],
) -> list[list[Segment]]:
    """Deals the pieces of a node: `striped` ones over all ranks, the `rest` in the way that moves the fewest keys,
    which `keys` counts. Returns the segments of each of its ranks. Goals are for all pieces together."""
    # 1. Stripes: tokens spread evenly, work divided equally.
    on_ranks = _spread(striped, [goal.tokens for goal in goals])
    striped_work = work_of(striped) / len(goals)

    # 2. The other pieces, for the tokens and the work that ranks still need.
    goals_of_rest = [
        Goal(
            goal.tokens - sum([stop - start for _, start, stop in held]), max(0.0, goal.work - striped_work), goal.load
        )
        for goal, held in zip(goals, on_ranks, strict=True)
    ]
    dealt = [way(PiecePool(rest, work), goals_of_rest, off) for way in ways]
    for held, more in zip(on_ranks, min(dealt, key=keys) if len(dealt) > 1 else dealt[0], strict=True):
        held += [(document, start, stop) for _, document, start, stop, _ in more]
    return on_ranks


def _spread(striped: Sequence[Piece], rank_tokens: Sequence[int]) -> list[list[Segment]]:
    """Divides striped pieces evenly among the ranks of a node, whose tokens differ by at most one and suffice."""
    spread_to: list[list[Segment]] = [[] for _ in rank_tokens]
    # Remainders go round-robin, first to ranks with room for one more token: sums then differ by at most one, like
    # room.
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


def _goals(tokens: Iterable[int], shares: Iterable[float], work: int) -> list[Goal]:
    """Returns goals with work in proportion to shares."""
    parts = list(shares)
    whole = sum(parts) or 1.0
    works = [work * share / whole for share in parts]
    return [Goal(each, of_share, of_share) for each, of_share in zip(tokens, works, strict=True)]
