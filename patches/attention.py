"""Registers "distca" as attention implementation and as mask implementation of Transformers.

Upstream: `transformers.AttentionInterface` and `transformers.AttentionMaskInterface`, both public registries; nothing
is replaced. Without a mask implementation Transformers would pass None for a padded batch too, and padding would be
attended to.

Imports are inside the functions: this module may be imported while Transformers' own are half imported.
"""

from distca_hf.patches import Patch


NAME = "distca"


def _apply() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from distca_hf.integrations.attention import distca_attention
    from distca_hf.integrations.mask import document_mask

    AttentionInterface.register(NAME, distca_attention)
    AttentionMaskInterface.register(NAME, document_mask)


def _revert() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


attention = Patch(
    name="attention",
    upstream="transformers.AttentionInterface, transformers.AttentionMaskInterface",
    reason='attn_implementation="distca" must be a known name',
    tested=("5.17", "5.24"),
    apply=_apply,
    revert=_revert,
)
