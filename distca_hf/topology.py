"""Topology: which ranks share a node, and with it fast links.

ranks         0  1  2  3 | 4  5        ranks that train in the order of their nodes, then ranks without tokens
node_of       0  0  1  1 | 1  2        these on any node, or on their own nodes
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Ranks in the order of their nodes; the last node may have fewer ranks. Ranks without tokens come last, on any
    nodes.

    Attributes:
        num_ranks: all ranks.
        ranks_per_node: ranks with tokens that share a node.
        extra_nodes: node of each rank without tokens; nodes that have only such ranks are numbered after all others.

    Raises:
        ConfigError: a number is below 1, or a node below 0.
    """

    num_ranks: int
    ranks_per_node: int
    extra_nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self._num_trainers < 1:
            raise ConfigError(f"{len(self.extra_nodes)} of num_ranks={self.num_ranks} hold no tokens; one must train")
        if min(self.extra_nodes, default=0) < 0:
            raise ConfigError(f"extra_nodes={self.extra_nodes}: a node is numbered from 0 on")

    def with_extra_ranks(self, nodes: Sequence[int]) -> "Topology":
        """Returns the topology with one more rank without tokens on each of these nodes, after all other ranks."""
        return replace(self, num_ranks=self.num_ranks + len(nodes), extra_nodes=(*self.extra_nodes, *nodes))

    @property
    def _num_trainers(self) -> int:
        return self.num_ranks - len(self.extra_nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return max(ceil_div(self._num_trainers, self.ranks_per_node), 1 + max(self.extra_nodes, default=0))

    @cached_property
    def node_of(self) -> IntArray:
        """`[ranks]` node of each rank."""
        of_trainers = np.arange(self._num_trainers) // self.ranks_per_node
        return np.concatenate([of_trainers, np.array(self.extra_nodes, dtype=np.int64)])

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of a node that hold tokens: and train."""
        return range(node * self.ranks_per_node, min(self._num_trainers, (node + 1) * self.ranks_per_node))
