"""Wires: seconds of exchanges and of FSDP's collectives between ranks of several nodes.

A rank has two wires, one within its node and one to other nodes, and they run at the same time. A collective over all
ranks is a ring over all nodes: every node receives all bytes, and its ranks share them between their wires.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, LinkTimes
from distca_hf.analysis.profiles.curves import Curve, FloatArray, Notes
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Ranks and their links.

    Attributes:
        profile: measured links.
        num_ranks: data ranks.
        ranks_per_node: of them that share a node.
        notes: everything that was not measured as it is asked for.

    Raises:
        ConfigError: links that these ranks need were not measured.
    """

    profile: ClusterProfile
    num_ranks: int
    ranks_per_node: int
    notes: Notes

    def __post_init__(self) -> None:
        for needed, links, name in (
            (self.num_ranks > 1 and self.ranks_per_node > 1, self.profile.within_node, "within a node"),
            (self.num_ranks > self.ranks_per_node, self.profile.between_nodes, "between nodes"),
        ):
            if needed and links is None:
                raise ConfigError(
                    f"{self.profile.source}: links {name} were not measured, and {self.num_ranks} ranks, "
                    f"{self.ranks_per_node} per node, need them; run `distca profile` there, or with "
                    "--as-between-nodes"
                )

    @property
    def node_of(self) -> IntArray:
        """`[ranks]` node of each rank."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    def exchange(self, within_bytes: FloatArray, between_bytes: FloatArray) -> FloatArray:
        """Returns `[ranks]` seconds of an exchange in which ranks receive so many bytes from their node, and from
        others."""
        return np.maximum(
            self._seconds(self.profile.within_node, "exchange", within_bytes),
            self._seconds(self.profile.between_nodes, "exchange", between_bytes),
        )

    def all_gather(self, num_bytes: float) -> float:
        """Returns the seconds of gathering tensors of so many bytes over all ranks."""
        return self._collective("all_gather", num_bytes)

    def reduce_scatter(self, num_bytes: float) -> float:
        """Returns the seconds of reducing tensors of so many bytes over all ranks."""
        return self._collective("reduce_scatter", num_bytes)

    @property
    def attention_beside(self) -> float:
        """Seconds by which a second of exchange delays attention beside it, on the slower links."""
        return self._slower.attention_beside if self.num_ranks > 1 else 0.0

    @property
    def products_beside(self) -> float:
        """Seconds by which a second of gathering delays products beside it."""
        return self._slower.products_beside if self.num_ranks > 1 else 0.0

    @property
    def _slower(self) -> LinkTimes:
        links = self.profile.between_nodes if self.num_ranks > self.ranks_per_node else self.profile.within_node
        assert links is not None
        return links

    def _collective(self, name: str, num_bytes: float) -> float:
        if self.num_ranks == 1:
            return 0.0
        received = num_bytes * (self.num_ranks - 1) / self.num_ranks
        seconds = 0.0
        if self.ranks_per_node > 1:
            seconds = float(self._seconds(self.profile.within_node, name, received))
        if self.num_ranks > self.ranks_per_node:
            links = self.profile.between_nodes
            assert links is not None
            shared = received * links.ranks_per_node / self.ranks_per_node
            seconds = max(seconds, float(self._seconds(links, name, shared)))
        return seconds

    def _seconds(self, links: LinkTimes | None, name: str, num_bytes: FloatArray | float) -> FloatArray:
        asked = np.asarray(num_bytes, dtype=np.float64)
        if links is None:
            return np.zeros_like(asked)
        words = f"bytes of one {name.replace('_', '-')}"
        return Curve.of(words, links.num_bytes, getattr(links, name)).at(asked, self.notes)
