"""Estimates: speed and memory of a training, for a model whose numbers of weights are known.

Speed follows from the slowest rank of every micro-batch: all other ranks wait for it. Seconds of tokens and attended
pairs come from `flops`.

Memory is the most bytes that torch has allocated on a GPU at once during a training step. The peak is where backward
begins: everything that forward kept is still there. In addition there are the logits of the head, or the activations
and gradients of one layer, whichever is more. Sizes of tensors are those of Transformers' layers in bf16, with or
without Liger's kernels; `docs/benchmarks/2026-11-23-plan.md` compares them with measured peaks. Left out are the
memory of CUDA and NCCL, and memory that torch reserves without using it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from distca_hf.analysis.epoch import EpochPlans, InOrder
from distca_hf.analysis.request import ModelShape, ModelSize
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.flops import H200, H200_LIGER, PassCosts, Rates, StepCost, StepFlops


Sharding = Literal["fsdp2", "zero3"]
Checkpointing = Literal["saved", "recomputed", "none"]
GIB = 2**30
# Bytes of AdamW's state per weight: two fp32 numbers.
ADAM_BYTES = 8
# Bytes of a number in bf16 and in fp32.
HALF_BYTES, SINGLE_BYTES = 2, 4
# Bytes of a token and word of the vocabulary: logits in bf16 and fp32, and gradients of both.
LOGIT_BYTES = 12
# Bytes of a weight in DeepSpeed's own estimate of ZeRO-3 (deepspeed.runtime.zero.stage3), without AdamW's state. The
# first is of a rank's share (weights in 16 and 32 bits, gradients), the second of the largest layer, while gathered.
ZERO3_BYTES, ZERO3_LAYER_BYTES = 10, 4


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Attributes:
        num_ranks: ranks that share weights, gradients and the optimizer's state.
        sharding: FSDP2, or DeepSpeed ZeRO-3.
        checkpointing: layers keep their input and attention's output ("saved"), their input ("recomputed"), or all.
        liger: Liger's kernels and its fused loss, which holds no logits.
        optimizer_bytes: bytes of the optimizer's state per weight.
        kv_budget_bytes: most bytes of received rows that all layers keep (`kv_budget_gib`).
    """

    num_ranks: int
    sharding: Sharding = "fsdp2"
    checkpointing: Checkpointing = "saved"
    liger: bool = False
    optimizer_bytes: int = ADAM_BYTES
    kv_budget_bytes: float = 4 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a training step.

    Attributes:
        state: its share of weights, gradients and the optimizer's state.
        gathered: whole weights and gradients of weights of the layers that are computed at that time.
        kept: activations that all layers keep until backward.
        computed: activations of the head or of one layer while its backward runs, whichever is more.
        received: keys and values of other ranks, and their gradients.
        optimizer_step: its share when the optimizer runs, gradients included, and nothing else.
    """

    state: int
    gathered: int
    kept: int
    computed: int
    received: int
    optimizer_step: int

    @property
    def total(self) -> int:
        """Peak of a step: in backward, or in the optimizer if a rank has few tokens."""
        backward = self.state + self.gathered + self.kept + self.computed + self.received
        return max(backward, self.optimizer_step)


def estimate_memory(
    size: ModelSize, heads: Heads, setup: TrainingSetup, rank_tokens: int, received_bytes: int = 0
) -> Memory:
    """Estimates the peak memory of the rank with most tokens.

    Args:
        size: size of the model; a size without vocabulary is a model without a head.
        heads: heads of one layer.
        setup: how the model is trained.
        rank_tokens: tokens that the rank holds in a micro-step.
        received_bytes: keys and values that it receives in one layer's forward pass.
    """
    # 1. Activations per token.
    layer_kept, layer_computed = _layer_bytes(size, heads, setup)
    logits = 0 if setup.liger else LOGIT_BYTES * size.vocabulary
    if setup.checkpointing == "none":
        kept, layer_computed = size.layers * (layer_kept + layer_computed), 0.0
    else:
        kept = size.layers * layer_kept
    # 2. Received rows: of all layers if they fit the budget, and of the layer that runs.
    stays = received_bytes * size.layers
    layers_received = size.layers if stays <= setup.kv_budget_bytes else 1
    # 3. Weights.
    state = _state_bytes(size, setup)
    gradients = 0 if setup.sharding == "zero3" else SINGLE_BYTES * size.parameters // setup.num_ranks
    return Memory(
        state=state,
        gathered=_gathered_bytes(size, setup),
        kept=round(rank_tokens * kept),
        computed=round(rank_tokens * max(logits, layer_computed)),
        received=received_bytes * (layers_received + 1),
        optimizer_step=state + gradients,
    )


def _state_bytes(size: ModelSize, setup: TrainingSetup) -> int:
    """Returns bytes of a rank's share of weights and of the optimizer's state, for ZeRO-3 also of gradients.

    FSDP2 has no gradients when backward begins, and no activations when it has all gradients. DeepSpeed allocates
    gradients once.
    """
    if setup.sharding == "zero3":
        return size.parameters * (ZERO3_BYTES + setup.optimizer_bytes) // setup.num_ranks
    return size.parameters * (SINGLE_BYTES + setup.optimizer_bytes) // setup.num_ranks


def _gathered_bytes(size: ModelSize, setup: TrainingSetup) -> int:
    """Returns bytes of whole weights: embedding, head with gradient, a layer with gradient, and the next layer."""
    if setup.sharding == "zero3":
        return ZERO3_LAYER_BYTES * max(size.largest_layer_parameters, size.head_parameters)
    root = size.embedding_parameters + size.head_parameters
    return HALF_BYTES * (root + 3 * size.largest_layer_parameters)


def _layer_bytes(size: ModelSize, heads: Heads, setup: TrainingSetup) -> tuple[float, float]:
    """Returns bytes per token that a checkpointed layer keeps until backward, and that it holds in backward."""
    hidden, mlp = size.hidden_size, size.mlp_size(heads)
    queries, keys = heads.query * heads.dim, heads.key_value * (heads.dim + heads.value_dim)
    outputs = heads.query * heads.value_dim
    output_bytes = HALF_BYTES * outputs + SINGLE_BYTES * heads.query  # and the logarithm of each sum
    kept = HALF_BYTES * hidden + (output_bytes if setup.checkpointing == "saved" else 0)
    attention = HALF_BYTES * (queries + keys) + (0 if setup.checkpointing == "saved" else output_bytes)
    if setup.liger:  # two norms' outputs, the sum between them; gate, up, their product; gradients of two of these
        return kept, attention + HALF_BYTES * (3 * hidden + 3 * mlp) + HALF_BYTES * (2 * hidden + mlp)
    norms = 2 * (SINGLE_BYTES + 2 * HALF_BYTES) * hidden  # in fp32, in bf16, times their weights
    return kept, attention + norms + HALF_BYTES * 4 * mlp + HALF_BYTES * (2 * hidden + 2 * mlp)


CHECKPOINTING = get_args(Checkpointing)
# Share of a GPU's memory that torch may allocate; CUDA, NCCL and torch's reserve need the rest.
USABLE_SHARE = 0.9


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
        size = model.size
        if size is None:
            return {}

        def of(sharding: Sharding) -> Callable[[int], Memory]:
            """Returns the function of one way to shard weights."""
            setup = self.setup(num_ranks, sharding)
            return lambda tokens: estimate_memory(size, model.heads, setup, tokens, received_bytes)

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
