"""Floating-point operations of a training step, and the time they take: of matrices per token, of core attention per
attended pair.

From them come utilisation, the share of attention in a step, and how much longer a step takes where work is unequal.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray


# Dense bf16 operations per second by data sheet, and the names of devices as torch has them.
PEAK_FLOPS = {
    r"\bB200\b": 2250e12,
    r"\bH200 NVL\b": 835e12,
    r"\bH200\b": 989e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bH100\b": 989e12,
    r"\bA100\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bL4\b": 121e12,
}


def peak_flops(device_name: str) -> float | None:
    """Returns dense bf16 operations per second of a GPU; None if they are not known (also of a part of one)."""
    known = (flops for name, flops in PEAK_FLOPS.items() if re.search(name, device_name) and "MIG" not in device_name)
    return next(known, None)


@dataclass(frozen=True)
class Rates:
    """Operations per second of one GPU.

    Attributes:
        matrix: of everything beside attention, counted as the operations of its matrix products.
        attention_forward, attention_backward: of the attention kernel.
    """

    matrix: float
    attention_forward: float
    attention_backward: float


# Fitted to steps of whole layers (docs/benchmarks/2026-11-23-plan.md); Liger's kernels shorten norms, rotary
# embeddings and activations. Ratios of two steps hold for other GPUs as far as all rates change alike.
H200 = Rates(matrix=518e12, attention_forward=650e12, attention_backward=600e12)
H200_LIGER = Rates(matrix=622e12, attention_forward=650e12, attention_backward=600e12)
# Of two products of one forward pass backward makes four, and computes scores once more.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class StepCost:
    """What one token and one attended pair cost a rank in forward and backward of all layers. Left out: exchanges,
    which computation hides where links are fast enough, the optimizer, and what a step of few tokens costs the host.

    Attributes:
        token_seconds: of a token that the rank holds, attention left out.
        pair_seconds: of a (query, key) pair that the rank attends, all heads and layers together.
    """

    token_seconds: float
    pair_seconds: float

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

    def speed_up(
        self,
        tokens: IntArray,
        pairs: IntArray,
        imbalance_before: NDArray[np.float64],
        imbalance: NDArray[np.float64],
    ) -> float:
        """Returns how many times faster micro-batches get. In each all ranks wait for the busiest one, as they do in
        every layer under FSDP and ZeRO-3.

        Args:
            tokens, pairs: `[micro-batches]` of all ranks together.
            imbalance_before, imbalance: `[micro-batches]` max/mean attended pairs over ranks, before and after.
        """
        matrices, attention = self.token_seconds * tokens.sum(), self.pair_seconds * pairs
        return float((matrices + attention @ imbalance_before) / (matrices + attention @ imbalance))


@dataclass(frozen=True)
class StepFlops:
    """Operations of a model's forward and backward pass, all layers together.

    Attributes:
        token_forward, token_backward: of all matrices, for one token; of a mixture, the experts that a token takes.
        head_forward: of these, of the last matrix, which checkpointing does not recompute.
        pair_forward: of core attention, for one attended pair.
    """

    token_forward: float
    token_backward: float
    pair_forward: float
    head_forward: float = 0.0

    @classmethod
    def of(cls, weights: int, trained_weights: int, pair_forward: float, head_weights: int = 0) -> "StepFlops":
        """Counts those of a model with so many weights in matrices: a product each for the output and for the gradient
        of the input, and one for the gradient of every trained weight."""
        return cls(2.0 * weights, 2.0 * (weights + trained_weights), pair_forward, 2.0 * head_weights)

    @property
    def layers_forward(self) -> float:
        """Operations of all matrices but the last one, for one token."""
        return self.token_forward - self.head_forward

    def useful(self, tokens: float, pairs: float) -> float:
        """Returns operations that count for utilisation: nothing twice, neither recomputed layers nor scores."""
        return (self.token_forward + self.token_backward) * tokens + 3 * self.pair_forward * pairs

    def cost(self, *, recomputes_layers: bool, recomputes_attention: bool, rates: Rates = H200) -> StepCost:
        """Returns what a token and a pair cost under activation checkpointing.

        Args:
            recomputes_layers, recomputes_attention: whether these run forward once more in backward.
            rates: of the GPU.
        """
        token_flops = self.token_forward + self.token_backward + recomputes_layers * self.layers_forward
        pair_seconds = (
            1 + recomputes_attention
        ) / rates.attention_forward + ATTENTION_BACKWARD / rates.attention_backward
        return StepCost(token_flops / rates.matrix, self.pair_forward * pair_seconds)
