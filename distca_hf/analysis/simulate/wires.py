"""Wires: seconds of exchanges and of FSDP's collectives between ranks of several nodes.

A rank has two wires, one within its node and one to other nodes, and they run at the same time. A collective over all
ranks is a ring over all nodes: every node receives all bytes, and its ranks share them between their wires.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, LinkTimes
from distca_hf.analysis.profiles.curves import Amounts, Curve, FloatArray, Notes
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError


@dataclass(frozen=True)
class WireBytes:
    """Bytes that ranks send, and that they receive, each `[ranks]`."""

    sent: Amounts
    received: Amounts

    @classmethod
    def both_ways(cls, num_bytes: Amounts) -> "WireBytes":
        """Returns as many bytes in each direction."""
        return cls(num_bytes, num_bytes)


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

    def exchange(self, within: WireBytes, between: WireBytes) -> FloatArray:
        """Returns `[ranks]` seconds of an exchange with ranks of the same node, and of others."""
        links = self.profile.within_node, self.profile.between_nodes
        return np.maximum(*(self._both_ways(*each) for each in zip(links, (within, between), strict=True)))

    def to_next(self, num_bytes: Amounts, group: int) -> FloatArray:
        """Returns the seconds of sending so many bytes to the next rank of a ring, over groups of so many neighbours;
        in groups that span nodes some ranks send to another one."""
        seconds = self._to_next(self.profile.within_node, num_bytes if self.ranks_per_node > 1 else 0 * num_bytes)
        if group > self.ranks_per_node:
            seconds = np.maximum(seconds, self._to_next(self.profile.between_nodes, num_bytes))
        return seconds

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

    def _both_ways(self, links: LinkTimes | None, traffic: WireBytes) -> FloatArray:
        """Returns the seconds of sending and receiving at once: as much as goes both ways, and the rest one way."""
        more, less = np.maximum(traffic.sent, traffic.received), np.minimum(traffic.sent, traffic.received)
        if links is None or not links.one_way:
            return self._seconds(links, "exchange", more)
        both = np.where(less > 0, self._seconds(links, "exchange", less) - self._seconds(links, "one_way", less), 0.0)
        return self._seconds(links, "one_way", more) + np.maximum(0.0, both)

    def _to_next(self, links: LinkTimes | None, num_bytes: Amounts) -> FloatArray:
        return self._seconds(links, "to_next" if links is not None and links.to_next else "exchange", num_bytes)

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

    def _seconds(self, links: LinkTimes | None, name: str, num_bytes: Amounts | float) -> FloatArray:
        asked = np.asarray(num_bytes, dtype=np.float64)
        if links is None:
            return np.zeros_like(asked)
        words = f"bytes of one {name.replace('_', '-')}"
        return Curve.of(words, links.num_bytes, getattr(links, name)).at(asked, self.notes)
