"""Memory: the most bytes that torch has allocated on a GPU at once during a training step.

The peak is where backward begins: everything that forward kept is still there. In addition there are the logits of the
head, or the activations and gradients of one layer, whichever is more. Sizes of tensors are those of Transformers'
layers in bf16, with or without Liger's kernels; `docs/benchmarks/2026-11-23-plan.md` compares them with measured
peaks. Left out are the memory of CUDA and NCCL, and memory that torch reserves without using it.
"""

from dataclasses import dataclass
from typing import Literal

from distca_hf.analysis.models import ModelSize
from distca_hf.cost import Heads


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
