"""Lets `Trainer` resume with a loader that knows its own position.

Upstream: the name `skip_first_batches` in `transformers.trainer` (imported there from Accelerate). When resuming,
Trainer calls it to run past the batches of the interrupted epoch; Accelerate's version needs a torch `DataLoader` and
its sampler. Ours passes a loader that has `skip_batches` on to that method and everything else on to Accelerate. There
is no public seam: the call is inside `Trainer._run_epoch`.
"""

from typing import Any

import transformers.trainer
from accelerate import skip_first_batches as accelerate_skip_first_batches

from distca_hf.patches import Patch


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Accelerate's `skip_first_batches`, but a loader with `skip_batches` moves its own position."""
    if hasattr(dataloader, "skip_batches"):
        return dataloader.skip_batches(num_batches)
    return accelerate_skip_first_batches(dataloader, num_batches)


def _apply() -> None:
    transformers.trainer.skip_first_batches = skip_first_batches


def _revert() -> None:
    transformers.trainer.skip_first_batches = accelerate_skip_first_batches


trainer_resume = Patch(
    name="trainer_resume",
    upstream="transformers.trainer.skip_first_batches",
    reason="Accelerate's version needs a torch DataLoader with a sampler",
    tested=("5.17", "5.23"),
    apply=_apply,
    revert=_revert,
)
