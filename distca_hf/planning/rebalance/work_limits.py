"""Work limits: the most work that each rank may compute, its surplus over that, and its room below it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from distca_hf.errors import ConfigError
from distca_hf.topology import Topology


Amounts = dict[int, float]  # rank -> work


def work_limits(total_work: int, num_ranks: int, capacities: Sequence[float] | None, tolerance: float) -> list[float]:
    """Returns `[ranks]` most work of each rank: its share of all work, by capacity, and the tolerance above it.

    Every rank has the same tolerance, as a bound on the largest one. A tolerance for receiving ranks alone would leave
    the work that all of them lack on the rank that gives.

    Raises:
        ConfigError: not one capacity for each rank, or none above 0.
    """
    speeds = [1.0] * num_ranks if capacities is None else [float(capacity) for capacity in capacities]
    if len(speeds) != num_ranks:
        raise ConfigError(f"capacities has {len(speeds)} numbers for {num_ranks} ranks; give one for each rank")
    wrong = [rank for rank, speed in enumerate(speeds) if not 0 <= speed < float("inf")]
    if wrong:
        raise ConfigError(f"the capacity of rank {wrong[0]} is {speeds[wrong[0]]}; it must be a number of at least 0")
    if sum(speeds) == 0:
        raise ConfigError(f"the capacities of all {num_ranks} ranks are 0; one of them must compute")
    share = (1 + tolerance) * total_work / sum(speeds)
    return [share * speed for speed in speeds]


@dataclass(frozen=True, slots=True)
class WorkGaps:
    """Gaps between work and limits: `surplus` that ranks have to give, `room` that others may take."""

    surplus: Amounts
    room: Amounts

    @classmethod
    def of(cls, work: list[int], limits: list[float]) -> "WorkGaps":
        """Compares every rank with its own limit."""
        amounts = list(enumerate(zip(work, limits, strict=True)))
        return cls(
            {rank: done - limit for rank, (done, limit) in amounts if done > limit},
            {rank: limit - done for rank, (done, limit) in amounts if done < limit},
        )

    def between_nodes(self, topology: Topology) -> "WorkGaps":
        """Returns the gaps of whole nodes, spread over their ranks with the largest gaps first."""
        surplus, room = _per_node(self.surplus, topology), _per_node(self.room, topology)
        gives: Amounts = {}
        takes: Amounts = {}
        for node in range(topology.num_nodes):
            too_much, too_little = sum(surplus[node].values()), sum(room[node].values())
            _spread(too_much - too_little, surplus[node], gives)
            _spread(too_little - too_much, room[node], takes)
        return WorkGaps(gives, takes)

    def within_nodes(self, topology: Topology) -> list["WorkGaps"]:
        """Returns the gaps of each node's ranks, to balance inside the node."""
        surplus, room = _per_node(self.surplus, topology), _per_node(self.room, topology)
        return [WorkGaps(surplus[node], room[node]) for node in range(topology.num_nodes)]


def _per_node(amounts: Amounts, topology: Topology) -> list[Amounts]:
    nodes: list[Amounts] = [{} for _ in range(topology.num_nodes)]
    for node, ranks in groupby(sorted(amounts), key=lambda rank: int(topology.node_of[rank])):
        nodes[node] = {rank: amounts[rank] for rank in ranks}
    return nodes


def _spread(total: float, amounts: Amounts, taken: Amounts) -> None:
    """Takes `total` from the largest amounts, and adds the parts to `taken`."""
    for rank in sorted(amounts, key=lambda rank: (-amounts[rank], rank)):
        if total <= 0:
            return
        taken[rank] = min(total, amounts[rank])
        total -= taken[rank]
