"""Given: places documents that ranks already hold, in given batches.

Batches that take ranks about the same time stay. Others are placed like any documents. Then the placed ranks are
numbered such that many tokens stay on the rank whose batch holds them.

    as placed     a b c d | e f g h       nodes of equal size, and the ranks of a node, are the same to placement,
    numbered      f e h g | b d a c       so each rank takes the part that shares most tokens with its batch

Every part keeps its tokens, its work and its stripes. Nodes are matched first, because the network between them is
slow.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, offsets, ranges, sum_by
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks
from distca_hf.flops import LLAMA_8B_COSTS, StepCost
from distca_hf.layout import Layout, Topology
from distca_hf.placement.place import place
from distca_hf.placement.predicted import pair_time


# Batches are even if no rank has more than this many times the mean tokens, which are memory, or the mean time.
EVEN = 1.02


def place_given(
    home: Layout,
    topology: Topology,
    head_groups: int = 1,
    layer_masks: LayerMasks = CAUSAL_LAYERS,
    cost: StepCost = LLAMA_8B_COSTS.both,
) -> Layout:
    """Returns the layout that layers compute, with at least one row on each rank: models cannot run without rows.

    Args:
        home: documents, in the order of the batches, without the prefixes that others hold; returned unchanged if
            batches are even.
        topology, head_groups, layer_masks: as for `place`.
        cost: seconds of a token and of a pair in the layers. Documents of an even batch are whole on its rank, so
            ranks do not meet between attention and the other parts of a layer: only their sum counts.
    """
    if all(count.max() <= EVEN * count.mean() for count in (home.rank_tokens, rank_seconds(home, layer_masks, cost))):
        return home
    placed = place(
        home.document_tokens,
        home.num_ranks,
        topology=topology,
        head_groups=head_groups,
        layer_masks=layer_masks,
        shared=home.shared,
    )
    placed = near_home(home, placed, topology)
    return replace(placed, rank_rows=np.maximum(placed.rank_rows, 1))


def rank_seconds(layout: Layout, layer_masks: LayerMasks, cost: StepCost) -> NDArray[np.float64]:
    """Returns `[ranks]` seconds in which ranks compute the layers of what they hold."""
    longest = layout.longest_document_tokens
    masks = [(mask.within(longest), count) for mask, count in layer_masks]
    pairs = sum(count * pair_time(mask) * layout.rank_work_of(mask) for mask, count in masks)
    layers = sum(count for _, count in masks)
    return cost.token_seconds * layout.rank_tokens + cost.pair_seconds / layers * pairs


def tokens_between(home: Layout, placed: Layout) -> IntArray:
    """Returns `[home rank, placed rank]` tokens that the first rank holds in its batch, and the second computes.

    Args:
        home: the same documents, whole, in the order of the batches.
    """
    source, num_ranks = home.segment_rank[placed.segment_document], home.num_ranks
    between = sum_by(source * num_ranks + placed.segment_rank, placed.segment_tokens, num_ranks**2)
    return between.reshape(num_ranks, num_ranks)


def near_home(home: Layout, placed: Layout, topology: Topology) -> Layout:
    """Returns a placed layout with its ranks renumbered, so that many tokens stay on the rank whose batch holds them.
    The numbers are the same on all ranks of a job.

    Args:
        home: the same documents, whole, in the order of the batches.
        topology: of the placed ranks.
    """
    num_ranks = placed.num_ranks
    per_node = min(topology.ranks_per_node, num_ranks)
    common = tokens_between(home, placed).T  # [placed rank, home rank]
    # 1. Nodes of equal size are exchanged; the last one, which may be smaller, stays.
    full = num_ranks // per_node
    in_full = common[: full * per_node, : full * per_node]
    node_order = _matched(in_full.reshape(full, per_node, full, per_node).sum(axis=(1, 3)))
    order = np.arange(num_ranks)
    order[: full * per_node] = ranges(node_order * per_node, np.full(full, per_node))
    # 2. The ranks of each node.
    for node in range(topology.num_nodes):
        ranks = topology.ranks_of(node)
        of_node = order[ranks.start : ranks.stop]
        order[ranks.start : ranks.stop] = of_node[_matched(common[of_node, ranks.start : ranks.stop])]
    # 3. The layout whose rank r is rank `order[r]` of the placed one.
    new_node = np.argsort(node_order)  # of each full node
    counts = np.diff(placed.rank_segments)[order]
    segments = ranges(placed.rank_segments[order], counts)

    def moved(rank: int) -> int:
        node = rank // per_node
        return rank + per_node * (int(new_node[node]) - node if node < len(new_node) else 0)

    return replace(
        placed,
        segment_document=placed.segment_document[segments],
        segment_start=placed.segment_start[segments],
        segment_stop=placed.segment_stop[segments],
        rank_segments=offsets(counts),
        rank_rows=placed.rank_rows[order],
        stripes=tuple(
            replace(
                stripe,
                first_rank=moved(stripe.first_rank),
                stop_rank=moved(stripe.first_rank) + stripe.stop_rank - stripe.first_rank,
            )
            for stripe in placed.stripes
        ),
    )


def _matched(common: IntArray) -> IntArray:
    """Returns `[ranks]` the placed rank that each home rank takes, from `[placed ranks, home ranks]` tokens in common.
    Pairs with the most are matched first."""
    pairs = np.argwhere(common)
    order, free = np.full(len(common), -1), np.ones(len(common), dtype=bool)
    for placed, home in pairs[np.argsort(-common[tuple(pairs.T)], kind="stable")].tolist():
        if free[placed] and order[home] < 0:
            order[home], free[placed] = placed, False
    order[order < 0] = np.flatnonzero(free)
    return order
