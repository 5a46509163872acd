"""Tiles: attention of a layer as squares and prefixes of tasks, of all ranks at once, without routing any of them.

A task of n queries with p keys before the first of them is one square, and one prefix if p is not 0:

| tile | keys | mask | with a window |
|---|---|---|---|
| square | those of the n queries | causal | a band |
| prefix | the p keys before | none | an inverse band, of which late queries attend nothing |

Seconds, work and the part that waits for rows of other ranks are sums over tiles.
"""

from dataclasses import dataclass, replace

import numpy as np

from distca_hf.arrays import BoolArray, IntArray
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of tasks, squares first.

    Attributes:
        mask: of the layer.
        rank: `[tiles]` rank that computes it.
        queries: `[tiles]` queries of its task.
        keys: `[tiles]` keys before the queries that a prefix attends; 0 of a square.
        pairs: `[tiles]` attended pairs in each of its groups of heads.
        one_group: `[tiles]` whether it is of a single group of heads.
        waits: `[tiles]` whether queries or keys come from other ranks.
    """

    mask: Mask
    rank: IntArray
    queries: IntArray
    keys: IntArray
    pairs: IntArray
    one_group: BoolArray
    waits: BoolArray

    @classmethod
    def of(cls, plan: Plan, mask: Mask = CAUSAL_MASK) -> "Tiles":
        """Returns the tiles of a layer with this mask, whose full layers a plan is of. In layers with a window every
        rank computes the queries that it holds."""
        if mask.window_tokens is None:
            tasks, remote = plan.tasks, plan.has_remote_queries
        else:
            tasks = plan_in_place(replace(plan.layout, stripes=()), mask=mask).tasks
            remote = np.zeros(len(tasks), dtype=bool)
        return cls.of_tasks(mask, tasks.server, tasks.stop - tasks.start, tasks.start, tasks.head != ALL_HEADS, remote)

    @classmethod
    def of_tasks(
        cls, mask: Mask, rank: IntArray, queries: IntArray, before: IntArray, one_group: BoolArray, remote: BoolArray
    ) -> "Tiles":
        """Returns the tiles of tasks.

        Args:
            mask: of the layer.
            rank, queries: `[tasks]` rank that computes it, and its queries.
            before: `[tasks]` tokens of the document before the first query.
            one_group: `[tasks]` whether it is of a single group of heads.
            remote: `[tasks]` whether its queries come from another rank.
        """
        first = mask.first_key(before)
        prefix = np.flatnonzero(first < before)
        inside = mask.pairs_inside(before, before + queries)
        outside = (mask.pairs_of(before, before + queries) - inside)[prefix]
        keys = np.concatenate([np.zeros_like(queries), (before - first)[prefix]])
        pairs, waits = np.concatenate([inside, outside]), np.concatenate([remote, np.ones(len(prefix), dtype=bool)])
        rank, queries, one_group = (np.concatenate([x, x[prefix]]) for x in (rank, queries, one_group))
        return cls(mask, rank, queries, keys, pairs, one_group, waits)

    def work_of(self, num_ranks: int, head_groups: int) -> IntArray:
        """Sums `[ranks]` attended pairs x groups of heads."""
        work = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(work, self.rank, self.pairs * np.where(self.one_group, 1, head_groups))
        return work
