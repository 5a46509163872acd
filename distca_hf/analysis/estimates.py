"""Estimates: speed and memory of a training, for a model whose numbers of weights are known.

Both are simulated as by `distca simulate`, with the same steps, ways and measured times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from distca_hf.analysis.memory import GIB, USABLE_SHARE, Checkpointing, Memory, Sharding, shardings
from distca_hf.analysis.profiles.shipped import DEFAULT_PROFILE, find_profile
from distca_hf.analysis.request import PlanRequest
from distca_hf.analysis.simulate.costs import Costs
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.result import Result, WayFigures, simulate
from distca_hf.analysis.simulate.simulation import Simulation
from distca_hf.analysis.tiles import Tiles
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import ConfigError
from distca_hf.flops import H200_GIB
from distca_hf.planning.plan import Plan


CHECKPOINTING = get_args(Checkpointing)
# Most optimizer steps that are simulated: as many as `distca simulate` takes. And most of them times ranks and
# micro-steps: planning takes a quarter of a millisecond per rank.
MOST_STEPS, MOST_RANK_STEPS = 20, 2048


def steps_worth_it(size: int) -> int:
    """Returns the optimizer steps that `distca plan` simulates, of so many ranks times micro-steps."""
    return max(1, min(MOST_STEPS, MOST_RANK_STEPS // size))


@dataclass(frozen=True)
class Assumptions:
    """How the model is trained, and on which GPUs.

    Attributes:
        checkpointing: whether layers keep all activations ("none"), their inputs ("recomputed"), or inputs and outputs
            of attention ("saved").
        liger: whether Liger's kernels and its fused loss are used.
        cluster: name or file of the profile that has the measured times.

    Raises:
        ConfigError: a value is none of the allowed ones.
    """

    checkpointing: Checkpointing = "saved"
    liger: bool = False
    gpu_gib: float = H200_GIB
    seed: int = 0
    cluster: str = DEFAULT_PROFILE

    def __post_init__(self) -> None:
        if self.checkpointing not in CHECKPOINTING:
            raise ConfigError(f"--checkpointing {self.checkpointing} must be one of {', '.join(CHECKPOINTING)}")
        if not 0 < self.gpu_gib < 10_000:
            raise ConfigError(f"--gpu-gib {self.gpu_gib:g} must be above 0 and below 10000")

    @property
    def room_bytes(self) -> float:
        """Bytes of a GPU that torch may allocate."""
        return USABLE_SHARE * self.gpu_gib * GIB

    def simulation(self, request: PlanRequest) -> SimulationRequest:
        """Returns what `distca simulate` is asked for the same training, and for as many steps as are worth it."""
        gpus, stages = request.num_gpus, request.num_gpus // request.num_ranks
        micro_steps = ceil_div(request.micro_steps, stages)
        return SimulationRequest(
            *(SimulatedModel.of(request.model), gpus, request.tokens_per_rank, None, micro_steps),
            ranks_per_node=request.ranks_per_node,
            checkpointing=self.checkpointing,
            liger=self.liger,
            gpu_gib=self.gpu_gib,
            batches=steps_worth_it(gpus * micro_steps),
            seed=self.seed,
            pipeline=request.pipeline,
            staged_micro_batches=None if request.pipeline is None else request.micro_steps,
        )


@dataclass(frozen=True)
class Estimates:
    """Speed and memory of a training with these micro-batches, as `distca simulate` has them.

    Attributes:
        simulated: the first optimizer steps, in the way of the request, as plain packing, as sorted packs and in the
            stages of its pipeline; if it was asked for in all ways.
        ours: the way of the request, over the GPUs of all stages.
        costs: seconds of the parts of these steps, from measured times.
        memory: memory of the rank with most tokens, for each way to shard weights.
        room_bytes: bytes of a GPU that torch may allocate.
    """

    simulated: Result
    ours: WayFigures
    costs: Costs
    memory: dict[Sharding, Memory]
    room_bytes: float

    @property
    def over_sorted(self) -> float:
        """Time of packs that are sorted by work within every optimizer step, over time as planned."""
        return self.ours.gain_over(self.simulated.way("sorted_packs"))

    def rank_seconds(self, plan: Plan, checkpointing: Checkpointing) -> dict[str, list[float]]:
        """Returns `[ranks]` seconds of a micro-batch in all layers: of attention, and of all else but the optimizer
        and collectives."""
        attention = np.zeros(plan.layout.num_ranks)
        for mask, layers in self.costs.model.masks:
            tiles = Tiles.of(plan, mask)
            passes = self.costs.seconds(tiles).sum_by(tiles.rank, len(attention))
            attention += layers * (passes.forward * (1 + (checkpointing == "recomputed")) + passes.backward)
        rest = self.costs.rest_seconds(plan.layout.rank_tokens, checkpointing != "none")
        return {"attention": attention.tolist(), "rest": rest.tolist()}

    def as_json(self) -> dict[str, object]:
        """Returns all figures by their names."""
        return {
            "attention_share": self.ours.attention_share,
            "over_plain": self.ours.times_as_fast,
            "over_sorted": self.over_sorted,
            "steps": self.ours.steps,
            "profile": self.costs.profile.summary(),
            "ways": [way.as_json() for way in self.simulated.ways],
            "memory_bytes": {sharding: memory.as_json() for sharding, memory in self.memory.items()},
            "room_bytes": round(self.room_bytes),
        }


def make_estimates(
    request: PlanRequest,
    document_tokens: IntArray,
    assumptions: Assumptions,
    given: Sequence[IntArray] = (),
    compare: bool = False,
) -> Estimates | None:
    """Returns estimates for a training; None if the model's size is not known.

    Args:
        document_tokens: `[documents]` lengths of the dataset, none too long.
        given: lengths of each micro-batch of the one step to simulate; those of the first epoch by default.
    """
    if request.model.size is None:
        return None
    simulated, profile = (
        assumptions.simulation(request).for_documents(document_tokens),
        find_profile(assumptions.cluster),
    )
    ours = "placed" if request.layout == "placed" else "tasks_moved"
    keys = ["plain", "sorted_packs", ours]
    simulation = Simulation.of(simulated, profile)
    keys += [way.key for way in simulation.ways() if (compare or way.in_stages) and way.key not in keys]
    steps = [given] if given else ()
    result, _ = simulate(simulated, profile, document_tokens, keys=tuple(keys), steps=steps)
    way = result.way(ours)
    return Estimates(
        result,
        way,
        simulation.costs,
        memory_by_sharding(simulated, way.most_tokens, way.received_bytes),
        assumptions.room_bytes,
    )


def memory_by_sharding(request: SimulationRequest, tokens: int, received_bytes: int) -> dict[Sharding, Memory]:
    """Returns the memory of a rank with so many tokens, for each way to shard weights.

    Args:
        received_bytes: that a rank receives in one layer's forward pass.
    """
    return {
        sharding: request.memory(request.setup(sharding), tokens, received_bytes)
        for sharding in shardings(request.accumulation, request.model.mixers > 0)
    }
