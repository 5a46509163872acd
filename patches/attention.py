"""Registers "distca" as attention implementation and as mask implementation of Transformers.

Upstream: `transformers.AttentionInterface` and `transformers.AttentionMaskInterface`, both public registries. Without
a mask implementation Transformers would pass None for a padded batch, too, and padding would be attended to. The mask
functions of other implementations are registered again, wrapped in one that first checks whether a model without their
plan has received tokens of a placed batch (`integrations.mask`).

Imports are inside the functions: this module may be imported while Transformers' own are half imported.
"""

from functools import partial

from distca_hf.patches import Patch


NAME = "distca"


def _apply() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from distca_hf.integrations.attention import distca_attention
    from distca_hf.integrations.mask import checked_mask, document_mask

    if NAME in AttentionMaskInterface._global_mapping:
        return
    for name, function in [*AttentionMaskInterface._global_mapping.items()]:
        AttentionMaskInterface.register(name, partial(checked_mask, name, function))
    AttentionInterface.register(NAME, distca_attention)
    AttentionMaskInterface.register(NAME, document_mask)


def _revert() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from distca_hf.integrations.mask import checked_mask

    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    for name, function in [*AttentionMaskInterface._global_mapping.items()]:
        if isinstance(function, partial) and function.func is checked_mask:
            AttentionMaskInterface.register(name, function.args[1])


attention = Patch(
    name="attention",
    upstream="transformers.AttentionInterface, transformers.AttentionMaskInterface",
    reason='attn_implementation="distca" must be a known name',
    tested=("5.6", "5.17", "5.24"),
    apply=_apply,
    revert=_revert,
)
