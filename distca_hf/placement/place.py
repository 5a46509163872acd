"""Placement: which rank holds which tokens, so that all hold equal tokens *and* equal attention work. Three levels.

    documents ──accordion──▶ nodes ──long parts──▶ stripes over all ranks of the node
                                   └──the rest──accordion──▶ ranks

Nodes are filled exactly, like ranks: hardly a document crosses from one node to another, so that keys and values
travel inside nodes. With one node, the first level gives everything to it. See `accordion` for why tokens and work can
both be equal, `longest_first` for why few documents are cut, `stripes` for long parts.

Models with sliding windows may have their documents placed so that these are even, too (`even_windows`). Of both ways
the one with the shorter predicted time is taken.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from operator import not_

import numpy as np

from distca_hf.arrays import IntArray, offsets
from distca_hf.cost import CAUSAL_LAYERS, CAUSAL_MASK, DocumentCost, LayerMasks, Mask, Work
from distca_hf.errors import PackingError
from distca_hf.layout import Layout, Stripe, check_document_tokens, join_neighbours
from distca_hf.placement.accordion import Goal, deal_lightest_first, largest_miss
from distca_hf.placement.even_windows import EvenWindows
from distca_hf.placement.heuristics import ALIKE, Deal, deal_with_best, heuristics_to_try
from distca_hf.placement.layers_by_mask import LayersByMask
from distca_hf.placement.longest_first import deal_longest_first
from distca_hf.placement.piece_pool import Piece, PiecePool, Segment, joined, work_of
from distca_hf.placement.predicted import PredictedTime
from distca_hf.placement.stripes import StripeRule, spread, stripes_of
from distca_hf.topology import Topology


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
# Length of a document, in windows, from which its pairs left out count where windows are to be even.
LONG_WINDOWS = 1.6
# Maximum excess of a node's work in windows over the mean, as a fraction of it, up to which long documents are not cut
# for it.
NODES_UNEVEN = 0.05
# The same for a rank, its node's excess included.
RANKS_UNEVEN = 0.12
# Excess of a rank over its node's mean that is always allowed.
LEAST_UNEVEN = 0.02
# Time that ranks lose by uneven layers, as a fraction of all attention, up to which windows are even by chance: as
# much as full attention is off.
LITTLE_UNEVEN = 5e-3


def place(
    document_tokens: Sequence[int] | IntArray,
    num_ranks: int,
    *,
    topology: Topology | None = None,
    cost: DocumentCost | None = None,
    head_groups: int = 1,
    rank_shares: Sequence[float] | None = None,
    layer_masks: LayerMasks = CAUSAL_LAYERS,
) -> Layout:
    """Places documents on ranks: tokens equal to within one, work to within 0.5 % and one token's cost.

    Which document is where depends on lengths alone: documents in another order give the same layout, up to the names
    of equally long ones.

    Args:
        document_tokens: `[documents]` integers: length of each document of the global micro-batch, in tokens.
        num_ranks: ranks to place them on.
        topology: ranks that share a node; by default all do.
        cost: cost that is made equal on all ranks; by default pairs of the widest of `layer_masks`.
        head_groups: groups that the heads of stripes can be divided in; 1 makes no stripes.
        rank_shares: work of each rank in proportion, near 1; by default equal. For ranks, or tasks, of unequal speed.
        layer_masks: each mask with the number of layers that have it. The widest one's work is made equal, work in
            windows about equal (see `even_windows`).

    Returns:
        A layout without padding, each rank's segments in the order its tasks are computed, and its stripes.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1, a document's cost is beyond int64, or numbers of ranks
            disagree.
        ConfigError: there are no layers, or fewer than 1 of a mask.
    """
    lengths = check_document_tokens(document_tokens)
    kinds = LayersByMask.of(layer_masks, int(lengths.max(initial=0)))
    documents = _Documents(
        lengths,
        np.argsort(lengths, kind="stable"),
        _checked_topology(topology, num_ranks),
        kinds.cost if cost is None else cost,
        head_groups if kinds.widest == CAUSAL_MASK else 1,  # no stripes for windows: their parts need few keys
        _checked_shares(rank_shares, num_ranks),
        has_shares=rank_shares is not None,
    )
    # 1. For full attention alone. It will do where there are no windows, or if they are even by chance.
    for_widest = documents.placed()
    if not kinds.windows:
        return for_widest
    time_for_widest = PredictedTime.of(for_widest, kinds, documents.shares)
    if time_for_widest.attention <= (1 + LITTLE_UNEVEN) * time_for_widest.even:
        return for_widest

    # 2. With even windows, where that takes less time.
    for_all = documents.placed(kinds)
    time_for_all = PredictedTime.of(for_all, kinds, documents.shares)
    return for_widest if time_for_widest.total <= time_for_all.total else for_all


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


@dataclass(frozen=True)
class _Windows:
    """Windows of a micro-batch, whose layers are to be even.

    Attributes:
        kinds: kinds of layers of the model.
        time: time of window layers, as a fraction of the work.
        left_out: time of the pairs that windows leave out of long documents, as a fraction of the work.
    """

    kinds: LayersByMask
    time: float
    left_out: float

    @classmethod
    def of(cls, kinds: LayersByMask, document_tokens: IntArray, work: int) -> "_Windows":
        """Sums the windows of whole documents, which have this work."""
        long = document_tokens[document_tokens > int(LONG_WINDOWS * kinds.longest_window)]
        left_out = sum(map(kinds.left_out_before, long.tolist()))
        return cls(kinds, kinds.window_time(document_tokens) / max(1, work), left_out / max(1, work))

    def of_nodes(self) -> EvenWindows:
        """Returns the deal to nodes."""
        return self._deal(NODES_UNEVEN * self.time, ALIKE_NODES)

    def of_ranks(self, pieces: list[Piece]) -> EvenWindows:
        """Returns the deal of a node's pieces to its ranks. Of a node that has more pairs left out, a rank may miss
        more."""
        deal = self._deal(0.0, ALIKE)
        more = deal.left_out(pieces) / max(1, work_of(pieces)) - self.left_out
        return replace(deal, may_miss=max(RANKS_UNEVEN * self.time + more, LEAST_UNEVEN * self.time))

    def _deal(self, may_miss: float, alike: float) -> EvenWindows:
        window_tokens = self.kinds.longest_window
        return EvenWindows(
            self.kinds.left_out_before,
            long_tokens=int(LONG_WINDOWS * window_tokens),
            least_tokens=max(1, window_tokens // 2),
            may_miss=may_miss,
            alike=alike,
        )


@dataclass(frozen=True, eq=False)
class _Documents:
    """Documents of a micro-batch by length, and the ranks to place them on.

    Attributes:
        lengths: `[documents]` tokens, as the caller numbers them.
        order: `[documents]` the caller's number of each document by length.
        topology, cost, head_groups: see `place`.
        shares: work of each rank in proportion.
        has_shares: whether these may differ.
    """

    lengths: IntArray
    order: IntArray
    topology: Topology
    cost: DocumentCost
    head_groups: int
    shares: list[float]
    has_shares: bool

    @cached_property
    def sorted_tokens(self) -> IntArray:
        """`[documents]` lengths, rising."""
        return self.lengths[self.order]

    @cached_property
    def rank_tokens(self) -> list[int]:
        """Tokens of each rank."""
        tokens, num_ranks = int(self.lengths.sum()), len(self.shares)
        return np.diff([tokens * rank // num_ranks for rank in range(num_ranks + 1)]).tolist()

    @cached_property
    def pool(self) -> PiecePool:
        """All documents; each way to place them takes from a copy of it."""
        return PiecePool.of_documents(self.sorted_tokens, self.cost)

    @cached_property
    def rule(self) -> StripeRule:
        """Rule for stripes, the same for all ways."""
        rank_load = self.pool.work_left / len(self.shares)
        return StripeRule(self.head_groups, rank_load, self.sorted_tokens.tolist(), self.pool.work)

    def placed(self, kinds: LayersByMask | None = None) -> Layout:
        """Places the documents: for the widest mask alone or, with kinds of layers, so that windows are even, too."""
        rule = self.rule
        # 1. Documents to nodes.
        nodes = [self.topology.ranks_of(node) for node in range(self.topology.num_nodes)]
        tokens_of = [self.rank_tokens[ranks.start : ranks.stop] for ranks in nodes]
        shares_of = [self.shares[ranks.start : ranks.stop] for ranks in nodes]
        pool = self.pool.copy()
        goals = _goals(map(sum, tokens_of), map(sum, shares_of), pool.work_left)
        off = FEW_NODES_OFF if len(nodes) <= FEW_NODES else NODES_OFF
        windows = _Windows.of(kinds, self.lengths, pool.work_left) if kinds else None
        if windows is None:
            held_by_node = deal_longest_first(pool, goals, SHORT_FOR_NODES, off, ALIKE_NODES)
        else:
            held_by_node = windows.of_nodes().deal(pool, goals, off)
        if (self.has_shares or windows) and largest_miss(held_by_node, goals) > MOST_OFF:
            again = PiecePool(joined(list(chain.from_iterable(held_by_node))), rule.work)
            lightest_first = deal_lightest_first(again, goals)
            held_by_node = min(held_by_node, lightest_first, key=lambda held: largest_miss(held, goals))

        # 2. Documents of each node to stripes and ranks.
        off = RANKS_OFF if len(nodes) > 1 else RANKS_OFF + FEW_NODES_OFF
        segments: list[list[Segment]] = []
        stripes: list[Stripe] = []
        for ranks, held, tokens, shares in zip(nodes, held_by_node, tokens_of, shares_of, strict=True):
            pieces = joined(held)
            if len(ranks) == 1:
                segments.append([piece[1:4] for piece in pieces])
                continue
            is_striped = rule.striped(pieces, len(ranks))
            striped = list(compress(pieces, is_striped))
            rest = list(compress(pieces, map(not_, is_striped)))
            rank_goals = _goals(tokens, shares, work_of(pieces))
            ways: Sequence[Deal]
            if windows is None:
                ways = heuristics_to_try(len(rest), len(ranks), len(self.shares))
            else:
                ways = (windows.of_ranks(pieces),)
            segments += _deal_to_ranks(striped, rest, rank_goals, rule.work, off, ways)
            stripes += stripes_of(striped, ranks)
        return self._layout(segments, stripes)

    def _layout(self, segments: list[list[Segment]], stripes: list[Stripe]) -> Layout:
        """Makes a layout, with documents numbered as the caller numbers them.

        A rank's segments that begin their document come first, then by document: the order in which tasks run.
        """
        numbers = np.fromiter(chain.from_iterable(chain.from_iterable(segments)), dtype=np.int64).reshape(-1, 3)
        num_ranks = len(self.shares)
        rank = np.repeat(np.arange(num_ranks), [len(of_rank) for of_rank in segments])
        document, start, stop, rank = join_neighbours(self.order[numbers[:, 0]], numbers[:, 1], numbers[:, 2], rank)
        in_order = np.argsort(2 * rank + (start > 0), kind="stable")
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
        )
        layout.validate()
        return layout


def _deal_to_ranks(
    striped: list[Piece],
    rest: list[Piece],
    goals: list[Goal],
    work: Work,
    off: float,
    heuristics: Sequence[Deal],
) -> list[list[Segment]]:
    """Deals the pieces of a node: segments of each of its ranks.

    Args:
        striped: pieces that are spread over all ranks, their work divided equally.
        rest: all other pieces.
        goals: goals of the ranks for all pieces.
        work: work of a query range, `work(document, start, stop)`.
        off: maximum miss of a rank's work, as a fraction of it, up to which long documents are not cut.
        heuristics: ways to deal the rest, which are tried.
    """
    # 1. Stripes: tokens spread evenly, work divided equally.
    on_ranks = spread(striped, [goal.tokens for goal in goals])
    striped_work = work_of(striped) / len(goals)

    # 2. The other pieces, for the tokens and the work that ranks still need.
    goals_of_rest = [
        Goal(
            goal.tokens - sum([stop - start for _, start, stop in held]), max(0.0, goal.work - striped_work), goal.load
        )
        for goal, held in zip(goals, on_ranks, strict=True)
    ]
    dealt = deal_with_best(lambda: PiecePool(rest, work), goals_of_rest, off, heuristics)
    for held, more in zip(on_ranks, dealt, strict=True):
        held += [(document, start, stop) for _, document, start, stop, _ in more]
    return on_ranks


def _goals(tokens: Iterable[int], shares: Iterable[float], work: int) -> list[Goal]:
    """Divides work in proportion to shares, and makes it goals."""
    parts = list(shares)
    whole = sum(parts) or 1.0
    works = [work * share / whole for share in parts]
    return [Goal(each, of_share, of_share) for each, of_share in zip(tokens, works, strict=True)]


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
