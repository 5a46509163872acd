"""Refusals: attention calls that are not computed, by the name of the layer, the argument and its value."""

import warnings
from typing import Any

import torch
from torch import nn

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.layer_window import name_of
from distca_hf.integrations.mask import RowMask
from distca_hf.telemetry import this_rank


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


def check_call(
    module: nn.Module, mask: Any, dropout: float, is_causal: bool | None, keywords: dict[str, Any]
) -> RowMask | None:
    """Returns the mask of an attention call, if there is one. Weights that are asked for are left out, with a warning.

    Args:
        keywords: those that the attention function does not know.

    Raises:
        UnsupportedAttentionError: something is asked for that is not computed.
    """
    asked = {
        name: given
        for name, given in keywords.items()
        if given is not None and given is not False and name not in HARMLESS_KEYWORDS
    }
    if mask is not None and not isinstance(mask, RowMask):
        raise UnsupportedAttentionError(
            f"{name_of(module)}: got an attention mask of shape {tuple(mask.shape)} of the caller's own; distca "
            "computes causal attention inside documents. Give attention_mask as zeros and ones of shape [batch, "
            "tokens], or position_ids that begin at 0 in every document, or load the model with another "
            "attn_implementation"
        )
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
    if keywords.get("output_attentions") and not torch.compiler.is_compiling() and this_rank() == 0:
        # Shown once per process by default, as all warnings of one text.
        warnings.warn("distca computes no attention weights: with output_attentions=True they are None", stacklevel=3)
    return mask


def check_mask(module: nn.Module, mask: RowMask, queries: int, keys: int) -> None:
    """Checks the mask of a layer.

    Raises:
        UnsupportedAttentionError: it is not causal, or was made for other queries and keys per row.
    """
    if mask.refusal is not None:
        raise UnsupportedAttentionError(f"{name_of(module)}: {mask.refusal}")
    if mask.shape[2:] != (queries, keys):
        raise UnsupportedAttentionError(
            f"{name_of(module)}: has {queries} queries and {keys} keys per row, but the model made its mask for "
            f"{mask.shape[2]} and {mask.shape[3]}; load it with another attn_implementation"
        )


def _short(given: Any) -> str:
    return f"tensor{tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
