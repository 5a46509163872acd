"""Passes with a plan do not wait for the device to find packed documents: their plan has them.

In every pass without a mask or a cache, Transformers looks for document boundaries in positions on the device, and
reads from there whether it found any. So the host waits until the device has finished all earlier work, and cannot
queue the first layers meanwhile.

Upstream: `transformers.masking_utils.find_packed_sequence_indices`. Only a mask of four dimensions, or an attention
implementation without a mask function, skips it; but then distca_hf could not refuse models whose masks show more
than causal documents.
"""

import sys
from collections.abc import Callable
from functools import wraps

import torch

from distca_hf.patches import Patch


def _unless_planned(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """Returns `find`, which is skipped if the model passes a plan on to its layers."""
    from distca_hf.integrations.mask import passes_on_a_plan

    @wraps(find)
    def find_unless_planned(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not torch.compiler.is_compiling() and passes_on_a_plan(sys._getframe(1)):
            return None
        return find(position_ids)

    return find_unless_planned


def _apply() -> None:
    from transformers import masking_utils

    if not hasattr(masking_utils.find_packed_sequence_indices, "__wrapped__"):
        masking_utils.find_packed_sequence_indices = _unless_planned(masking_utils.find_packed_sequence_indices)


def _revert() -> None:
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = getattr(find, "__wrapped__", find)


packed_documents = Patch(
    name="packed_documents",
    upstream="transformers.masking_utils.find_packed_sequence_indices",
    reason="the host must not wait for the device in every pass",
    tested=("5.6", "5.17", "5.24"),
    apply=_apply,
    revert=_revert,
)
