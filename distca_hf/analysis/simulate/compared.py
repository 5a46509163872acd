"""Compared: what a way to train is for a simulation, and the sizes of groups that a way to compare with runs in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray


Step = Sequence[IntArray]  # lengths of each micro-batch, in the order of packing


@dataclass(frozen=True)
class Way:
    """One way to train on the same documents.

    Attributes:
        key: its name in JSON.
        label: its name in tables.
        loads: makes the load of each micro-batch of a step.
        costly: planned on some steps only.
        family: ways of one family differ in the size of groups alone; the fastest is shown.
        is_ours: whether distca_hf does it.
        in_stages: whether stages of a pipeline run it; loads are then those of the ranks of one stage.
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
    """What ways depend on.

    Attributes:
        request: what is simulated.
        costs: seconds of its parts.
        cluster: data ranks and links.
    """

    request: SimulationRequest
    costs: Costs
    cluster: Cluster


@dataclass(frozen=True)
class Compared:
    """A way to compare with.

    Attributes:
        key, label: its names in JSON and in tables; of a way with groups their size is added.
        loads: makes the load of each micro-batch of a step, for ranks in groups of a size.
        most_group: returns the most ranks of a group; None for a way without groups, which cuts no documents but those
            that are longer than a pack.
        name: of a way with groups, in sentences that say why it cannot run.
        costly: planned on some steps only.
    """

    key: str
    label: str
    loads: Callable[[World, Step, int], list[Load]]
    most_group: Callable[[SimulationRequest], int] | None = None
    name: str = ""
    costly: bool = False

    def groups(self, request: SimulationRequest) -> list[int]:
        """Returns powers of two from 2 on that hold the context and divide the ranks."""
        assert self.most_group is not None
        most, ranks = self.most_group(request), request.num_ranks
        powers = (1 << power for power in range(1, most.bit_length()))
        return [group for group in powers if request.least_group <= group <= most and ranks % group == 0]

    def ways(self, world: World) -> list[Way]:
        """Returns the ways that can run, one for each size of a group."""
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
        """Returns why the way cannot run; empty if it can. Layers with a state are another reason."""
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
    """Returns loads of the micro-batches of a step from a function of costs, lengths, and the number of ranks."""
    return lambda world, step, _: [load(world.costs, batch, world.request.num_ranks) for batch in step]


def of_groups(load: Callable[[Costs, Cluster, IntArray, int], Load]) -> Callable[[World, Step, int], list[Load]]:
    """Returns loads of the micro-batches of a step from a function of costs, cluster, lengths and ranks of a group."""
    return lambda world, step, group: [load(world.costs, world.cluster, batch, group) for batch in step]
