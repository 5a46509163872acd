"""Run: simulates the steps of a request in every way, in some processes.

All steps are simulated in the ways that are quick to plan. The others get some of the steps, spread evenly, and are
compared with plain packing on these.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.profiles.curves import Notes
from distca_hf.analysis.simulate.compared import Step
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.simulation import Simulation
from distca_hf.errors import ConfigError


# Steps x GPUs x micro-steps from which on several processes are worth their start.
WORTH_PROCESSES = 4096
# Most steps that costly ways are simulated on, and GPUs x micro-steps of these: planning takes a millisecond per GPU.
MOST_COSTLY_STEPS, COSTLY_RANKS = 25, 8192
MOST_PROCESSES = 8
# Share of attended pairs up to which nothing counts as left out: fillers of packs that are cut are short.
NEARLY_NOTHING = 0.005


class _WayStep(NamedTuple):
    """One step of one way: seconds, and what `WaySteps` has of all its steps."""

    seconds: float
    attention_seconds: float
    received_bytes: float
    most_tokens: int
    most_head_tokens: int
    left_out_pairs: float


@dataclass(frozen=True)
class WaySteps:
    """Steps of one way.

    Attributes:
        seconds: `[steps]`, not a number where it was not simulated.
        attention_share: part of these seconds that ranks spend in attention, in the mean.
        received_bytes: most bytes that a rank sends or receives in a layer's forward pass.
        most_tokens, most_head_tokens: most tokens that layers, and that a head, of a rank compute.
        left_out_share: part of the attended pairs that is left out where documents are cut, of all simulated steps.
        whole: whether that is next to nothing in every step.
    """

    seconds: np.ndarray
    attention_share: float
    received_bytes: float
    most_tokens: int
    most_head_tokens: int
    left_out_share: float
    whole: bool


@dataclass(frozen=True)
class _Done:
    """One step in every way that was simulated on it, and notes."""

    number: int
    ways: dict[str, _WayStep]
    notes: Notes


# Yields the steps that it gets, and shows progress.
Track = Callable[[Iterable[_Done]], Iterable[_Done]]


@dataclass(frozen=True)
class _Task:
    """Work of a process: some steps of a request."""

    request: SimulationRequest
    profile: ClusterProfile
    number: int
    step: Step
    costly: bool
    keys: tuple[str, ...]


def run_steps(
    request: SimulationRequest,
    profile: ClusterProfile,
    steps: Sequence[Step],
    track: Track = iter,
    keys: tuple[str, ...] = (),
) -> tuple[Simulation, dict[str, WaySteps]]:
    """Simulates steps in every way, or in those of some keys.

    Returns:
        The simulation, whose notes are complete, and the steps of each way by its key.

    Raises:
        ConfigError: links that are needed were not measured, or a process was killed.
    """
    simulation = Simulation.of(request, profile, keys)
    size = request.num_ranks * request.accumulation
    few = max(1, min(len(steps), MOST_COSTLY_STEPS, COSTLY_RANKS // size))
    costly = {int(number) for number in np.linspace(0, len(steps) - 1, few)}
    tasks = [_Task(request, profile, number, step, number in costly, keys) for number, step in enumerate(steps)]
    done: list[_Done] = []
    if len(steps) * size < WORTH_PROCESSES:
        done.extend(track(map(_simulate, tasks)))
    else:
        # Costly steps first, so that processes end at about the same time.
        tasks.sort(key=lambda task: not task.costly)
        workers = min(MOST_PROCESSES, os.cpu_count() or 1, len(tasks))
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                done.extend(track(pool.map(_simulate, tasks)))
        except BrokenProcessPool as error:
            raise ConfigError(
                f"one of {workers} processes that simulate {request.gpus} GPUs was killed, mostly for want of memory; "
                "take fewer --gpus, --micro-steps or --batches"
            ) from error
    return simulation, _gathered(simulation, done, steps)


def _simulate(task: _Task) -> _Done:
    """Simulates one step in every way that is not too costly for it."""
    simulation = Simulation.of(task.request, task.profile, task.keys)
    ways = {}
    for way in simulation.ways():
        if way.costly and not task.costly:
            continue
        seconds, loads = simulation.step_seconds(way, task.step)
        checkpointed = simulation.training.layers_checkpointed
        ways[way.key] = _WayStep(
            seconds,
            sum(load.attention_seconds(checkpointed) for load in loads),
            max(load.bytes_per_layer for load in loads),
            max(int(load.tokens.max()) for load in loads),
            max(int(load.of_head.max()) for load in loads),
            sum(load.left_out_pairs for load in loads),
        )
    return _Done(task.number, ways, simulation.costs.notes)


def _gathered(simulation: Simulation, done: Sequence[_Done], steps: Sequence[Step]) -> dict[str, WaySteps]:
    """Returns steps by way, and adds the notes of all processes to those of the simulation."""
    for one in done:
        simulation.costs.notes.merge(one.notes)
    ways, pairs = {}, [simulation.request.pairs(step) for step in steps]
    for way in simulation.ways():
        seconds = np.full(len(steps), math.nan)
        numbers = [one.number for one in done if way.key in one.ways]
        of_steps = [one.ways[way.key] for one in done if way.key in one.ways]
        seconds[numbers] = [one.seconds for one in of_steps]
        left_out, of_all = np.array([one.left_out_pairs for one in of_steps]), np.array(pairs)[numbers]
        ways[way.key] = WaySteps(
            seconds,
            sum(one.attention_seconds for one in of_steps) / sum(one.seconds for one in of_steps),
            max(one.received_bytes for one in of_steps),
            max(one.most_tokens for one in of_steps),
            max(one.most_head_tokens for one in of_steps),
            float(left_out.sum() / of_all.sum()),
            whole=bool((left_out <= NEARLY_NOTHING * of_all).all()),
        )
    return ways
