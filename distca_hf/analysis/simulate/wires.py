"""Wires: seconds of exchanges and of FSDP's collectives between ranks of several nodes.

A rank has two wires, one within its node and one to other nodes, and they run at the same time. A collective over all
ranks is a ring over all nodes: every node receives all bytes, and its ranks share them between their wires.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile, LinkTimes
from distca_hf.analysis.profiles.curves import Amounts, Curve, FloatArray, Notes
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError


# What each kind of times in a profile counts, for notes.
UNITS = {
    "exchange": "exchange",
    "one_way": "exchange that goes one way",
    "to_next": "exchange with the next rank",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
# Most seconds by which a second on the wires delays kernels meanwhile: running one after the other takes that long.
MOST_DELAY = 1.0


@dataclass(frozen=True)
class WireBytes:
    """Bytes that ranks send and receive, each `[ranks]`."""

    sent: Amounts
    received: Amounts

    @classmethod
    def both_ways(cls, num_bytes: Amounts) -> "WireBytes":
        return cls(num_bytes, num_bytes)


@dataclass(frozen=True)
class Cluster:
    """Ranks and their links. `ranks_per_node`: number of ranks that share a node. `notes`: everything that was not
    measured as needed."""

    profile: ClusterProfile
    num_ranks: int
    ranks_per_node: int
    notes: Notes

    def __post_init__(self) -> None:
        several, profile = self.num_ranks > self.ranks_per_node, self.profile
        for needed, links, name, advice in (
            (
                self.num_ranks > 1 < self.ranks_per_node,
                profile.within_node,
                "within a node",
                "on a node of several GPUs",
            ),
            (several, profile.between_nodes, "between nodes", "on several nodes, or with --as-between-nodes"),
        ):
            if needed and links is None:
                raise ConfigError(
                    f"{profile.source}: links {name} were not measured, and {self.num_ranks} ranks, "
                    f"{self.ranks_per_node} per node, need them; run `distca profile` {advice}"
                )

    @property
    def node_of(self) -> IntArray:
        return np.arange(self.num_ranks) // self.ranks_per_node

    def exchange(self, within: WireBytes, between: WireBytes) -> FloatArray:
        """Returns `[ranks]` seconds of an exchange with ranks of the same node, and of others."""
        links = self.profile.within_node, self.profile.between_nodes
        return np.maximum(*(self._both_ways(*each) for each in zip(links, (within, between), strict=True)))

    def alike_exchange(self, num_bytes: float) -> float:
        """Returns the seconds in which every rank sends and receives this many bytes, between nodes if there are
        several."""
        crosses = self.num_ranks > self.ranks_per_node
        of_links = (WireBytes.both_ways(np.array(num_bytes * is_there)) for is_there in (not crosses, crosses))
        return float(self.exchange(*of_links))

    def share_beyond(self, group: int) -> FloatArray:
        """Returns `[ranks]` part of the other ranks of each one's group, of this many neighbours, that are on other
        nodes."""
        number = self.node_of * self.num_ranks + np.arange(self.num_ranks) // group
        _, of_rank, inside = np.unique(number, return_inverse=True, return_counts=True)
        return (group - inside[of_rank]) / max(1, group - 1)

    def to_next(self, num_bytes: Amounts, group: int) -> FloatArray:
        """Returns `[ranks]` seconds of sending this many bytes to the next rank of a ring, over groups of so many
        neighbours; in groups that span nodes some ranks send to another one, and all wait for it."""
        seconds = self._to_next(self.profile.within_node, num_bytes if self.ranks_per_node > 1 else 0 * num_bytes)
        between = self._to_next(self.profile.between_nodes, num_bytes * (self.share_beyond(group) > 0))
        return np.maximum(seconds, between)

    def all_gather(self, num_bytes: float) -> float:
        return self._collective("all_gather", num_bytes)

    def reduce_scatter(self, num_bytes: float) -> float:
        return self._collective("reduce_scatter", num_bytes)

    @property
    def attention_beside(self) -> float:
        """Seconds by which a second of exchange delays attention meanwhile, on the slower links."""
        return self._delay("attention")

    @property
    def products_beside(self) -> float:
        """Seconds by which a second of gathering delays products meanwhile."""
        return self._delay("products")

    def _delay(self, kernels: str) -> float:
        if self.num_ranks == 1:
            return 0.0
        slower = self.profile.between_nodes if self.num_ranks > self.ranks_per_node else self.profile.within_node
        measured: float = getattr(slower, f"{kernels}_beside")
        if measured > MOST_DELAY:
            self.notes.add(
                f"a second on the wires was measured to delay {kernels} by {measured:.3g} s: taken as "
                f"{MOST_DELAY:g} s, as if one waited for the other"
            )
        return min(measured, MOST_DELAY)

    def _both_ways(self, links: LinkTimes | None, traffic: WireBytes) -> FloatArray:
        """Returns the seconds of sending and receiving at once: the common part both ways, and the rest one way.

        They are between the measured times of the smaller and of the larger size in both directions: one way never
        takes longer than both.
        """
        more, less = np.maximum(traffic.sent, traffic.received), np.minimum(traffic.sent, traffic.received)
        if links is None or not links.one_way:
            return self._seconds(links, "exchange", more)
        seconds = self._seconds(links, "one_way", more) + _added_by_other_way(links, less)
        return np.clip(seconds, *(self._seconds(links, "exchange", each) for each in (less, more)))

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
        return Curve.of(f"bytes of one {UNITS[name]}", links.num_bytes, _without_noise(getattr(links, name))).at(
            asked, self.notes
        )


def _without_noise(seconds: Sequence[float]) -> list[float]:
    """Returns times by rising sizes, none longer than for a larger size: times of small ones may be disturbed."""
    return [*accumulate(reversed(seconds), min)][::-1]


def _added_by_other_way(links: LinkTimes, num_bytes: Amounts) -> FloatArray:
    """Returns the seconds that this many bytes add to at least equally many that go the other way; more bytes never
    add less."""
    sizes = np.array([0.0, *links.num_bytes])
    apart = np.array(_without_noise(links.exchange)) - np.array(_without_noise(links.one_way))
    added = np.maximum.accumulate([0.0, *apart])
    return np.interp(num_bytes, sizes, added) * np.maximum(1.0, num_bytes / sizes[-1])
