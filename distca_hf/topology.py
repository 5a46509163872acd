"""Topology: the node of every rank. Ranks of one node share fast links."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Ranks in the order of their nodes; the last node may have fewer ranks.

    Raises:
        ConfigError: a number is below 1.
    """

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return ceil_div(self.num_ranks, self.ranks_per_node)

    @cached_property
    def node_of(self) -> IntArray:
        """`[ranks]` node of each rank."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of a node."""
        return range(node * self.ranks_per_node, min(self.num_ranks, (node + 1) * self.ranks_per_node))
