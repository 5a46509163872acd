"""Layers: finds what the layers of a model need from kernels, and how large they are, for estimates of memory.

It says which attention kernels could compute them on a GPU, and why others could not. Like training, it asks
`kernels.registry`. Whether a package is installed, or a kernel fails when it is tried, is known only on the machine
that trains. Numbers of weights are counted in the model itself.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distca_hf.analysis.memory import DecoderSize, LayerSize
from distca_hf.analysis.models import MLP_MATRICES
from distca_hf.gpus import Gpu
from distca_hf.integrations.models.check import KernelNeed
from distca_hf.integrations.models.decoder_layers import DecoderLayerKind, decoder_layers
from distca_hf.integrations.models.planner import share_of, shares_of_experts
from distca_hf.integrations.models.structure import attention_layers, weights_beside_text
from distca_hf.kernels.registry import KERNELS, why_not


@dataclass(frozen=True)
class KernelChoice:
    """Kernels for layers that need the same.

    Attributes:
        able: kernels that can compute them, the fastest first; the first whose package is installed is taken.
        unable: why each other kernel for this kind of device cannot; without those that only their name brings.
    """

    need: KernelNeed
    layers: tuple[str, ...]
    able: tuple[str, ...]
    unable: dict[str, str]

    @property
    def why_not(self) -> str:
        """Why other kernels cannot, as text; equal reasons once."""
        kernels_of_reason: dict[str, list[str]] = {}
        for name, reason in self.unable.items():
            kernels_of_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kernels_of_reason.items())

    @property
    def needs_package(self) -> str:
        """How the kernels are installed, if none of those that can compute comes with torch; else empty."""
        if not self.able or any(KERNELS[name].module is None for name in self.able):
            return ""
        return KERNELS[self.able[0]].install

    def as_json(self) -> dict[str, Any]:
        """Returns the need and the kernels by name."""
        return {
            "layers": list(self.layers),
            "heads": asdict(self.need.heads),
            "window_tokens": self.need.window_tokens or None,
            "softcap": self.need.softcap,
            "able": list(self.able),
            "unable": self.unable,
            "install": self.needs_package,
        }


def kernels_for(needs: dict[KernelNeed, list[str]], gpu: Gpu, weights: torch.dtype) -> list[KernelChoice]:
    """Returns the kernels for each need.

    Args:
        needs: see `integrations.models.check.kernel_needs`.
    """
    choices = []
    for need, layers in needs.items():
        operands = need.operands(gpu.device_type, gpu.compute_capability, weights)
        reasons = {
            name: why_not(name, operands, need.spec)
            for name, entry in KERNELS.items()
            if entry.capabilities.device_type in (None, gpu.device_type)
            and (entry.automatic or gpu.device_type == "cpu")
        }
        able = tuple(name for name, reason in reasons.items() if reason is None)
        unable = {name: reason for name, reason in reasons.items() if reason is not None}
        choices.append(KernelChoice(need, tuple(layers), able, unable))
    return choices


def decoder_size(model: PreTrainedModel, kinds: list[DecoderLayerKind]) -> DecoderSize | None:
    """Counts the weights of a model; None if its layers cannot be told apart, or it has or shows no embedding.

    Weights that several modules share count once, in the first of them.
    """
    names = decoder_layers(model)
    try:
        embedding = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # some encoder-decoders
        return None
    if not names or embedding is None or len(names) != len(kinds):
        return None
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    hidden_size = int(getattr(config, "hidden_size", embedding.shape[-1]))
    shares = shares_of_experts(model)
    attention = attention_layers(model)
    counted: Counter[LayerSize] = Counter()
    for name, kind in zip(names, kinds, strict=True):
        of_attention = sum(_numbers(module) for inside, module in attention.items() if inside.startswith(f"{name}."))
        passed = _passed(name, modules[name], shares) - of_attention
        mlp_size = max(0.0, passed) / (MLP_MATRICES * hidden_size)
        counted[LayerSize(1, _numbers(modules[name]), mlp_size, kind.heads, kind.mask.window_tokens)] += 1
    in_layers = {weight for name in names for weight in modules[name].parameters()}
    elsewhere = in_layers | set(weights_beside_text(model).values())
    head = getattr(model.get_output_embeddings(), "weight", None)
    return DecoderSize(
        hidden_size=hidden_size,
        vocabulary=0 if head is None else int(head.shape[0]),
        parameters=_numbers(model),
        embedding_parameters=sum(weight.numel() for weight in model.parameters() if weight not in elsewhere),
        layers=tuple(
            LayerSize(count, layer.parameters, layer.mlp_size, layer.heads, layer.window_tokens)
            for layer, count in counted.items()
        ),
    )


def _numbers(module: nn.Module) -> int:
    """Returns the numbers of all weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _passed(layer: str, module: nn.Module, shares: Mapping[str, float | None]) -> float:
    """Returns the weights that a token passes in a layer; of experts the ones that it is sent to, or all of them if
    the model does not say how many these are."""
    passed = 0.0
    for name, parameter in module.named_parameters():
        share = share_of(f"{layer}.{name}", shares)
        passed += prod(parameter.shape) * (1.0 if share is None else share)
    return passed
