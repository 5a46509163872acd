"""Tiles: the attention of a layer on all ranks, as squares and prefixes of tasks. No rank has to be routed for it.

A task has n queries, and p keys before the first of them. It is one square, and also one prefix unless p is 0:

| tile | keys | mask | mask with a window |
|---|---|---|---|
| square | the n tokens of the queries | causal | a band |
| prefix | the p tokens before | none | the rest of the band; later queries attend fewer of these keys, or none |

Work, kernel seconds, and the share of both that waits for rows of other ranks are sums over tiles.
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
        rank: `[tiles]` rank that computes the tile.
        queries: `[tiles]` number of queries of its task.
        keys: `[tiles]` number of keys of a prefix; 0 for a square.
        pairs: `[tiles]` attended pairs in each head group of the tile.
        one_group: `[tiles]` whether the tile has a single head group, and not all heads.
        waits: `[tiles]` whether its queries or keys come from other ranks.
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
        """Returns the tiles of a layer with this mask.

        Args:
            plan: plan of the full layers. In layers with a window every rank computes the queries that it holds.
        """
        if mask.window_tokens is None:
            tasks, remote = plan.tasks, plan.has_remote_queries
        else:
            tasks = plan_in_place(replace(plan.layout, stripes=()), mask=mask).tasks
            remote = np.zeros(len(tasks), dtype=bool)
        return cls.of_tasks(mask, tasks.rank, tasks.stop - tasks.start, tasks.start, tasks.head != ALL_HEADS, remote)

    @classmethod
    def of_tasks(
        cls, mask: Mask, rank: IntArray, queries: IntArray, before: IntArray, one_group: BoolArray, remote: BoolArray
    ) -> "Tiles":
        """Returns the tiles of tasks.

        Args:
            rank, queries: `[tasks]` rank that computes the task, and its number of queries.
            before: `[tasks]` tokens of the document before the first query.
            one_group: `[tasks]` whether the task has a single head group.
            remote: `[tasks]` whether its queries come from other ranks.
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
        """Returns `[ranks]` work: attended pairs x head groups."""
        work = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(work, self.rank, self.pairs * np.where(self.one_group, 1, head_groups))
        return work
