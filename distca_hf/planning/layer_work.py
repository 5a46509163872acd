"""Layer work: attended pairs of every rank in layers of each mask, and the balance of all layers together.

Ranks meet in every layer, so each kind of layers has a busiest rank of its own:

    rank                     0    1       of the busiest    mean
    full layers             40   40             40           40       imbalance 1.00
    layers with a window     6   10             10            8       imbalance 1.25
    one layer of each       46   50             50           48       imbalance 1.04

Work of the busiest ranks is summed over layers, because another rank may be the busiest in layers of another kind.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, LayerMasks, Mask, imbalance
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan


def is_full(mask: Mask, layout: Layout) -> bool:
    """Returns whether layers with this mask attend to all of every document; they follow the plan then."""
    return mask.within(layout.longest_document_tokens) == CAUSAL_MASK


def pairs_in_layer(plan: Plan, mask: Mask) -> NDArray[np.float64]:
    """Returns `[ranks]` attended pairs in a layer with this mask, all heads together. In layers with a window every
    rank computes the queries that it holds."""
    if is_full(mask, plan.layout):
        return plan.work / plan.tasks.head_groups
    return plan.layout.rank_work_of(mask).astype(np.float64)


def imbalance_of_layers(plan: Plan, layer_masks: LayerMasks, num_extra: int = 0) -> float:
    """Returns the imbalance of all layers, as `PlanFacts.imbalance` has it.

    Args:
        plan: of the full layers.
        layer_masks: masks of the model, each with the number of its layers.
        num_extra: the last ranks of the plan without tokens; they compute nothing in windows.
    """
    alone = (1.0,) * (plan.layout.num_ranks - num_extra) + (0.0,) * num_extra if num_extra else ()
    values, weights = [], []
    for mask, count in layer_masks:
        full = is_full(mask, plan.layout)
        values.append(plan.imbalance if full else imbalance(plan.layout.rank_work_of(mask), alone))
        weights.append(count * float(pairs_in_layer(plan, mask).sum()))
    return float(np.average(values, weights=weights)) if any(weights) else 1.0


@dataclass(frozen=True, eq=False)
class LayerWork:
    """Attended pairs of micro-batches, in layers of each mask.

    Attributes:
        pairs: `[masks, micro_batches, ranks]` attended pairs in one layer.
        shares: `[masks]` float64 weights of the masks in a mean over layers, such as their parts of all layers.
    """

    pairs: NDArray[np.float64] | IntArray
    shares: NDArray[np.float64]

    @property
    def busiest(self) -> NDArray[np.float64]:
        """`[micro_batches]` pairs of the busiest ranks, mean over layers."""
        mean: NDArray[np.float64] = self.shares @ self.pairs.max(axis=2)
        return mean

    @property
    def total(self) -> NDArray[np.float64]:
        """`[micro_batches]` pairs of all ranks, mean over layers."""
        mean: NDArray[np.float64] = self.shares @ self.pairs.sum(axis=2)
        return mean

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """`[micro_batches]` max/mean work over ranks, of all layers; 1.0 where there are no documents."""
        num_ranks, total = self.pairs.shape[2], self.total
        return np.divide(self.busiest * num_ranks, total, out=np.ones(len(total)), where=total > 0)


def layer_shares(layer_masks: LayerMasks) -> NDArray[np.float64]:
    """Returns `[masks]` parts of all layers."""
    counts = np.array([count for _, count in layer_masks], dtype=np.float64)
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares
