"""Refusals: attention calls that are not computed, by the name of the layer, the argument and its value.

A window as long as every document changes nothing. A shorter one is refused by the layer.
"""

from collections.abc import Mapping

import torch
from torch import nn

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.telemetry import warn


# Keywords that say nothing about how to attend. Any other one that is set is refused: ignoring it would change the
# numbers.
HARMLESS_KEYWORDS = frozenset(
    {
        "cache_position",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "skip_logits",
        "use_cache",
    }
)


def check_call(module: nn.Module, dropout: float, is_causal: bool | None, keywords: Mapping[str, object]) -> None:
    """Checks an attention call. Weights that are asked for are left out, with a warning.

    Args:
        keywords: of the call, except for parameters of the attention function.

    Raises:
        UnsupportedAttentionError: something is asked for that is not computed.
    """
    asked = {
        name: given
        for name, given in keywords.items()
        if given is not None and given is not False and name not in HARMLESS_KEYWORDS
    }
    if dropout:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: attention dropout {dropout} is not computed; set it to 0 in the config"
        )
    if asked:
        named = ", ".join(f"{name}={_short(given)}" for name, given in asked.items())
        raise UnsupportedAttentionError(
            f"{name_of(module)}: {named} is not computed by distca, and ignoring it would change the result; load the "
            "model with another attn_implementation"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError(
            f"{name_of(module)}: is not causal (is_causal={is_causal}, module.is_causal="
            f"{getattr(module, 'is_causal', None)}); distca computes causal attention only"
        )
    if keywords.get("output_attentions") and not torch.compiler.is_compiling():
        warn("distca computes no attention weights: with output_attentions=True they are None", stacklevel=3)


def check_window(window_tokens: int | None, longest_tokens: int, layer: nn.Module | None = None) -> None:
    """Checks a window against the longest document.

    Args:
        layer: whose window it is; its number is looked at in an error alone, because graphs are made for each value
            of an attribute.

    Raises:
        UnsupportedAttentionError: it is shorter.
    """
    if window_tokens is not None and window_tokens < longest_tokens:
        place = "a compiled layer" if layer is None else name_of(layer)
        raise UnsupportedAttentionError(
            f"{place}: sliding window {window_tokens} is shorter than a document of {longest_tokens} tokens, and "
            "windows are not computed; split documents at the window, or disable it in the config"
        )


def shortest_window(*windows: int | None) -> int | None:
    """Returns the shortest of several windows; None if all are None. Some models pass a window to their layers, some
    put it in the mask alone."""
    return min([window for window in windows if window is not None], default=None)


def name_of(module: nn.Module) -> str:
    """Returns class and number of a layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _short(given: object) -> str:
    """Returns a value as it is written, a tensor as its shape."""
    return f"tensor{tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
