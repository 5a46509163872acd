"""Result: what every baseline says about the ranks, in the same words."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray, TokenBytes, imbalance
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between


@dataclass(frozen=True, eq=False)
class Baseline:
    """One global micro-batch as a baseline would run it.

    Attributes:
        name: how tables call it.
        work: `[ranks]` attended pairs each rank computes (times heads, where heads are divided).
        tokens: `[ranks]` tokens each rank holds.
        bytes_between: `[source, destination]` bytes sent in the forward pass of one layer; nothing to oneself.
    """

    name: str
    work: IntArray
    tokens: IntArray
    bytes_between: IntArray

    @classmethod
    def of_plan(cls, name: str, plan: Plan, token_bytes: TokenBytes) -> "Baseline":
        """What a plan says: queries and outputs of tasks that move, keys and values once per document and server."""
        return cls(name, plan.work, plan.layout.rank_tokens, bytes_between(plan, token_bytes))

    @cached_property
    def imbalance(self) -> float:
        """Max over mean of `work`."""
        return imbalance(self.work)


def nothing_sent(num_ranks: int) -> IntArray:
    """`[source, destination]` zeros."""
    return np.zeros((num_ranks, num_ranks), dtype=np.int64)
