"""Training setup: how a model is trained, as far as the memory of a rank depends on it."""

from dataclasses import dataclass
from typing import Literal

from distca_hf.errors import ConfigError


# "fsdp2_synced": FSDP2 with `sync_each_batch` of Accelerate's GradientAccumulationPlugin.
Sharding = Literal["fsdp2", "fsdp2_synced", "zero3"]
Checkpointing = Literal["saved", "offloaded", "recomputed", "none"]
GIB = 2**30
ADAM_BYTES = 8  # of AdamW's state per weight: two fp32 numbers


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Attributes:
        num_ranks: ranks that share weights, gradients and the optimizer's state.
        checkpointing: layers keep their input and attention's output ("saved"), the same on the host ("offloaded"),
            their input ("recomputed"), or all ("none").
        liger: Liger's kernels and its fused loss, which holds no logits.
        optimizer_bytes: bytes of the optimizer's state per weight.
        kv_budget_bytes: most bytes of received rows that all layers keep (`kv_budget_gib`).
        tensor_ranks: number of these ranks that divide every layer, and hold the same tokens.
        micro_steps: micro-steps of an optimizer step, as Trainer accumulates them.
        mlp_tokens, attention_kv_heads: tokens on which MLPs, and KV heads on which attention runs at a time; 0: all.
        state_on_host: whether weights, gradients and the optimizer's state are on the host; only with FSDP2.
    """

    num_ranks: int
    sharding: Sharding = "fsdp2"
    checkpointing: Checkpointing = "saved"
    liger: bool = False
    optimizer_bytes: int = ADAM_BYTES
    kv_budget_bytes: float = 4 * GIB
    tensor_ranks: int = 1
    micro_steps: int = 1
    mlp_tokens: int = 0
    attention_kv_heads: int = 0
    state_on_host: bool = False

    def __post_init__(self) -> None:
        if self.state_on_host and self.sharding == "zero3":
            raise ConfigError("memory of ZeRO-3 with weights and optimizer on the host is not estimated; take FSDP2")

    @property
    def saves_attention(self) -> bool:
        """Whether attention's outputs wait for backward, on the GPU or on the host."""
        return self.checkpointing in ("saved", "offloaded")

    def mlp_share(self, rank_tokens: int) -> float:
        """Returns the share of a rank's tokens on which MLPs run at a time."""
        return min(1.0, self.mlp_tokens / max(1, rank_tokens)) if self.mlp_tokens else 1.0
