"""Served: plans with attention servers (ranks without tokens, numbered after the ranks that train), and plans as
integers, as servers receive them.

    layout of N trainers ── N + S ranks, of which S hold nothing ── tasks move to them, in proportion to their speed

A server computes only remote queries. So it gets work only by moving tasks, from placed layouts and from packs alike.
Ranks without servers plan placed layouts in place (`plan`).

Servers do not plan. They receive each plan as one array of integers:

    | version, head groups, window | lengths of the 12 arrays | the arrays, one after the other |

Both sides have equal plans: equal fingerprints, and so the same routings. Stripes are left out, because tasks already
contain the result of planning them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca_hf.arrays import IntArray, offsets
from distca_hf.cost import Mask, TokenBytes
from distca_hf.errors import ConfigError, PackingError, PlanError
from distca_hf.layout import Layout, Topology
from distca_hf.planning.pieces import Tasks
from distca_hf.planning.plan import LAYOUT_ARRAYS, PLAN_VERSION, TASK_ARRAYS, ExtraRanks, Plan
from distca_hf.planning.rebalance import plan_by_moving


# Maximum work of a rank above its share, as a fraction of the share. With the tolerance of plans without servers,
# eight trainers would keep most of the work meant for one slow server. This one moves up to 6 % more bytes.
SERVED_TOLERANCE = 0.005

# Integers of a written plan before the lengths: version, head groups, tokens of the window (0 for none), and whether
# it is chunked.
NUM_NUMBERS = 4
NUM_ARRAYS = len(LAYOUT_ARRAYS) + len(TASK_ARRAYS) + 1  # and the speeds
HEADER_LENGTH = NUM_NUMBERS + NUM_ARRAYS


@dataclass(frozen=True)
class Servers(ExtraRanks):
    """The attention servers of a plan, ranks N, N + 1, ... after N trainers. Raises ConfigError if there is no server,
    a speed is not above 0, or not every server has a node."""

    speeds: tuple[float, ...]  # attention speed of each server, relative to a trainer (1.0)
    trainers_attend: bool = True
    # Node of each server, as in `Topology`; empty: servers and trainers are all on one node.
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
        return len(self.speeds)

    def some(self, chosen: Sequence[int]) -> "Servers | None":
        """Returns some of the servers, by their numbers; None if none are chosen."""
        if not chosen:
            return None
        nodes = tuple(self.nodes[server] for server in chosen) if self.nodes else ()
        return replace(self, speeds=tuple(self.speeds[server] for server in chosen), nodes=nodes)

    def rank_speeds(self, num_trainers: int) -> tuple[float, ...]:
        """Returns `[trainers + servers]` relative speeds of all ranks, 0 for a trainer that computes no attention."""
        return (float(self.trainers_attend),) * num_trainers + tuple(float(speed) for speed in self.speeds)

    def topology(self, trainers: Topology) -> Topology:
        """Returns the topology of the trainers, followed by the servers. Raises ConfigError if trainers are on several
        nodes, and the servers' nodes are not known."""
        if not self.nodes and trainers.num_nodes > 1:
            raise ConfigError(
                f"{self.count} attention servers and trainers on {trainers.num_nodes} nodes: say on which node "
                "each server is"
            )
        return trainers.with_extra_ranks(self.nodes or (0,) * self.count)

    def plan(
        self,
        layout: Layout,
        head_groups: int = 1,
        *,
        topology: Topology | None = None,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    ) -> Plan:
        """Plans the layout of the trainers with these servers, such that all ranks compute for about the same time.

        Leaves out stripes of a placed layout: tasks that move divide heads themselves, and send no more bytes.
        Arguments and errors: see `ExtraRanks.plan`.
        """
        if topology is not None and topology.num_ranks != layout.num_ranks:
            raise ConfigError(f"the topology has {topology.num_ranks} ranks, the layout {layout.num_ranks} trainers")
        speeds = self.rank_speeds(layout.num_ranks)
        plan = plan_by_moving(
            replace(layout.with_extra_ranks(self.count), stripes=()),
            head_groups,
            topology=None if topology is None else self.topology(topology),
            token_bytes=token_bytes,
            speeds=speeds,
            tolerance=SERVED_TOLERANCE,
        )
        return replace(plan, speeds=speeds)


def plan_to_integers(plan: Plan) -> IntArray:
    """Writes a plan as a flat int64 array. Speeds are the bits of float64 numbers."""
    layout, tasks = plan.layout, plan.tasks
    arrays = [
        *(getattr(layout, name) for name in LAYOUT_ARRAYS),
        *(getattr(tasks, name) for name in TASK_ARRAYS),
        np.array(plan.speeds, dtype=np.float64).view(np.int64),
    ]
    header = [PLAN_VERSION, tasks.head_groups, tasks.mask.window_tokens or 0, tasks.mask.chunked, *map(len, arrays)]
    return np.concatenate([np.array(header, dtype=np.int64), *arrays])


def plan_from_integers(integers: IntArray) -> Plan:
    """Reads a plan from the array that `plan_to_integers` wrote, and validates it. Raises PlanError if the array is of
    another kind or version, is cut off or too long, or holds a plan that breaks its own invariants."""
    # 1. Header: numbers, and lengths that add up to the rest.
    if not isinstance(integers, np.ndarray) or integers.dtype != np.int64 or integers.ndim != 1:
        found = f"{integers.dtype} {integers.shape}" if isinstance(integers, np.ndarray) else type(integers).__name__
        raise PlanError(f"a plan is a flat array of int64, not {found}")
    if len(integers) < HEADER_LENGTH:
        raise PlanError(f"a plan of {len(integers)} integers is cut off: its header has {HEADER_LENGTH}")
    version, head_groups, window_tokens, chunked, *lengths = integers[:HEADER_LENGTH].tolist()
    if version != PLAN_VERSION:
        raise PlanError(f"the plan is of version {version}, this is {PLAN_VERSION}; run one version on all processes")
    if min(lengths) < 0 or sum(lengths) != len(integers) - HEADER_LENGTH:
        raise PlanError(
            f"the arrays of a plan have {lengths} integers, in all {sum(lengths)}; {len(integers) - HEADER_LENGTH} "
            "follow its header"
        )

    # 2. Arrays of one table must be equally long, and no number may ask for more room than the arrays take.
    _, *of_segments, borders, ranks = lengths[: len(LAYOUT_ARRAYS)]
    of_tasks, speeds = lengths[len(LAYOUT_ARRAYS) : -1], lengths[-1]
    if len({*of_segments}) > 1 or borders != ranks + 1 or len({*of_tasks}) > 1 or speeds not in (0, ranks):
        raise PlanError(
            f"arrays of one plan do not belong together: lengths {lengths} of {', '.join(LAYOUT_ARRAYS)}; of "
            f"{', '.join(TASK_ARRAYS)} of tasks; and of speeds"
        )
    if not 1 <= head_groups <= max(1, of_tasks[0]) or window_tokens < 0 or chunked not in (0, min(1, window_tokens)):
        raise PlanError(
            f"a plan of {of_tasks[0]} tasks cannot have {head_groups} head groups and a window of {window_tokens} "
            f"(chunked: {chunked})"
        )

    # 3. The plan.
    begins = HEADER_LENGTH + offsets(np.array(lengths, dtype=np.int64))[:-1]
    arrays = np.split(integers.copy(), begins)[1:]
    of_layout: dict[str, Any] = dict(zip(LAYOUT_ARRAYS, arrays[: len(LAYOUT_ARRAYS)], strict=True))
    tasks = dict(zip(TASK_ARRAYS, arrays[len(LAYOUT_ARRAYS) : -1], strict=True))
    mask = Mask(window_tokens or None, bool(chunked))
    speeds_of_ranks = tuple(arrays[-1].view(np.float64).tolist())
    plan = Plan(Layout(**of_layout), Tasks(**tasks, head_groups=head_groups, mask=mask), speeds_of_ranks)
    try:
        plan.validate()
    except PackingError as error:
        raise PlanError(f"the layout of a plan is damaged: {error}") from error
    return plan
