"""Empty batches: what a rank without tokens runs on, so that it takes part in everything that the others do."""

import torch

from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.data.media import MEDIA


def fill_empty(batch: Batch) -> dict[str, torch.Tensor | int | None]:
    """Returns inputs for a rank without tokens: one row of padding without a label, of loss 0. Empty for other
    ranks."""
    if tokens_of(batch).numel():
        return {}
    filled: dict[str, torch.Tensor | int | None] = (
        {"num_items_in_batch": 1} if batch.get("num_items_in_batch") is None else {}
    )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            continue
        if name.startswith("cu_seq_lens"):
            filled[name] = values.new_tensor([0, 1])
        elif name == "position_ids" and values.ndim == 3:  # several positions per token, as of images
            filled[name] = values.new_zeros((len(values), 1, 1))
        elif MEDIA.search(name) and not values.numel():
            filled[name] = None
        elif 0 in values.shape[:2]:
            is_mask = name == "attention_mask"  # 1: a mean over no token is NaN
            number = IGNORED_LABEL if name.endswith("labels") else int(is_mask)
            filled[name] = values.new_full((1, 1, *values.shape[2:]), number)
    return filled
