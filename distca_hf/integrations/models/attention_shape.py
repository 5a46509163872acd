"""Heads of a model, as its configuration says; planning and kernels depend on them."""

from typing import Any

from torch import nn

from distca_hf.cost import TokenBytes
from distca_hf.integrations.models.parts import transformers_model
from distca_hf.planning.heads import Heads, head_groups


# Common names that a configuration may map to others of its own. Where layers have heads of their own, Transformers
# refuses to say how many there are, or how wide they are.
NUMBER = "num_attention_heads"
OTHERS = ("num_key_value_heads", "hidden_size", "head_dim")


def head_groups_of(model: nn.Module) -> int:
    """Returns the number of groups of heads: KV heads, or several of them together; 1 if the config does not say."""
    return head_groups(_config(model, NUMBER, "num_key_value_heads"))


def heads_of(model: nn.Module) -> Heads:
    """Returns the heads of a layer.

    Raises:
        AttributeError, KeyError: its config does not say how many heads there are, or how wide they are.
        AttributeError, RuntimeError, ValueError: layers have heads of their own, as versions of Transformers say it.
    """
    number = transformers_model(model).config.get_text_config().num_attention_heads
    return Heads.of_config(_config(model, *OTHERS) | {NUMBER: number})


def token_bytes_of(model: nn.Module) -> TokenBytes:
    """Returns bytes of a token in one layer, in 16-bit numbers; planning needs their proportion alone.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: as `heads_of`.
    """
    return heads_of(model).token_bytes()


def _config(model: nn.Module, *names: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, with values by these common names where it has any."""
    config = transformers_model(model).config.get_text_config()
    named = {name: getattr(config, name, None) for name in names}
    return config.to_dict() | {name: value for name, value in named.items() if value is not None}
