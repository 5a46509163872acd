"""Estimates: speed and memory of a training, for a model whose numbers of weights are known.

Speed follows from the slowest rank of every micro-batch: all other ranks wait for it. Seconds of tokens and attended
pairs come from `flops`, bytes from `memory`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from distca_hf.analysis.epoch import EpochPlans, InOrder
from distca_hf.analysis.memory import (
    GIB,
    USABLE_SHARE,
    Checkpointing,
    Memory,
    Sharding,
    TrainingSetup,
    estimate_memory,
)
from distca_hf.analysis.request import ModelShape, ModelSize
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.flops import H200, H200_LIGER, PassCosts, Rates, StepCost, StepFlops


CHECKPOINTING = get_args(Checkpointing)


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
    """Estimated ratios of step times, over an epoch.

    Attributes:
        attention_share: time of attention over time of the step, if all ranks have the same work.
        over_plain: time of documents in order over time as planned.
        over_sorted: the same for packs that are sorted by work within every optimizer step.
    """

    attention_share: float
    over_plain: float
    over_sorted: float


def estimate_speed(plans: EpochPlans, cost: StepCost) -> Speed:
    """Estimates ratios of step times from the slowest rank of every micro-batch.

    In a micro-batch that was not planned, the slowest rank has the mean work times the mean imbalance of planned ones.

    Args:
        plans: plans of an epoch.
        cost: seconds of a token and of a pair, for the model.
    """
    plain = _seconds(plans.in_order, plans.in_order.work.max(axis=1), cost)
    as_planned = _seconds(plans.in_order, plans.in_order.work.mean(axis=1) * plans.imbalance.mean(), cost)
    # Sorted packs are compared with the plans of the same micro-batches.
    planned_in_order = InOrder(plans.in_order.tokens[plans.planned], plans.in_order.work[plans.planned])
    sorted_packs = plans.sorted_tokens * cost.token_seconds + plans.sorted_work * cost.pair_seconds
    return Speed(
        attention_share=attention_share(plans.in_order, cost),
        over_plain=plain / as_planned,
        over_sorted=float(sorted_packs.max(axis=1).sum()) / _seconds(planned_in_order, plans.work.max(axis=1), cost),
    )


def attention_share(in_order: InOrder, cost: StepCost) -> float:
    """Returns time of attention over time of steps in which all ranks have the same work."""
    return cost.attention_share(
        float(in_order.rank_tokens(slice(None)).sum()), float(in_order.work.mean(axis=1).sum())
    )


def speed_over_plain(in_order: InOrder, cost: StepCost) -> float:
    """Returns time of documents in order over time of perfectly equal work."""
    plain = _seconds(in_order, in_order.work.max(axis=1), cost)
    return plain / _seconds(in_order, in_order.work.mean(axis=1), cost)


def _seconds(in_order: InOrder, busiest_pairs: np.ndarray, cost: StepCost) -> float:
    """Returns seconds of all micro-batches with equal tokens, from `[micro_batches]` pairs of the busiest rank."""
    tokens = in_order.rank_tokens(slice(None))
    return float((tokens * cost.token_seconds + busiest_pairs * cost.pair_seconds).sum())


@dataclass(frozen=True)
class Assumptions:
    """How the model is trained, and on which GPUs.

    Attributes:
        checkpointing: whether layers keep all activations ("none"), their inputs ("recomputed"), or inputs and outputs
            of attention ("saved").
        liger: whether Liger's kernels and its fused loss are used.
        gpu_gib: memory of a GPU.
        kv_budget_gib: the setting of this name.

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
        """Bytes of a GPU that torch may allocate."""
        return USABLE_SHARE * self.gpu_gib * GIB

    def setup(self, num_ranks: int, sharding: Sharding) -> TrainingSetup:
        """Returns how the model is trained on `num_ranks` ranks."""
        return TrainingSetup(
            num_ranks, sharding, self.checkpointing, self.liger, kv_budget_bytes=self.kv_budget_gib * GIB
        )

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
        self, model: ModelShape, num_ranks: int, received_bytes: int
    ) -> dict[Sharding, Callable[[int], Memory]]:
        """Returns for each way to shard weights a function from tokens per rank to memory.

        Args:
            model: shape and size; without a size nothing is returned.
            num_ranks: ranks that share weights.
            received_bytes: bytes of keys and values that a rank receives in one layer's forward pass.
        """
        if model.size is None:
            return {}
        size = model.size.decoder(model.heads)

        def of(sharding: Sharding) -> Callable[[int], Memory]:
            """Returns the function of one way to shard weights."""
            setup = self.setup(num_ranks, sharding)
            return lambda tokens: estimate_memory(size, setup, tokens, received_bytes)

        return {sharding: of(sharding) for sharding in get_args(Sharding)}


@dataclass(frozen=True)
class Estimates:
    """Speed and memory of a training with these micro-batches.

    Attributes:
        speed: speed over an epoch.
        memory: memory of the rank with most tokens, for each way to shard weights.
        room_bytes: bytes of a GPU that torch may allocate.
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
