"""Loss reader: tells an enabled model whether its Trainer reads anything but the mean loss of all ranks.

Trainer's own methods read no logits. They sum up the losses of a rank until the next log, and average them over ranks
there. Two numbers are of rank 0 only: `train_loss` counts the steps after the last log, and a loss that is infinite
or NaN is left out of the log of its rank. So hidden states return in steps that may be the last ones and that no log
covers: their losses are those of a rank's own rows. A training that ends unforeseen (a signal, no data left) logs its
last steps instead, and its `train_loss` has their mean over ranks.
"""

import inspect
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_utils import IntervalStrategy

from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.integrations.trainer.callback import steps_per_epoch


# Methods of Trainer that see the loss of a rank, or count the labels that it is divided by.
OF_LOSS = (
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_maybe_log_save_evaluate",
    "_run_epoch",
    "_inner_training_loop",
)


class LossReader:
    """Runs `compute_loss` of a Trainer so that its model knows who reads the loss.

    Args:
        attachment: of the Trainer; nothing was replaced yet.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment, self._trainer = attachment, attachment.trainer
        self._replaced_before = {name for name in OF_LOSS if name in vars(self._trainer)}
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
        others = [name for name in OF_LOSS if not self._is_trainers(name)]
        if others:
            return (
                f"{type(trainer).__name__}.{others[0]} is not Trainer's: it may read logits or losses, or count labels"
            )
        if trainer.compute_loss_func is not None:
            return "compute_loss_func reads logits"
        if trainer.label_smoother is not None:
            return "label smoothing reads logits"
        if args.world_size > 1 and not args.average_tokens_across_devices:
            return "average_tokens_across_devices=False: ranks divide by other numbers of labels"
        return self._unlogged()

    def _is_trainers(self, name: str) -> bool:
        """Returns whether a method is that of Transformers, or what was attached in its place."""
        if name in self._replaced_before or not self._attachment.keeps(name):
            return False
        method = getattr(Trainer, name, None)
        return method is getattr(type(self._trainer), name, None) and (
            method is None or method.__module__ == Trainer.__module__
        )

    def _unlogged(self) -> str:
        """Returns why no later log may cover the running step; empty if one will."""
        args, state = self._trainer.args, self._trainer.state
        if args.logging_strategy == IntervalStrategy.EPOCH or (args.logging_first_step and state.global_step == 0):
            return ""
        reason = "train_loss has rank 0's own loss of steps that no log averages over ranks"
        if args.logging_strategy != IntervalStrategy.STEPS:
            return reason
        ends, handler = {"": state.max_steps}, self._trainer.callback_handler
        for callback in handler.callbacks:
            every: int | None = int(may_stop(type(callback)))  # type: ignore[arg-type]
            if not every and isinstance(callback, EarlyStoppingCallback):  # it looks at evaluations
                is_of_steps = args.eval_strategy == IntervalStrategy.STEPS
                every = (state.eval_steps if is_of_steps else steps_per_epoch(args, handler.train_dataloader)) or 1
            if every:
                ends[f" ({type(callback).__name__} may end training before)"] = _next(every, state.global_step)
        first = min(ends, key=ends.__getitem__)
        return "" if _next(state.logging_steps, state.global_step) <= ends[first] else reason + first


def _next(every: int, step: int) -> int:
    """Returns the next multiple after a step."""
    return (step // every + 1) * every


@lru_cache(maxsize=256)
def may_stop(callback_class: Hashable) -> bool:
    """Returns whether a class of callbacks may end a training; those of Transformers and distca_hf do not count."""
    for part in callback_class.__mro__:  # type: ignore[attr-defined]
        if part.__module__.partition(".")[0] not in ("builtins", "distca_hf", "transformers"):
            try:
                source = inspect.getsource(part)
            except (OSError, TypeError):
                return True
            if "should_training_stop" in source or "should_epoch_stop" in source:
                return True
    return False
