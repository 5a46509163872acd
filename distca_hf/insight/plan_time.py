"""Plan time: how long a rank computes in an optimizer step, from the tokens it holds and the pairs it attends.

A step is matrix products, which cost the same for every token, and attention, which costs the same for every attended
pair. Each runs at a rate of its own; rates are those of an H200 with FlashAttention 4 (docs/benchmarks). Ratios of two
steps, which are all that is shown, hold for other GPUs as far as both rates change alike. Left out: exchanges, which
computation hides where links are fast enough, the optimizer, and what a step of few tokens costs the host.
"""

from dataclasses import dataclass
from typing import Literal

from distca_hf.cost import IntArray
from distca_hf.insight.plan_size import ModelSize
from distca_hf.planning.heads import Heads


Checkpointing = Literal["saved", "recomputed", "none"]


@dataclass(frozen=True)
class Rates:
    """Flops per second of one GPU.

    Attributes:
        matrix: of everything beside attention, counted as the flops of its matrix products.
        attention_forward, attention_backward: of the attention kernel.
    """

    matrix: float
    attention_forward: float
    attention_backward: float


# Fitted to steps of whole layers (docs/benchmarks/2026-11-22-four-gpus.md); Liger's kernels shorten norms, rotary
# embeddings and activations.
H200 = Rates(matrix=518e12, attention_forward=650e12, attention_backward=600e12)
H200_LIGER = Rates(matrix=622e12, attention_forward=650e12, attention_backward=600e12)

# Of two products of one forward pass backward makes four, and computes scores once more.
BACKWARD_PRODUCTS_OF_ATTENTION = 2.5


@dataclass(frozen=True)
class StepCost:
    """What one token and one attended pair cost a rank in forward and backward of all layers.

    Attributes:
        token_seconds: of a token that the rank holds, attention left out.
        pair_seconds: of a (query, key) pair that the rank attends, all heads and layers together.
    """

    token_seconds: float
    pair_seconds: float

    @classmethod
    def of(
        cls, size: ModelSize, heads: Heads, checkpointing: Checkpointing = "saved", rates: Rates = H200
    ) -> "StepCost":
        """Adds up a model's flops.

        Args:
            size: of the model; a size without vocabulary is a model without a head.
            heads: of one layer.
            checkpointing: layers are computed twice, attention not ("saved") or as well ("recomputed"), or nothing is
                ("none").
            rates: of the GPU.
        """
        forward_passes = 1 if checkpointing == "none" else 2
        attention_passes = 2 if checkpointing == "recomputed" else 1
        linear_flops = 2 * ((forward_passes + 2) * size.layer_parameters + 3 * size.head_parameters)
        pair_flops = 2 * (heads.dim + heads.value_dim) * heads.query * size.layers
        return cls(
            token_seconds=linear_flops / rates.matrix,
            pair_seconds=pair_flops
            * (attention_passes / rates.attention_forward + BACKWARD_PRODUCTS_OF_ATTENTION / rates.attention_backward),
        )

    def step_seconds(self, rank_tokens: IntArray, rank_pairs: IntArray) -> float:
        """Returns the time of a micro-step, which is that of its slowest rank.

        Args:
            rank_tokens, rank_pairs: `[ranks]` tokens held and pairs attended.
        """
        return float((rank_tokens * self.token_seconds + rank_pairs * self.pair_seconds).max())

    def attention_share(self, tokens: float, pairs: float) -> float:
        """Returns attention's share of the time of a rank with so many tokens and pairs; between 0 and 1."""
        attention = pairs * self.pair_seconds
        return attention / (attention + tokens * self.token_seconds)
