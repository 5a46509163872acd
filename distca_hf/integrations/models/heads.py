"""Heads: how many a model's attention layers have on this rank, and how wide they are, read from its configuration.

Ranks that hold parts of the same layers (tensor parallelism) have equally many of the heads each.

Most models have the same heads in all layers. Where they do not (Gemma 4: wide heads in full layers, narrow ones in
layers with a window), Transformers refuses to give one number, and each layer says its own.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from distca_hf.cost import Heads, TokenBytes, divide_heads, head_groups
from distca_hf.integrations.models.distributed import heads_divided_by, model_mesh
from distca_hf.integrations.models.structure import attention_layers, transformers_model


# Common names that a configuration may map to its own. If layers have their own heads, Transformers
# refuses to say how many there are, or how wide they are.
NUMBER = "num_attention_heads"
OTHERS = ("num_key_value_heads", "hidden_size", "head_dim")


def heads_of_layers(model: nn.Module) -> dict[str, Heads]:
    """Returns the heads that this rank has of every attention layer of the text part, by the layer's name.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: as `whole_heads_of_layers`.
    """
    ranks = heads_divided_by(model)
    return {name: _of_rank(heads, ranks) for name, heads in whole_heads_of_layers(model).items()}


def whole_heads_of_layers(model: nn.Module) -> dict[str, Heads]:
    """Returns the heads that all tensor ranks together have of every attention layer of the text part, by its name.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: neither the config nor the layers say how many heads there
            are, or how wide they are.
    """
    layers = attention_layers(transformers_model(model))
    try:
        same = _heads_of_config(model)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return {name: _heads_of_layer(model, layer) for name, layer in layers.items()}
    return dict.fromkeys(layers, same)


def heads_of(model: nn.Module) -> Heads:
    """Returns the heads that this rank has of a layer; of the one with most numbers in keys and values, where layers
    differ.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: as `heads_of_layers`.
    """
    layers = heads_of_layers(model)
    if not layers:
        return _of_rank(_heads_of_config(model), heads_divided_by(model))
    return max(layers.values(), key=lambda heads: heads.key_value * (heads.dim + heads.value_dim))


def head_groups_of(model: nn.Module, tensor_ranks: int = 1) -> int:
    """Returns the number of groups of this rank's heads: KV heads, or several of them together; 1 if the config does
    not say.

    Args:
        tensor_ranks: that divide the heads of a model which Transformers did not divide.
    """
    ranks = tensor_ranks if model_mesh(model) is None else heads_divided_by(model)
    return head_groups(_config(model, NUMBER, "num_key_value_heads"), ranks)


def num_layers_of(model: nn.Module) -> int | None:
    """Returns the number of layers of a model's text part; None if its configuration does not say."""
    return getattr(transformers_model(model).config.get_text_config(), "num_hidden_layers", None)


def token_bytes_of(model: nn.Module) -> TokenBytes:
    """Returns bytes of a token in one layer, in 16-bit numbers; planning needs their proportion alone.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: as `heads_of`.
    """
    return heads_of(model).token_bytes()


def _of_rank(heads: Heads, ranks: int) -> Heads:
    """Returns the heads that each of some tensor ranks has, of those that all have together."""
    if ranks == 1:
        return heads
    key_value = heads.key_value // ranks
    return replace(heads, query=heads.query // ranks, key_value=key_value, groups=divide_heads(key_value))


def _heads_of_config(model: nn.Module) -> Heads:
    number = transformers_model(model).config.get_text_config().num_attention_heads
    return Heads.of_config(_config(model, *OTHERS) | {NUMBER: number})


def _heads_of_layer(model: nn.Module, layer: nn.Module) -> Heads:
    """Returns the heads of a layer as its own attributes say them."""
    query = transformers_model(model).config.get_text_config().num_attention_heads
    own = {"head_dim": layer.head_dim, "num_key_value_heads": query // int(layer.num_key_value_groups)}  # type: ignore[arg-type]
    return Heads.of_config({NUMBER: query} | own)


def _config(model: nn.Module, *names: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, with values by these common names where it has any."""
    config = transformers_model(model).config.get_text_config()
    named = {name: getattr(config, name, None) for name in names}
    return config.to_dict() | {name: value for name, value in named.items() if value is not None}
