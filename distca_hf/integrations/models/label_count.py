"""Label counts: what ranks divide the loss of a batch by, so that the mean over ranks is that over all labels."""

import torch

from distca_hf.batches.batch_documents import Batch
from distca_hf.runtime.live_plan import LivePlan


def label_count(batch: Batch, plan: LivePlan) -> dict[str, torch.Tensor]:
    """Returns `num_items_in_batch`: the caller's, or this rank's share of all labels of the micro-batch, if they were
    counted. Never 0: a step without labels has loss 0, not 0 / 0."""
    count, labels = batch.get("num_items_in_batch"), batch.get("labels")
    if count is not None:
        return {"num_items_in_batch": count + (count == 0)}
    if labels is None or plan.label_tokens is None:
        return {}
    share = max(1, plan.label_tokens) / plan.transport.world_size
    return {"num_items_in_batch": labels.new_tensor(share, dtype=torch.float32)}
