"""Floating-point operations of a training step: of matrices per token, of core attention per attended pair.

From them come utilisation, the share of attention in a step, and how much longer a step takes where work is unequal.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


# Kernels compute scores once more in backward: five matrix products for two in forward.
ATTENTION_BACKWARD = 2.5
# Dense bf16 operations per second by data sheet, and the names of devices as torch has them.
PEAK_FLOPS = {
    r"\bB200\b": 2250e12,
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

    def done(self, *, recomputes_layers: bool, recomputes_attention: bool) -> "DoneFlops":
        """Returns operations that a GPU does, under activation checkpointing too."""
        return DoneFlops(
            per_token=self.token_forward + self.token_backward + recomputes_layers * self.layers_forward,
            per_pair=(1 + recomputes_attention + ATTENTION_BACKWARD) * self.pair_forward,
        )


@dataclass(frozen=True)
class DoneFlops:
    """Operations of a step, forward and backward, with all that is computed again. Those of matrices and of attention
    are taken to be equally fast, and exchanges to be hidden."""

    per_token: float
    per_pair: float

    def attention_share(self, tokens: float, pairs: float) -> float:
        """Returns core attention's part of a step whose ranks have equal work."""
        attention = self.per_pair * pairs
        return attention / (attention + self.per_token * tokens)

    def speed_up(
        self,
        tokens: NDArray[np.int64],
        pairs: NDArray[np.int64],
        imbalance_before: NDArray[np.float64],
        imbalance: NDArray[np.float64],
    ) -> float:
        """Returns how many times faster micro-batches get. In each all ranks wait for the busiest one, as they do in
        every layer under FSDP and ZeRO-3.

        Args:
            tokens, pairs: `[micro-batches]` of all ranks together.
            imbalance_before, imbalance: `[micro-batches]` max/mean attended pairs over ranks, before and after.
        """
        matrices, attention = self.per_token * tokens.sum(), self.per_pair * pairs
        before, after = (attention @ imbalance_before, attention @ imbalance)
        return float((matrices + before) / (matrices + after))
