"""Sizes: numbers of weights of a model's layers, counted in the model itself, for estimates of memory."""

from collections import Counter
from collections.abc import Mapping
from math import prod

from torch import nn
from transformers import PreTrainedModel

from distca_hf.analysis.memory import DecoderSize, LayerSize
from distca_hf.analysis.request import MLP_MATRICES
from distca_hf.integrations.models.decoder_layers import LayerKind, decoder_layers
from distca_hf.integrations.models.operations import share_of, shares_of_experts
from distca_hf.integrations.models.structure import attention_layers, weights_beside_text


def decoder_size(model: PreTrainedModel, kinds: list[LayerKind]) -> DecoderSize | None:
    """Counts the weights of a model; None if its layers cannot be told apart, or it has or shows no embedding.

    Weights that several modules share count once, in the first of them.

    Args:
        model: on any device, also torch's meta device.
        kinds: of its decoder layers, in order.
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
        counted[LayerSize(1, _numbers(modules[name]), mlp_size, kind.heads, kind.window_tokens)] += 1
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
