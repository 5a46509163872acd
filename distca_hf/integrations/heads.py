"""Heads: in how many groups plans may divide a model's."""

from math import gcd
from typing import Any

from torch import nn

from distca_hf.integrations.model_check import transformers_model


# Work divides finely enough by this many; more groups only mean longer index tensors.
ENOUGH_GROUPS = 8


def head_groups_of(model: nn.Module) -> int:
    """Groups of heads: the model's KV heads, or several of them together; 1 if its config does not say."""
    config: Any = transformers_model(model).config.get_text_config()
    kv_heads = 0
    for name, value in config.to_dict().items():  # some models have other numbers in some layers
        if name.endswith("key_value_heads") and isinstance(value, int):
            kv_heads = gcd(kv_heads, value)
    return divide_heads(kv_heads or getattr(config, "num_attention_heads", None) or 1)


def divide_heads(kv_heads: int) -> int:
    """The largest divisor of `kv_heads` that is at most `ENOUGH_GROUPS`, or all of them if there is none but 1."""
    groups = max(divisor for divisor in range(1, ENOUGH_GROUPS + 1) if kv_heads % divisor == 0)
    return groups if groups > 1 else kv_heads
