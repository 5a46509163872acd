"""Flops: floating-point operations and time of a training step; and GPUs by name, with memory and peak rates.

Matrices are counted per token, core attention per attended pair. Utilisation, the share of attention in a step, and
the time spent waiting for unequal work follow from these. All facts about GPUs come from here.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Rates:
    """Operations per second of one GPU."""

    # Rate of all layers except core attention: operations of their matrix products over all of their time.
    matrix: float
    attention_forward: float
    attention_backward: float


# Rates of an H200, fitted to measured steps of whole layers (docs/benchmarks/planning.md). Ratios of two steps
# hold for other GPUs if all rates change by the same factor.
H200 = Rates(matrix=518e12, attention_forward=650e12, attention_backward=600e12)
# Operations of attention's backward over its forward pass: four matrix products and the scores again, for two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class StepCost:
    """Seconds of one token and of one attended pair on a rank, forward and backward of all layers.

    Leaves out exchanges (computation hides them on a fast network), the optimizer, and time of the host in steps of
    few tokens.
    """

    token_seconds: float  # time of a token that the rank holds, without attention
    pair_seconds: float  # time of a (query, key) pair that the rank computes, in all heads and layers

    def attention_share(self, tokens: float, pairs: float) -> float:
        """Returns attention's share of the time of a rank, between 0 and 1, from its tokens and pairs."""
        attention = pairs * self.pair_seconds
        return attention / (attention + tokens * self.token_seconds)

    def speed_up(
        self,
        tokens: IntArray,
        pairs: NDArray[np.float64],
        imbalance_before: NDArray[np.float64],
        imbalance: NDArray[np.float64],
        token_imbalance_before: float = 1.0,
        token_imbalance: float = 1.0,
    ) -> float:
        """Returns the time of micro-batches before over their time after.

        In each of them all ranks wait for the busiest one, as in every layer under FSDP and ZeRO-3.

        Args:
            tokens, pairs: `[micro-batches]` tokens and attended pairs of all ranks together.
            imbalance_before, imbalance: `[micro-batches]` max/mean attended pairs over ranks, before and after.
            token_imbalance_before, token_imbalance: max/mean tokens over ranks, before and after.
        """
        matrices, attention = self.token_seconds * tokens.sum(), self.pair_seconds * pairs
        before = matrices * token_imbalance_before + attention @ imbalance_before
        return float(before / (matrices * token_imbalance + attention @ imbalance))


@dataclass(frozen=True)
class PassCosts:
    """Costs of the layers of a model, without its head: of their forward pass, and of their backward pass including
    recomputation."""

    forward: StepCost
    backward: StepCost

    @property
    def both(self) -> StepCost:
        """Costs of both passes together."""
        one, other = self.forward, self.backward
        return StepCost(one.token_seconds + other.token_seconds, one.pair_seconds + other.pair_seconds)


@dataclass(frozen=True)
class StepFlops:
    """Operations of a model's forward and backward pass, in all layers."""

    # Operations of all matrices for one token; in a mixture, only of the experts that a token is sent to.
    token_forward: float
    token_backward: float
    pair_forward: float  # operations of core attention for one attended pair
    head_forward: float = 0.0  # the last matrix's part of `token_forward`, which checkpointing does not recompute

    @classmethod
    def of(cls, weights: int, trained_weights: int, pair_forward: float, head_weights: int = 0) -> "StepFlops":
        """Counts the operations of a model from its numbers of weights in matrices.

        Every weight has a product for the output and one for the gradient of the input. A trained weight has a third
        one for its own gradient.
        """
        return cls(2.0 * weights, 2.0 * (weights + trained_weights), pair_forward, 2.0 * head_weights)

    @property
    def layers_forward(self) -> float:
        """Operations of all matrices except the last one, for one token."""
        return self.token_forward - self.head_forward

    def useful(self, tokens: float, pairs: float) -> float:
        """Returns the operations that count for utilisation, without recomputed layers and scores."""
        return (self.token_forward + self.token_backward) * tokens + 3 * self.pair_forward * pairs

    def work(self, layer_tokens: IntArray, pairs: NDArray[np.float64], head_tokens: IntArray) -> NDArray[np.float64]:
        """Returns `[ranks]` operations of a step that count for utilisation: layers, attention, head and loss.

        Args:
            layer_tokens, pairs: `[ranks]` tokens that layers compute, and attended pairs, mean over layers.
            head_tokens: `[ranks]` tokens that the head computes.
        """
        matrices = self.layers_forward * layer_tokens + self.head_forward * head_tokens
        return (1 + self.token_backward / max(1.0, self.token_forward)) * matrices + 3 * self.pair_forward * pairs

    def cost(self, *, recomputes_layers: bool, recomputes_attention: bool, rates: Rates = H200) -> StepCost:
        """Returns the seconds of a token and of a pair under activation checkpointing. Layers and attention may run
        forward again in backward (`recomputes_layers`, `recomputes_attention`)."""
        token_flops = self.token_forward + self.token_backward + recomputes_layers * self.layers_forward
        pair_seconds = (
            1 + recomputes_attention
        ) / rates.attention_forward + ATTENTION_BACKWARD / rates.attention_backward
        return StepCost(token_flops / rates.matrix, self.pair_forward * pair_seconds)

    def pass_costs(self, *, recomputes_layers: bool, recomputes_attention: bool, rates: Rates = H200) -> PassCosts:
        """Returns the seconds of a token and of a pair in the layers, separately for forward and backward. Arguments:
        see `cost`."""
        head_backward = self.head_forward * self.token_backward / self.token_forward
        backward_flops = self.token_backward - head_backward + recomputes_layers * self.layers_forward
        backward_seconds = (
            ATTENTION_BACKWARD / rates.attention_backward + recomputes_attention / rates.attention_forward
        )
        return PassCosts(
            forward=StepCost(self.layers_forward / rates.matrix, self.pair_forward / rates.attention_forward),
            backward=StepCost(backward_flops / rates.matrix, self.pair_forward * backward_seconds),
        )


# Costs of an 8B Llama with checkpointed layers, used if the model is unknown: 218,103,808 weights in each of 32
# layers, with 32 heads of 128 dimensions.
LLAMA_8B_COSTS = StepFlops.of(32 * 218_103_808, 32 * 218_103_808, 2 * (128 + 128) * 32 * 32).pass_costs(
    recomputes_layers=True, recomputes_attention=False
)


def costs_to_place(flops: StepFlops | None) -> PassCosts:
    """Returns the costs by which placement weighs tokens against pairs: of checkpointed layers that keep attention.
    They are the same on all ranks, whatever each of them checkpoints."""
    if flops is None or not flops.pair_forward:
        return LLAMA_8B_COSTS
    return flops.pass_costs(recomputes_layers=True, recomputes_attention=False)


@dataclass(frozen=True)
class Gpu:
    """A device that a model is checked for, or steps are simulated on."""

    name: str
    device_type: str  # "cuda" or "cpu"
    compute_capability: int | None  # generation (major version); None for a CPU
    gib: float | None  # memory in GiB; None for a CPU
    peak_flops: float | None = None  # dense bf16 operations per second by data sheet; None if it is not in the table


# Memory that nvidia-smi shows; 143,771 MiB of an H200.
H200_GIB, H100_GIB, A100_GIB = 140.4, 79.6, 79.3
# Compute capability (major version), GiB of memory (of other GPUs from the data sheet), and peak rate.
GPUS = {
    name: Gpu(name, "cuda", capability, gib, peak)
    for name, capability, gib, peak in (
        ("b200", 10, 180.0, 2250e12),
        ("gb200", 10, 186.0, None),
        ("b300", 10, 270.0, None),
        ("h200", 9, H200_GIB, 989e12),
        ("h200-nvl", 9, H200_GIB, 835e12),
        ("gh200", 9, 96.0, None),
        ("h100", 9, H100_GIB, 989e12),
        ("h100-pcie", 9, H100_GIB, 756e12),
        ("h100-nvl", 9, 94.0, 835e12),
        ("h800", 9, 80.0, None),
        ("h20", 9, 96.0, None),
        ("a100", 8, A100_GIB, 312e12),
        ("a100-40gb", 8, 40.0, 312e12),
        ("a800", 8, 80.0, None),
        ("a10", 8, 24.0, None),
        ("a40", 8, 48.0, None),
        ("a6000", 8, 48.0, None),
        ("l40s", 8, 48.0, 362e12),
        ("l4", 8, 24.0, 121e12),
        ("rtx3090", 8, 24.0, None),
        ("rtx4090", 8, 24.0, None),
        ("rtx5090", 12, 32.0, None),
        ("rtx-pro-6000", 12, 96.0, None),
        ("v100", 7, 32.0, None),
        ("t4", 7, 16.0, None),
    )
} | {"cpu": Gpu("cpu", "cpu", None, None)}


def find_gpu(name: str) -> Gpu:
    """Returns the GPU of a name. Raises ConfigError if it is unknown; names the nearest one."""
    known = GPUS.get(name.lower())
    if known is None:
        raise ConfigError(f"--gpu {name} is not one of {', '.join(GPUS)}.{did_you_mean(name.lower(), GPUS)}")
    return known


def gpu_of_device(device: str) -> Gpu | None:
    """Returns the GPU by torch's name of the device, such as "NVIDIA H100 80GB HBM3". None if it is unknown, or a part
    of a GPU (MIG), which has neither its memory nor its rate."""
    if "MIG" in device:
        return None
    known = []
    for name, gpu in GPUS.items():
        words = [word for word in name.replace("rtx", "rtx-").split("-") if word]
        pattern = r"\b" + r"\b.*\b".join(words) + r"\b"  # all words, with anything between them
        if re.search(pattern, device, re.IGNORECASE):
            known.append(gpu)
    return max(known, key=lambda gpu: len(gpu.name), default=None)


def peak_flops(device: str) -> float | None:
    """Returns dense bf16 operations per second of a device; None in the same cases as `gpu_of_device`."""
    gpu = gpu_of_device(device)
    return None if gpu is None else gpu.peak_flops
