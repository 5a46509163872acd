"""Compared: classes of ways to train, and the group sizes in which a way to compare with is simulated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray


Step = Sequence[IntArray]  # document lengths of each micro-batch, in the order of packing


@dataclass(frozen=True)
class Way:
    """One way to train, as it is simulated.

    Attributes:
        key: its name in JSON.
        loads: makes the load of each micro-batch of a step.
        costly: whether it is planned only on some steps, because that takes long.
        family: ways of one family differ only in group size, and the fastest is shown; empty if there are no others.
        is_ours: whether distca_hf does it.
        in_stages: whether it runs in the stages of a pipeline; loads are then of the ranks of one stage.
        servers: data ranks that serve attention, and hold no weights.
    """

    key: str
    label: str
    loads: Callable[[Step], list[Load]]
    costly: bool = False
    family: str = ""
    is_ours: bool = False
    in_stages: bool = False
    servers: int = 0


@dataclass(frozen=True)
class World:
    """What the loads of ways are computed from."""

    request: SimulationRequest
    costs: Costs
    cluster: Cluster


@dataclass(frozen=True)
class Compared:
    """A way to compare with, in all its group sizes.

    Attributes:
        key, label: its names in JSON and in tables; for a way with groups their size is added.
        loads: makes the load of each micro-batch of a step, given the group size.
        most_group: returns the largest group size; None for a way without groups, which cuts only documents that are
            longer than a pack.
        name: of a way with groups, for sentences that say why it cannot run.
        costly: whether it is planned only on some steps, because that takes long.
    """

    key: str
    label: str
    loads: Callable[[World, Step, int], list[Load]]
    most_group: Callable[[SimulationRequest], int] | None = None
    name: str = ""
    costly: bool = False

    def groups(self, request: SimulationRequest) -> list[int]:
        """Returns group sizes that hold the context: powers of two, at least 2, that divide the number of ranks."""
        assert self.most_group is not None
        most, ranks = self.most_group(request), request.num_ranks
        powers = (1 << power for power in range(1, most.bit_length()))
        return [group for group in powers if request.least_group <= group <= most and ranks % group == 0]

    def ways(self, world: World) -> list[Way]:
        """Returns the ways that can run, one for each group size."""
        if self.most_group is None:
            return [Way(self.key, self.label, partial(self._loads, world, 1), self.costly)]
        return [
            Way(
                f"{self.key}_{group}",
                f"{self.label} over {group}",
                partial(self._loads, world, group),
                self.costly,
                family=self.key,
            )
            for group in ([] if world.request.model.mixers else self.groups(world.request))
        ]

    def _loads(self, world: World, group: int, step: Step) -> list[Load]:
        return self.loads(world, step, group)

    def missing(self, request: SimulationRequest) -> str:
        """Returns why no group size can run; empty if one can. Layers with a state are handled by the caller."""
        if self.most_group is None or self.groups(request):
            return ""
        tokens, ranks, most = request.longest_tokens, request.num_ranks, self.most_group(request)
        if request.least_group > most:
            return (
                f"{self.name}: a group within a node holds at most {most * request.tokens_per_rank:,} tokens, and the "
                f"context has {tokens:,}"
            )
        return f"{self.name}: no group of 2, 4, 8, ... data ranks that holds {tokens:,} tokens divides all {ranks}"


def of_ranks(load: Callable[[Costs, IntArray, int], Load]) -> Callable[[World, Step, int], list[Load]]:
    """Makes `Compared.loads` from a function of costs, document lengths and number of ranks."""
    return lambda world, step, _: [load(world.costs, batch, world.request.num_ranks) for batch in step]


def of_groups(load: Callable[[Costs, Cluster, IntArray, int], Load]) -> Callable[[World, Step, int], list[Load]]:
    """Makes `Compared.loads` from a function of costs, cluster, document lengths and group size."""
    return lambda world, step, group: [load(world.costs, world.cluster, batch, group) for batch in step]
