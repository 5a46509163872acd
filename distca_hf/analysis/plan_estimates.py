"""Plan estimates: how fast, and how much memory, for a model whose size is known."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from distca_hf.analysis.models import ModelShape
from distca_hf.analysis.plan_epoch import EpochPlans
from distca_hf.analysis.plan_memory import Memory, Sharding, TrainingSetup, estimate_memory
from distca_hf.analysis.plan_speed import Speed, estimate_speed
from distca_hf.analysis.plan_time import Checkpointing, step_cost
from distca_hf.errors import ConfigError
from distca_hf.flops import H200, H200_LIGER, StepCost


CHECKPOINTING = get_args(Checkpointing)
# What torch has not given out, CUDA and NCCL need the rest of a GPU's memory.
USABLE_SHARE = 0.9
GIB = 2**30


@dataclass(frozen=True)
class Assumptions:
    """How the model is trained, and on what.

    Attributes:
        checkpointing: whether layers keep what they compute, their inputs, or these and attention's outputs.
        liger: Liger's kernels and its fused loss.
        gpu_gib: memory of a GPU.
        kv_budget_gib: as the setting.

    Raises:
        ConfigError: a value is none of the allowed ones.
    """

    checkpointing: Checkpointing = "saved"
    liger: bool = False
    gpu_gib: float = 80.0
    kv_budget_gib: float = 4.0

    def __post_init__(self) -> None:
        if self.checkpointing not in CHECKPOINTING:
            raise ConfigError(f"--checkpointing {self.checkpointing} must be one of {', '.join(CHECKPOINTING)}")
        if not 0 < self.gpu_gib < 10_000:
            raise ConfigError(f"--gpu-gib {self.gpu_gib:g} must be above 0 and below 10000")

    @property
    def room_bytes(self) -> float:
        """Bytes of a GPU that a training step may be given."""
        return USABLE_SHARE * self.gpu_gib * GIB

    def setup(self, num_ranks: int, sharding: Sharding) -> TrainingSetup:
        """Returns the way of training on so many ranks."""
        return TrainingSetup(
            num_ranks, sharding, self.checkpointing, self.liger, kv_budget_bytes=self.kv_budget_gib * GIB
        )

    def cost(self, model: ModelShape) -> StepCost | None:
        """Returns what tokens and pairs cost; None if the model's size is not known."""
        if model.size is None:
            return None
        return step_cost(model.size, model.heads, self.checkpointing, H200_LIGER if self.liger else H200)

    def memory(
        self, model: ModelShape, num_ranks: int, received_bytes: int
    ) -> dict[Sharding, Callable[[int], Memory]]:
        """Returns the memory of a rank with so many tokens, for each way to share weights; nothing if the model's size
        is not known.

        Args:
            model: shape and size.
            num_ranks: ranks that share weights.
            received_bytes: keys and values that a rank receives in one layer's forward pass.
        """
        size = model.size
        if size is None:
            return {}

        def of(sharding: Sharding) -> Callable[[int], Memory]:
            setup = self.setup(num_ranks, sharding)
            return lambda tokens: estimate_memory(size, model.heads, setup, tokens, received_bytes)

        return {sharding: of(sharding) for sharding in get_args(Sharding)}


@dataclass(frozen=True)
class Estimates:
    """What a training with these micro-batches would be like.

    Attributes:
        speed: over an epoch.
        memory: of the rank with most tokens, for each way to share weights.
        room_bytes: bytes of a GPU that a training step may be given.
    """

    speed: Speed
    memory: dict[Sharding, Memory]
    room_bytes: float


def make_estimates(
    model: ModelShape, plans: EpochPlans, assumptions: Assumptions, tokens_per_rank: int
) -> Estimates | None:
    """Returns estimates for an epoch; None if the model's size is not known."""
    cost = assumptions.cost(model)
    if cost is None:
        return None
    num_ranks = plans.work.shape[1]
    memory = assumptions.memory(model, num_ranks, int(plans.received_bytes.max()))
    return Estimates(
        speed=estimate_speed(plans, cost),
        memory={sharding: of(tokens_per_rank) for sharding, of in memory.items()},
        room_bytes=assumptions.room_bytes,
    )
