"""Registers "distca" as attention implementation and as mask implementation of Transformers.

Upstream: `transformers.AttentionInterface` and `transformers.AttentionMaskInterface`, both public registries; nothing
is replaced. The mask implementation is flash-attention's: None for batches without padding, the padding mask
otherwise. Without a registered one Transformers would pass None for a padded batch too, and padding would be attended
to.
"""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from distca_hf.integrations.attention import distca_attention
from distca_hf.patches import Patch


NAME = "distca"


def _apply() -> None:
    AttentionInterface.register(NAME, distca_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def _revert() -> None:
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


attention = Patch(
    name="attention",
    upstream="transformers.AttentionInterface, transformers.AttentionMaskInterface",
    reason='attn_implementation="distca" must be a known name',
    tested=("5.17", "5.23"),
    apply=_apply,
    revert=_revert,
)
