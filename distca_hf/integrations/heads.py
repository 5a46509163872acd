"""Heads: in how many groups plans may divide a model's, and what a token weighs on its way."""

from math import gcd
from typing import Any

from torch import nn

from distca_hf.cost import TokenBytes
from distca_hf.integrations.model_check import transformers_model


# Work divides finely enough by this many; more groups only mean longer index tensors.
ENOUGH_GROUPS = 8


def head_groups_of(model: nn.Module) -> int:
    """Groups of heads: the model's KV heads, or several of them together; 1 if its config does not say."""
    kv_heads = 0
    for name, value in _config(model).to_dict().items():  # some models have other numbers in some layers
        if name.endswith("key_value_heads") and isinstance(value, int):
            kv_heads = gcd(kv_heads, value)
    return divide_heads(kv_heads or _heads(model))


def token_bytes_of(model: nn.Module) -> TokenBytes:
    """Bytes of a token in one layer, in 16-bit numbers; planning needs their proportion alone."""
    heads = _heads(model)
    kv_heads = getattr(_config(model), "num_key_value_heads", None) or heads
    dim = getattr(_config(model), "head_dim", None) or 128
    return TokenBytes(query=2 * heads * dim, output=2 * heads * dim, key_value=4 * kv_heads * dim)


def divide_heads(kv_heads: int) -> int:
    """The largest divisor of `kv_heads` that is at most `ENOUGH_GROUPS`, or all of them if there is none but 1."""
    groups = max(divisor for divisor in range(1, ENOUGH_GROUPS + 1) if kv_heads % divisor == 0)
    return groups if groups > 1 else kv_heads


def _config(model: nn.Module) -> Any:
    return transformers_model(model).config.get_text_config()


def _heads(model: nn.Module) -> int:
    return getattr(_config(model), "num_attention_heads", None) or 1
