"""Sizes: numbers of weights of a model's layers, counted in the model itself, for estimates of memory."""

from collections import Counter
from math import prod

from torch import nn
from transformers import PreTrainedModel

from distca_hf.analysis.memory import DecoderSize, LayerSize
from distca_hf.analysis.request import MLP_MATRICES
from distca_hf.integrations.models.layer_kinds import LayerKind, decoder_layers
from distca_hf.integrations.models.operations import share_of_experts
from distca_hf.integrations.models.parts import attention_layers


def decoder_size(model: PreTrainedModel, kinds: list[LayerKind]) -> DecoderSize | None:
    """Counts the weights of a model; None if its layers cannot be told apart, or it has no embedding.

    Weights that several modules share count once, in the first of them.

    Args:
        model: on any device, also torch's meta device.
        kinds: of its decoder layers, in order.
    """
    names = decoder_layers(model)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    if not names or embedding is None or len(names) != len(kinds):
        return None
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    hidden_size = int(getattr(config, "hidden_size", embedding.shape[-1]))
    share = share_of_experts(config)
    attention = attention_layers(model)
    counted: Counter[LayerSize] = Counter()
    for name, kind in zip(names, kinds, strict=True):
        of_attention = sum(_numbers(module) for inside, module in attention.items() if inside.startswith(f"{name}."))
        passed = _passed(modules[name], share) - of_attention
        mlp_size = max(0.0, passed) / (MLP_MATRICES * hidden_size)
        counted[LayerSize(1, _numbers(modules[name]), mlp_size, kind.heads, kind.window_tokens)] += 1
    head = getattr(model.get_output_embeddings(), "weight", None)
    return DecoderSize(
        hidden_size=hidden_size,
        vocabulary=0 if head is None else int(head.shape[0]),
        parameters=_numbers(model),
        embedding_parameters=embedding.numel() + (0 if head is None or head is embedding else head.numel()),
        layers=tuple(
            LayerSize(count, layer.parameters, layer.mlp_size, layer.heads, layer.window_tokens)
            for layer, count in counted.items()
        ),
    )


def _numbers(module: nn.Module) -> int:
    """Returns the numbers of all weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _passed(layer: nn.Module, share: float | None) -> float:
    """Returns the weights that a token passes in a layer; of experts the ones that it is sent to, or all of them if
    the configuration does not say how many these are."""
    return sum(
        prod(parameter.shape) * (share if ".experts." in f".{name}" and share is not None else 1.0)
        for name, parameter in layer.named_parameters()
    )
