"""Loss reader: tells an enabled model whether its Trainer reads anything but the mean loss of all ranks.

Trainer's own methods read no logits. They sum up the losses of a rank until the next log, and average them over ranks
there. Two numbers are of rank 0 only: `train_loss` counts the steps after the last log, and a loss that is infinite
or NaN is left out of the log of its rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy

from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment


# Methods of Trainer that see the loss of a rank.
SEES_LOSS = ("compute_loss", "training_step", "_maybe_log_save_evaluate", "_run_epoch", "_inner_training_loop")


class LossReader:
    """Runs `compute_loss` of a Trainer so that its model knows who reads the loss.

    Args:
        attachment: of the Trainer; nothing was replaced yet.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment, self._trainer = attachment, attachment.trainer
        self._replaced_before = {name for name in SEES_LOSS if name in vars(self._trainer)}
        self._compute_loss: Callable[..., object]

    def install(self) -> None:
        """Takes the place of `compute_loss`."""
        self._compute_loss = self._trainer.compute_loss
        self._attachment.replace(self._trainer, "compute_loss", self._read_loss)

    def _read_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> object:
        """Computes the loss of a batch. Arguments as of Trainer."""
        kwargs["num_items_in_batch"] = num_items_in_batch
        watch = watch_of(self._trainer.model)
        if watch is None:
            return self._compute_loss(model, inputs, return_outputs, **kwargs)
        with watch.loss.read_as_sum(unless="compute_loss returns outputs" if return_outputs else self._reason()):
            return self._compute_loss(model, inputs, return_outputs, **kwargs)

    def _reason(self) -> str:
        """Returns why the loss of this rank is read, or more than the loss; empty if only its mean over ranks is."""
        trainer, args = self._trainer, self._trainer.args
        others = [name for name in SEES_LOSS if not self._is_trainers(name)]
        if others:
            return f"{type(trainer).__name__}.{others[0]} is not Trainer's, and may read logits or losses"
        if trainer.compute_loss_func is not None:
            return "compute_loss_func reads logits"
        if trainer.label_smoother is not None:
            return "label smoothing reads logits"
        if args.world_size > 1 and not args.average_tokens_across_devices:
            return "average_tokens_across_devices=False: ranks divide by other numbers of labels"
        return "" if self._is_logged() else "train_loss has rank 0's own loss of steps that no log averages over ranks"

    def _is_trainers(self, name: str) -> bool:
        """Returns whether a method is that of Transformers, or what was attached in its place."""
        if name in self._replaced_before or not self._attachment.keeps(name):
            return False
        method = getattr(Trainer, name, None)
        return method is getattr(type(self._trainer), name, None) and (
            method is None or method.__module__ == Trainer.__module__
        )

    def _is_logged(self) -> bool:
        """Returns whether a later log will cover the running step."""
        args, state = self._trainer.args, self._trainer.state
        if args.logging_strategy != IntervalStrategy.STEPS:
            return bool(args.logging_strategy == IntervalStrategy.EPOCH)
        next_log = (state.global_step // state.logging_steps + 1) * state.logging_steps
        return next_log <= state.max_steps or (args.logging_first_step and state.global_step == 0)
