"""Masks that number the documents of their rows (1 1 1 2 2), as some collators for packing make them."""

from collections.abc import Mapping
from typing import Any

import torch

from distca_hf.errors import PackingError


def check_mask_numbers(batch: Mapping[str, Any]) -> None:
    """Checks a mask that numbers the documents of its rows (1 1 1 2 2), where no positions say the same.

    Transformers takes every number but 0 for "no padding": documents would see each other.

    Raises:
        PackingError: the mask numbers documents, and there are no positions, or positions of other documents.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.dtype == torch.bool or mask.is_floating_point():
        return
    if batch.get("past_key_values") is not None or mask.numel() == 0 or int(mask.max()) <= 1:
        return
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.shape[-1] == mask.shape[-1]:
        changes = (mask[:, 1:] != mask[:, :-1]) & (mask[:, 1:] > 0)
        restarts = positions[:, 1:] != positions[:, :-1] + 1
        if bool(((changes & ~restarts) | (restarts & ~changes & (mask[:, 1:] > 0))).any()):
            raise PackingError(
                f"attention_mask numbers {int(mask.max())} documents, but position_ids restart at other tokens; leave "
                "the numbers out (ones instead), or make them agree"
            )
        return
    raise PackingError(
        f"attention_mask numbers documents (its largest value is {int(mask.max())}), and no position_ids restart with "
        "them: documents would see each other. Give position_ids that begin at 0 in every document, as "
        "DataCollatorWithFlattening does"
    )
