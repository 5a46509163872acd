"""Served: plans with attention servers, ranks without tokens behind the ranks that train.

    layout of N trainers ── N + S ranks, of which S hold nothing ── tasks move to them, in proportion to their speed

A server is fed by other ranks alone: whatever it computes are remote queries. So work comes to it by moving, from
placed layouts and from packs alike. Ranks without servers plan placed layouts in place (`plan`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.topology import Topology


# Maximum work of a rank above its share, as a fraction of the share. With the tolerance of plans without servers eight
# trainers would keep most of what one slow server is there for. This one moves up to 6 % more bytes.
SERVED_TOLERANCE = 0.005


@dataclass(frozen=True)
class Servers:
    """The attention servers of a plan, ranks N, N + 1, ... behind N trainers.

    Attributes:
        speeds: attention speed of each server, relative to a trainer: 1.0 is as fast.
        trainers_attend: whether trainers compute attention, too.
        nodes: node of each server, as in `Topology`; empty: servers and trainers are all on one node.

    Raises:
        ConfigError: there is no server, a speed is not above 0, or not every server has a node.
    """

    speeds: tuple[float, ...]
    trainers_attend: bool = True
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.speeds:
            raise ConfigError("servers without a speed: give one speed for each attention server, at least one")
        for server, speed in enumerate(self.speeds):
            if not 0 < speed < math.inf:
                raise ConfigError(f"the speed of attention server {server} is {speed}; it must be above 0 and finite")
        if self.nodes and len(self.nodes) != self.count:
            raise ConfigError(f"{len(self.nodes)} nodes for {self.count} attention servers; give one node for each")
        if min(self.nodes, default=0) < 0:
            raise ConfigError(f"attention servers on nodes {self.nodes}: a node is numbered from 0 on")

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self.speeds)

    def some(self, chosen: Sequence[int]) -> "Servers | None":
        """Returns some of the servers, by their numbers; None for none."""
        if not chosen:
            return None
        nodes = tuple(self.nodes[server] for server in chosen) if self.nodes else ()
        return replace(self, speeds=tuple(self.speeds[server] for server in chosen), nodes=nodes)

    def rank_speeds(self, num_trainers: int) -> tuple[float, ...]:
        """Returns `[trainers + servers]` relative speeds of all ranks, 0 for a trainer that computes no attention."""
        return (float(self.trainers_attend),) * num_trainers + tuple(float(speed) for speed in self.speeds)

    def topology(self, trainers: Topology) -> Topology:
        """Returns the topology of the trainers, and of the servers behind them.

        Raises:
            ConfigError: trainers are on several nodes, and those of the servers are not known.
        """
        if not self.nodes and trainers.num_nodes > 1:
            raise ConfigError(
                f"{self.count} attention servers beside trainers on {trainers.num_nodes} nodes: say on which node "
                "each server is"
            )
        return trainers.with_servers(self.nodes or (0,) * self.count)


def plan_served(
    layout: Layout,
    servers: Servers,
    head_groups: int = 1,
    *,
    topology: Topology | None = None,
    token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
) -> Plan:
    """Plans the layout of the trainers with attention servers, so that all ranks compute for about the same time.

    Stripes of a placed layout are left out: tasks that move divide heads themselves, and send no more bytes.

    Args:
        layout: trainers, and the tokens that each of them holds.
        servers: ranks behind them.
        head_groups: groups that heads may be divided into; 1 keeps heads together.
        topology: trainers that share a node; all of them, if it is not given.
        token_bytes: bytes of one token in one layer.

    Raises:
        ConfigError: head groups below 1, a topology of other ranks, or servers on unknown nodes.
    """
    if topology is not None and topology.num_ranks != layout.num_ranks:
        raise ConfigError(f"the topology has {topology.num_ranks} ranks, the layout {layout.num_ranks} trainers")
    speeds = servers.rank_speeds(layout.num_ranks)
    plan = plan_by_moving(
        replace(layout.with_servers(servers.count), stripes=()),
        head_groups,
        topology=None if topology is None else servers.topology(topology),
        token_bytes=token_bytes,
        capacities=speeds,
        tolerance=SERVED_TOLERANCE,
    )
    return replace(plan, speeds=speeds)
