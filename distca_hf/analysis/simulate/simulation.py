"""Simulation: all ways to train on one cluster, including distca_hf's own, and the seconds of their steps.

A way that cannot run is left out, and `missing` says why. Ways that are quick to plan simulate all steps. The others
simulate some of the steps, spread evenly, and are compared with plain packing on these.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from distca_hf.analysis.groups import Groups
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.request import plan_step
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.load import Load, Step, Way, ours, rows_placed
from distca_hf.analysis.simulate.request import GPUS_PER_SERVER, SimulationRequest
from distca_hf.analysis.simulate.step import StagedTraining, Training
from distca_hf.analysis.simulate.ways import (
    best_fit,
    left_out_pairs,
    missing_to_compare,
    packs,
    plain_packing,
    ways_to_compare,
)
from distca_hf.analysis.simulate.wires import Cluster
from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan


# Steps x GPUs x micro-steps above which starting several processes pays off.
WORTH_PROCESSES = 4096
# Most steps on which costly ways are simulated, and GPUs x micro-steps of these: planning takes a millisecond per GPU.
MOST_COSTLY_STEPS, COSTLY_RANKS = 25, 8192
MOST_PROCESSES = 8


@dataclass(frozen=True)
class Simulation:
    """Simulates a request on one cluster. `keys`: keys of the ways to simulate; empty for all. `groups`: of each
    micro-batch of the step to simulate, the documents that begin alike; empty if none do."""

    request: SimulationRequest
    profile: ClusterProfile
    keys: tuple[str, ...] = ()
    groups: Sequence[Groups] = ()

    @cached_property
    def costs(self) -> Costs:
        request = self.request
        return Costs(self.profile, request.model, request.liger, Notes(), request.tensor_ranks)

    @cached_property
    def cluster(self) -> Cluster:
        request = self.request
        return Cluster(self.profile, request.num_ranks, request.data_ranks_per_node, self.costs.notes)

    @property
    def training(self) -> Training:
        return Training(self.costs, self.cluster, self.request.checkpointing != "none")

    def step_seconds(self, way: Way, step: Step) -> tuple[float, list[Load]]:
        """Returns the seconds of an optimizer step, and the load of each micro-batch. `step`: with a pipeline, for the
        ranks of one stage."""
        training = replace(self.training, cluster=self._trainers(way.servers))
        if way.in_stages:
            assert self.request.pipeline is not None
            of_stage = replace(self.training, cluster=self._stage_cluster, gathers_layers=False)
            staged = StagedTraining(of_stage, self.request.pipeline, self.cluster, self.request.tokens_per_rank)
            loads = way.loads(step)
            seconds = staged.micro_batches_seconds(loads) + training.cast_seconds()
        else:
            *earlier, last = loads = way.loads(self.request.without_stages(step))
            before = replace(training, sums_gradients=self.request.sync_each_batch)
            seconds = sum(before.micro_batch_seconds(load) + before.adding_seconds() for load in earlier)
            seconds += training.micro_batch_seconds(last)
        return seconds + training.optimizer_seconds(), loads

    def ways(self) -> list[Way]:
        """Returns the ways that can run, if given only those in `keys`. `tasks_moved` is included only if its key is
        given, or if documents stay whole."""
        if not self.keys:
            return self._ways()
        every = {way.key: way for way in (self._tasks_moved, *self._ways())}
        return [every[key] for key in self.keys if key in every]

    def _ways(self) -> list[Way]:
        request = self.request
        if request.batch_size is not None:

            def as_dealt(step: Step) -> list[Load]:
                return [packs(self.costs, np.split(batch, request.num_ranks), batch) for batch in step]

            return [Way("plain", "plain data parallelism", as_dealt), *self._given_ways()]
        each = [*ways_to_compare(request, self.costs, self.cluster), *self._given_ways()[:1]]
        if self._has_servers:
            served = partial(Way, servers=request.num_servers, costly=True, is_ours=True)
            each.append(served("servers", "distca, with servers", self._served))
        if self._saves:
            again = partial(self._placed, saves=False)
            each.append(Way("placed_recomputed", "distca, recomputed", again, is_ours=True, costly=True))
        each.append(Way("placed", "distca, placed", partial(self._placed, saves=self._saves), is_ours=True))
        return [*each, *self._in_stages()]

    def missing(self) -> list[str]:
        if self.request.batch_size is not None:
            return ["ways that make their own batches, or use some of these GPUs as attention servers"]
        missing = missing_to_compare(self.request)
        if not self._has_servers:
            missing.append(f"attention servers: fewer than {GPUS_PER_SERVER} data ranks, or documents that stay whole")
        return missing

    @property
    def _has_servers(self) -> bool:
        return self.request.num_servers > 0 and not self.request.model.whole_documents

    @property
    def _saves(self) -> bool:
        return self.request.setup("fsdp2").saves_attention

    def _trainers(self, servers: int) -> Cluster:
        """Returns the cluster without its attention servers: the data ranks that hold weights."""
        return replace(self.cluster, num_ranks=self.cluster.num_ranks - servers)

    # Stages of a pipeline.

    @property
    def _stage_cluster(self) -> Cluster:
        ranks = self.request.stage_ranks
        return replace(self.cluster, num_ranks=ranks, ranks_per_node=min(ranks, self.cluster.ranks_per_node))

    def _in_stages(self) -> list[Way]:
        """Returns ways that use the same GPUs as stages of the pipeline; none without a pipeline. Placed ways keep
        micro-batches in the order of packing; shaped ways divide a step's documents by work, as in training."""
        if self.request.pipeline is None:
            return []
        ranks, planner = self.request.stage_ranks, self.request.stage_planner

        def padded(load: Load) -> Load:  # ranks of stages compute all of their rows
            return replace(load, tokens=np.full_like(load.tokens, self.request.tokens_per_rank))

        def planned(plan: Plan) -> Load:
            chunks = planner.num_chunks
            return padded(ours(self.costs, self._stage_cluster, plan, chunks, self._saves, gather_seconds=0.0))

        def plain(step: Step) -> list[Load]:
            return [padded(plain_packing(self.costs, batch, ranks)) for batch in step]

        way = partial(Way, is_ours=True, costly=True, in_stages=True)
        return [
            Way("pipeline_plain", "pipeline, plain", plain, in_stages=True),
            way("pipeline_placed", "pipeline, placed", lambda step: [planned(planner.plan(batch)) for batch in step]),
            way(
                "pipeline_shaped",
                "pipeline, shaped",
                lambda step: [planned(plan) for plan in plan_step(planner, step)],
            ),
        ]

    # Placed batches, and attention servers.

    def _placed(self, step: Step, saves: bool) -> list[Load]:
        planner = self.request.planner
        return [ours(self.costs, self.cluster, plan, planner.num_chunks, saves) for plan in plan_step(planner, step)]

    def _served(self, step: Step) -> list[Load]:
        planner = self.request.planner_with_servers(self.request.num_servers)
        # Servers keep no rows until recomputation.
        keeps, chunks = self.request.checkpointing != "recomputed", planner.num_chunks
        gather = self._trainers(self.request.num_servers).all_gather(self.costs.layer_weight_bytes)
        load = partial(ours, self.costs, self.cluster, keeps=keeps, gather_seconds=gather)
        return [load(planner.plan(batch), chunks, self._saves) for batch in step]

    # Given batches: the request's, or packs of plain packing.

    def _given_ways(self) -> list[Way]:
        """Returns distca_hf's ways for given batches. Tasks move if documents stay whole; otherwise rows are
        placed."""
        if self.request.model.whole_documents:
            return [self._tasks_moved]
        way = partial(Way, costly=True, is_ours=True)
        label = "distca, your packs" if self.request.batch_size is None else "distca, results return"
        return [
            way("given", label, partial(self._rows_placed, loss_is_placed=False)),
            way("given_loss", "distca, placed loss", partial(self._rows_placed, loss_is_placed=True)),
        ]

    @property
    def _tasks_moved(self) -> Way:
        """The way in which tokens of given batches stay, and attention tasks move."""

        def loads(step: Step) -> list[Load]:
            plan = self.request.given_plans(places_rows=False).plan
            return [self._of_plan(plan(self._home(batch)), batch) for batch in step]

        return Way("tasks_moved", "distca, attention moved", loads, costly=True, is_ours=True)

    def _rows_placed(self, step: Step, loss_is_placed: bool) -> list[Load]:
        planner, loads = self.request.given_plans(places_rows=True), []
        for batch, groups in zip_longest(step, self.groups):
            home = self._home(batch)
            placed = self.request.given_layout(planner, home, groups, loss_is_placed)
            load = self._of_plan(planner.plan(placed), batch)
            if placed.shared is not None:
                load = replace(load, prefixes=placed.first_own)
            loads.append(rows_placed(self.costs, self.cluster, home, load, placed, loss_is_placed))
        return loads

    def _of_plan(self, plan: Plan, batch: IntArray) -> Load:
        load = ours(self.costs, self.cluster, plan, self.request.planner.num_chunks, self._saves)
        held = plan.layout.document_tokens
        return replace(load, left_out_pairs=left_out_pairs(self.costs.model, [held], batch))

    def _home(self, batch: IntArray) -> Layout:
        """Returns the batches of all ranks: as dealt, or packs of equal tokens."""
        ranks = self.request.num_ranks
        return Layout.from_packs(
            np.split(batch, ranks) if self.request.batch_size is not None else best_fit(batch, ranks)
        )


class WayStep(NamedTuple):
    """One step of one way. For fields that are not described here see `WayFigures`. `left_out_pairs`: attended pairs
    that are lost because documents are cut. `shared_tokens`, `shared_pairs`, `shared_head_tokens`: those that are not
    computed, because another document begins with them, too."""

    seconds: float
    attention_seconds: float
    received_bytes: float
    state_bytes: int
    most_tokens: int
    most_head_tokens: int
    left_out_pairs: float
    shared_tokens: int = 0
    shared_pairs: float = 0.0
    shared_head_tokens: int = 0


class Simulated(NamedTuple):
    """The step of a number, in every way that was simulated on it."""

    number: int
    ways: dict[str, WayStep]
    notes: Notes


# Yields the given steps, and shows progress.
Track = Callable[[Iterable[Simulated]], Iterable[Simulated]]


def run_steps(
    request: SimulationRequest,
    profile: ClusterProfile,
    steps: Sequence[Step],
    track: Track = iter,
    keys: tuple[str, ...] = (),
    groups: Sequence[Sequence[Groups]] = (),
) -> tuple[Simulation, list[Simulated]]:
    """Simulates steps in every way, or in some ways by their keys, see `simulate`. Returns the simulation, whose notes
    are complete, and all steps."""
    simulation = Simulation(request, profile, keys)
    size = request.num_ranks * request.accumulation
    few = max(1, min(len(steps), MOST_COSTLY_STEPS, COSTLY_RANKS // size))
    costly = {int(number) for number in np.linspace(0, len(steps) - 1, few)}
    of_steps = groups or [()] * len(steps)
    tasks = [
        (number, step, number in costly, of_step)
        for number, (step, of_step) in enumerate(zip(steps, of_steps, strict=True))
    ]
    run = partial(_simulate, simulation)
    done: list[Simulated] = []
    if len(steps) * size < WORTH_PROCESSES:
        done.extend(track(map(run, tasks)))
    else:
        tasks.sort(key=lambda task: not task[2])  # costly steps first, so that processes end at about the same time
        workers = min(MOST_PROCESSES, os.cpu_count() or 1, len(tasks))
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                done.extend(track(pool.map(run, tasks)))
        except BrokenProcessPool as error:
            raise ConfigError(
                f"one of {workers} processes that simulate {request.gpus} GPUs was killed, mostly for want of memory; "
                "take fewer --gpus, --micro-steps or --batches"
            ) from error
    for one in done:
        simulation.costs.notes.merge(one.notes)
    return simulation, done


def _simulate(simulation: Simulation, task: tuple[int, Step, bool, Sequence[Groups]]) -> Simulated:
    """Simulates one step in every way; in costly ways only if the task asks for them."""
    number, step, with_costly, groups = task
    simulation = replace(simulation, groups=groups)  # collects notes of this step only
    ways = {}
    for way in simulation.ways():
        if way.costly and not with_costly:
            continue
        seconds, loads = simulation.step_seconds(way, step)
        checkpointed, model = simulation.training.layers_checkpointed, simulation.costs.model
        prefixes = [(load.prefixes, load.head_tokens is None) for load in loads if load.prefixes is not None]
        shared = (  # tokens and pairs that layers do not compute again, and tokens that heads do not
            sum(int(tokens.sum()) for tokens, _ in prefixes),
            sum(model.pairs(tokens) for tokens, _ in prefixes),
            sum(int(tokens.sum()) for tokens, heads_share in prefixes if heads_share),
        )
        ways[way.key] = WayStep(
            seconds,
            sum(load.attention_seconds(checkpointed) for load in loads),
            max(load.bytes_per_layer for load in loads),
            max(load.state_bytes for load in loads),
            max(int(load.tokens.max()) for load in loads),
            max(int(load.of_head.max()) for load in loads),
            sum(load.left_out_pairs for load in loads),
            *shared,
        )
    return Simulated(number, ways, simulation.costs.notes)
