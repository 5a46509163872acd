"""Heads of a model: the groups that plans divide them into, and the bytes of a token.

Both follow from a model's configuration. Training reads it from the model, `distca plan` from a config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Self

from distca_hf.cost import TokenBytes


# Maximum number of head groups: eight parts of a document balance eight ranks, more only make index tensors longer.
ENOUGH_GROUPS = 8


@dataclass(frozen=True)
class Heads:
    """Heads of one layer's attention.

    Attributes:
        query: query heads.
        key_value: heads of keys and values; several query heads may share one.
        dim: numbers of one head of a query or key.
        value_dim: numbers of one head of a value or output.
        groups: groups that plans divide the heads into.
    """

    query: int
    key_value: int
    dim: int
    value_dim: int
    groups: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads the numbers by their names in Transformers' configurations.

        Raises:
            KeyError: the configuration has no `num_attention_heads`, or neither `head_dim` nor `hidden_size`.
        """
        query = config["num_attention_heads"]
        if config.get("kv_lora_rank") is not None:  # multi-head latent attention: keys carry two parts
            dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        else:  # JetMoe writes kv_channels
            dim = config.get("head_dim") or config.get("kv_channels") or config["hidden_size"] // query
        return cls(
            query=query,
            key_value=config.get("num_key_value_heads") or query,
            dim=dim,
            value_dim=config.get("v_head_dim") or dim,
            groups=head_groups(config),
        )

    def token_bytes(self, number_bytes: int = 2) -> TokenBytes:
        """Returns bytes of a token in one layer. Plans depend on their proportion alone."""
        return TokenBytes(
            query=self.query * self.dim * number_bytes,
            output=self.query * self.value_dim * number_bytes,
            key_value=self.key_value * (self.dim + self.value_dim) * number_bytes,
        )


def head_groups(config: Mapping[str, Any]) -> int:
    """Returns the number of groups that plans divide heads into; 1 if the configuration has no number of heads.

    A group is one KV head, or several of them, with the query heads that share them.
    """
    key_value = 0
    for name, value in config.items():  # some models have other numbers in some layers
        if name.endswith("key_value_heads") and isinstance(value, int):
            key_value = gcd(key_value, value)
    return divide_heads(key_value or config.get("num_attention_heads") or 1)


def divide_heads(key_value_heads: int) -> int:
    """Returns the largest divisor of the KV heads up to `ENOUGH_GROUPS`, or their number if that divisor is 1."""
    groups = max(divisor for divisor in range(1, ENOUGH_GROUPS + 1) if key_value_heads % divisor == 0)
    return groups if groups > 1 else key_value_heads
