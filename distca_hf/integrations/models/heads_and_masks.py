"""Heads and masks of a model's attention layers, read from modules and configuration: how many heads this rank has of
each and how wide they are, and which keys they see.

Ranks that hold parts of the same layers (tensor parallelism) have equally many of the heads each. Most models have the
same heads in all layers. Where they do not (Gemma 4: wide heads in full layers, narrow ones in layers with a window),
Transformers refuses to give one number, and each layer says its own.

Transformers models give a window to the attention function (`sliding_window`), or to the mask only. Placement must
know it before the first pass. A window that is met there first is routed then, with a warning (`forward_check`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from distca_hf.cost import Heads, LayerMasks, Mask, TokenBytes, divide_heads, head_groups
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.distributed import heads_divided_by, model_mesh
from distca_hf.integrations.models.structure import (
    attention_layers,
    forward_names,
    keyword_passed,
    text_modules,
    transformers_model,
)


NUMBER = "num_attention_heads"


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
        query = transformers_model(model).config.get_text_config().num_attention_heads
        own: dict[str, Heads] = {}
        for name, layer in layers.items():
            key_value = query // int(layer.num_key_value_groups)  # type: ignore[arg-type]
            sizes = {NUMBER: query, "num_key_value_heads": key_value, "head_dim": layer.head_dim}
            own[name] = Heads.of_config(sizes)
        return own
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
    """Returns the heads of all layers. Where layers have their own, Transformers refuses to give the first number."""
    number = transformers_model(model).config.get_text_config().num_attention_heads
    return Heads.of_config(_config(model, "num_key_value_heads", "hidden_size", "head_dim") | {NUMBER: number})


def _config(model: nn.Module, *names: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, with values by these common names, which it may map to its
    own."""
    config = transformers_model(model).config.get_text_config()
    named = {name: getattr(config, name, None) for name in names}
    return config.to_dict() | {name: value for name, value in named.items() if value is not None}


def layer_masks_of(model: nn.Module) -> LayerMasks:
    """Returns the masks of a model, each with the number of its layers: full causal layers first, then windows from
    the shortest on.

    Args:
        model: a Transformers model, or a PEFT model around one.

    Raises:
        UnsupportedAttentionError: a window holds no token.
    """
    for refusal in empty_windows(model):
        raise UnsupportedAttentionError(f"{type(transformers_model(model)).__name__}: {refusal}")
    counted = Counter(masks_of_layers(model).values())
    return tuple(sorted(counted.items(), key=lambda item: (item[0].window_tokens or 0, item[0].chunked)))


def empty_windows(model: nn.Module) -> Iterator[str]:
    """Yields a refusal of the first window that holds not even the token itself."""
    for name, window, _ in _windows(model):
        if window is not None and window < 1:
            yield f"sliding window {window} ({name}) holds no token; it counts the token itself, so 1 is the shortest"
            return


def masks_of_layers(model: nn.Module) -> dict[str, Mask]:
    """Returns the mask of every attention layer, by name."""
    return {name: Mask(window, is_chunk) for name, window, is_chunk in _windows(model)}


def _windows(model: nn.Module) -> Iterator[tuple[str, int | None, bool]]:
    """Yields name and window of every attention layer, None for one that sees all of its document; and whether the
    window is a chunk.

    A layer attends with the window that it passes to the attention function, or with that of its mask. Its attribute
    does not count: many classes set one on layers that pass none.
    """
    inner = transformers_model(model)
    in_mask, in_chunks = (makes_masks(inner, kind) for kind in ("sliding_window", "chunked"))
    for name, module in attention_layers(inner).items():
        config = getattr(module, "config", inner.config.get_text_config())
        chunk = getattr(config, "attention_chunk_size", None)
        if in_chunks and isinstance(chunk, int) and "chunked" in _kind_of(module, config, ""):
            yield name, chunk, True
            continue
        pass_on = keyword_passed(type(module), "attention_interface", "sliding_window")  # type: ignore[arg-type]
        passed = None if pass_on is None else pass_on(module)
        is_sliding = in_mask and "sliding" in _kind_of(module, config, "sliding_attention")
        of_mask = getattr(config, "sliding_window", None) if is_sliding else None
        yield name, min((one for one in (passed, of_mask) if isinstance(one, int)), default=None), False


def _kind_of(module: nn.Module, config: PreTrainedConfig, otherwise: str) -> str:
    """Returns the type of a layer in its model's configuration, or what it is where types are not listed."""
    kinds, number = getattr(config, "layer_types", None) or [], getattr(module, "layer_idx", None)
    return str(kinds[number]) if isinstance(number, int) and number < len(kinds) else otherwise


def makes_masks(model: nn.Module, kind: str) -> bool:
    """Returns whether a forward function of a model's text part calls Transformers' function that makes causal masks
    of this kind ("chunked", "sliding_window")."""
    parts = text_modules(transformers_model(model)).values()
    return any(forward_names(part, f"create_{kind}_causal_mask") for part in parts)
