"""Estimates: speed and memory of a training, for a model whose numbers of weights are known.

Speed is that of `distca simulate`: the same steps, the same ways, the same measured times. Bytes come from `memory`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from distca_hf.analysis.epoch import EpochPlans, PackedEpoch
from distca_hf.analysis.memory import (
    GIB,
    USABLE_SHARE,
    Checkpointing,
    Memory,
    Sharding,
    TrainingSetup,
    estimate_memory,
    shardings,
)
from distca_hf.analysis.profiles.shipped import find_profile
from distca_hf.analysis.request import ModelShape, ModelSize, PlanRequest
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.simulate.ways import Simulation
from distca_hf.arrays import IntArray
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.flops import H200, H200_LIGER, PassCosts, Rates, StepCost, StepFlops
from distca_hf.gpus import H200_GIB


CHECKPOINTING = get_args(Checkpointing)
# Shipped times that steps are simulated with.
PROFILE = "h200"
# Most optimizer steps that are simulated: as many as `distca simulate` takes. And most of them times ranks and
# micro-steps: planning takes a quarter of a millisecond per rank.
MOST_STEPS, MOST_RANK_STEPS = 20, 2048


def step_cost(size: ModelSize, heads: Heads, checkpointing: Checkpointing = "saved", rates: Rates = H200) -> StepCost:
    """Returns the cost of a model whose weights are all trained.

    Args:
        size: size of the model; a size without vocabulary is a model without a head.
        heads: heads of one layer.
        checkpointing: whether layers are computed twice without attention ("saved"), with it ("recomputed"), or never
            ("none").
        rates: operations per second of the GPU.
    """
    weights = size.layer_parameters + size.head_parameters
    pair_forward = 2 * (heads.dim + heads.value_dim) * heads.query * size.layers
    return StepFlops.of(weights, weights, pair_forward, size.head_parameters).cost(
        recomputes_layers=checkpointing != "none", recomputes_attention=checkpointing == "recomputed", rates=rates
    )


@dataclass(frozen=True)
class Speed:
    """Simulated steps of the first epoch, as `distca simulate` has them.

    Attributes:
        attention_share: time of attention over time of the steps as planned.
        over_plain: time of plain packing over time as planned.
        over_sorted: the same for packs that are sorted by work within every optimizer step.
        steps: how many were simulated.
    """

    attention_share: float
    over_plain: float
    over_sorted: float
    steps: int


def simulate_speed(
    request: PlanRequest,
    assumptions: "Assumptions",
    document_tokens: IntArray,
    given: Sequence[IntArray] = (),
) -> Speed:
    """Simulates the first optimizer steps of a training, on the shipped times of an H200.

    Args:
        request: ranks, layout, and a model of known size.
        assumptions: how the model is trained.
        document_tokens: `[documents]` lengths of the dataset, none too long.
        given: lengths of each micro-batch of the one step to simulate; those of the first epoch by default.
    """
    ranks, micro_steps = request.num_ranks, request.micro_steps
    simulated = SimulationRequest(
        *(SimulatedModel.of(request.model), ranks, request.tokens_per_rank, None, micro_steps),
        ranks_per_node=request.ranks_per_node,
        checkpointing=assumptions.checkpointing,
        liger=assumptions.liger,
        batches=max(1, min(MOST_STEPS, MOST_RANK_STEPS // (ranks * micro_steps))),
        seed=assumptions.seed,
    )
    steps = [given] if given else simulated.steps(document_tokens)
    simulation = Simulation.of(simulated, find_profile(PROFILE))
    ways = {way.key: way for way in (*simulation.ways(), simulation.tasks_moved)}
    ours = "placed" if request.layout == "placed" else "tasks_moved"
    plain, packs, planned = (
        [simulation.step_seconds(ways[key], step) for step in steps] for key in ("plain", "sorted_packs", ours)
    )
    seconds = [sum(of_step for of_step, _ in way) for way in (plain, packs, planned)]
    attention = sum(
        load.attention_seconds(simulation.training.layers_checkpointed) for _, of in planned for load in of
    )
    return Speed(attention / seconds[2], seconds[0] / seconds[2], seconds[1] / seconds[2], len(steps))


@dataclass(frozen=True)
class Assumptions:
    """How the model is trained, and on which GPUs.

    Attributes:
        checkpointing: whether layers keep all activations ("none"), their inputs ("recomputed"), or inputs and outputs
            of attention ("saved").
        liger: whether Liger's kernels and its fused loss are used.
        gpu_gib: memory of a GPU.
        kv_budget_gib: the setting of this name.
        seed: of the order of documents.

    Raises:
        ConfigError: a value is none of the allowed ones.
    """

    checkpointing: Checkpointing = "saved"
    liger: bool = False
    gpu_gib: float = H200_GIB
    kv_budget_gib: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.checkpointing not in CHECKPOINTING:
            raise ConfigError(f"--checkpointing {self.checkpointing} must be one of {', '.join(CHECKPOINTING)}")
        if not 0 < self.gpu_gib < 10_000:
            raise ConfigError(f"--gpu-gib {self.gpu_gib:g} must be above 0 and below 10000")

    @property
    def room_bytes(self) -> float:
        """Bytes of a GPU that torch may allocate."""
        return USABLE_SHARE * self.gpu_gib * GIB

    def cost(self, model: ModelShape) -> StepCost | None:
        """Returns the cost of tokens and pairs; None if the model's size is not known."""
        if model.size is None:
            return None
        return step_cost(model.size, model.heads, self.checkpointing, H200_LIGER if self.liger else H200)

    def pass_costs(self, model: ModelShape) -> PassCosts | None:
        """Returns the costs of the layers, forward and backward apart; None if the model's size is not known."""
        recomputes = self.checkpointing != "none", self.checkpointing == "recomputed"
        return model.pass_costs(*recomputes, H200_LIGER if self.liger else H200)

    def memory(
        self, model: ModelShape, num_ranks: int, micro_steps: int, received_bytes: int
    ) -> dict[Sharding, Callable[[int], Memory]]:
        """Returns for each way to shard weights a function from tokens per rank to memory.

        Args:
            model: shape and size; without a size nothing is returned.
            num_ranks: ranks that share weights.
            micro_steps: of an optimizer step.
            received_bytes: bytes of keys and values that a rank receives in one layer's forward pass.
        """
        if model.size is None:
            return {}
        size = model.size.decoder(model.heads)

        def of(sharding: Sharding) -> Callable[[int], Memory]:
            """Returns the function of one way to shard weights."""
            trained = num_ranks, sharding, self.checkpointing, self.liger
            setup = TrainingSetup(*trained, kv_budget_bytes=self.kv_budget_gib * GIB, micro_steps=micro_steps)
            return lambda tokens: estimate_memory(size, setup, tokens, received_bytes)

        return {sharding: of(sharding) for sharding in shardings(micro_steps, model.mixer_layers > 0)}


@dataclass(frozen=True)
class Estimates:
    """Speed and memory of a training with these micro-batches.

    Attributes:
        speed: of the first optimizer steps.
        memory: memory of the rank with most tokens, for each way to shard weights.
        room_bytes: bytes of a GPU that torch may allocate.
    """

    speed: Speed
    memory: dict[Sharding, Memory]
    room_bytes: float


def make_estimates(
    request: PlanRequest, packed: PackedEpoch, plans: EpochPlans, assumptions: Assumptions
) -> Estimates | None:
    """Returns estimates for an epoch; None if the model's size is not known."""
    if request.model.size is None:
        return None
    given = () if packed.origin is not None else packed.first_step(request.micro_steps).micro_batches
    world = request.num_ranks, request.micro_steps
    memory = assumptions.memory(request.model, *world, int(plans.received_bytes.max()))
    return Estimates(
        speed=simulate_speed(request, assumptions, packed.document_tokens, given),
        memory={sharding: of(request.tokens_per_rank) for sharding, of in memory.items()},
        room_bytes=assumptions.room_bytes,
    )
