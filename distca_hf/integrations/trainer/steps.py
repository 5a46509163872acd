"""Steps of a Trainer: tells its model before a pass which documents come next, and who reads the loss.

Batches are read ahead of their passes, to let ranks plan them ahead:

    worker or main process     collator ──▶ batch with its reading: done at once in a worker, later in the main process
    Accelerate's loader        holds one batch more than it has handed out, to know the last one of an epoch
    get_batch_samples          takes the readings out of the batches of the step, and of the batch held
    first pass of the step     ranks gather the readings, and a thread plans them while this pass runs
    passes                     find them by the tensors of their batch; losses, metrics and other models never see them

All other batches are read in their pass: batches that rank 0 dispatches, that a policy generates, or that come from a
loader other than a torch DataLoader.

Trainer's own methods read no logits. They sum the losses of a rank until the next log, and then average them over
ranks. Two numbers come from rank 0 only: `train_loss` counts the steps after the last log, and an infinite or NaN loss
is left out of its rank's log. So if steps may be the last ones and no log covers them, they return hidden states, and
their losses are of the rank's own rows. If training ends unexpectedly (a signal, no data left), it logs its last steps
instead, and `train_loss` has their mean over ranks.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length

from distca_hf.arrays import ceil_div
from distca_hf.batches.read_documents import ENTRY, Reading, ReadingCollator, mark, reading_of, take_reading
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.patches.skip_batches import READ_AHEAD


# Methods of Trainer that see the loss of a rank, or count the labels by which it is divided.
OF_LOSS = (
    "compute_loss",
    "training_step",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_maybe_log_save_evaluate",
    "_run_epoch",
    "_inner_training_loop",
)


class ReadAhead:
    """Reads the batches of one Trainer's steps."""

    def __init__(self, trainer: Trainer, model: nn.Module, replace: Callable[[object, str, object], None]) -> None:
        self._model = model
        self._loader: Any = None
        self._is_training = False
        self._holds_one = False
        self._latest: Reading | None = None
        self._readings: list[Reading | None] = []  # of the step, found by marks on its tensors
        replace(trainer, "train", partial(self._train, trainer.train))
        replace(trainer, "get_batch_samples", partial(self._batch_samples, trainer.get_batch_samples))
        if type(trainer)._prepare_inputs is Trainer._prepare_inputs:  # it may copy, and does nothing else
            replace(trainer, "_prepare_inputs", partial(_prepare_inputs, trainer._prepare_inputs))

    def begin(self, loader: object) -> None:
        """Reads the batches of a training when they are collated, if this Trainer runs it. Does not read dispatched
        batches: rank 0 joins them, and cuts them again."""
        self.end()
        inner, watch = getattr(loader, "base_dataloader", loader), watch_of(self._model)
        if not self._is_training or watch is None or isinstance(loader, DataLoaderDispatcher):
            return
        if isinstance(inner, DataLoader):
            self._loader = inner
            inner.collate_fn = ReadingCollator(inner.collate_fn, watch.reader)
            self._holds_one = isinstance(loader, DataLoaderShard)
            self._see(loader)

    def _see(self, loader: object) -> None:
        """Sees batches as Accelerate's loader gets them, also in a loader that skips the first of them."""
        if isinstance(loader, DataLoaderShard):
            inner = loader.base_dataloader
            vars(inner)["__iter__"] = partial(self._seen, inner)  # it calls this method by its name
            setattr(loader, READ_AHEAD, self._see)

    def _train(self, train: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Trains; then gives the loader its collator back, even if training raises."""
        self._is_training = True
        try:
            return train(*args, **kwargs)
        finally:
            self._is_training = False
            self.end()

    def end(self) -> None:
        """Gives the loader its collator back, unless someone has replaced it since."""
        loader, self._loader, self._latest, self._readings = self._loader, None, None, []
        if loader is None:
            return
        vars(loader).pop("__iter__", None)
        if isinstance(loader.collate_fn, ReadingCollator):
            loader.collate_fn = loader.collate_fn.collate
        if loader.persistent_workers:
            loader._iterator = None  # its workers would keep our collator

    def _seen(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yields the batches of a loader, and notes the reading of the latest one."""
        for batch in loader:
            self._latest = batch.get(ENTRY) if isinstance(batch, MutableMapping) else None
            yield batch
        self._latest = None

    def _marked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches with marks in place of their entries, before a user's `get_batch_samples` can change them."""
        while (batch := next(batches, self)) is not self:
            self._readings.append(take_reading(batch))
            yield batch

    def _batch_samples(
        self,
        take: Callable[..., tuple[list[Any], Any]],
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[Any], Any]:
        """Takes the batches of a step, and lets ranks plan all but the first one, whose pass begins immediately."""
        self._readings = []
        batches, num_items = take(self._marked(epoch_iterator), num_batches, device)
        watch = watch_of(self._model)
        if self._loader is not None and watch is not None and batches:
            following = [reading_of(batch) if isinstance(batch, Mapping) else None for batch in batches]
            if self._latest is not None and self._latest not in following:
                following.append(self._latest)
            if num_batches > 1 or self._holds_one:
                watch.begin_step(following[1:], num_batches, device)
        return batches, num_items


def _prepare_inputs(prepare: Callable[[Any], Any], inputs: Any) -> Any:
    """Prepares a batch, and copies its mark if that makes a copy."""
    prepared = prepare(inputs)
    if isinstance(inputs, Mapping) and any(prepared[name] is not value for name, value in inputs.items()):
        if (reading := reading_of(inputs)) is not None:
            mark(prepared, reading)
    return prepared


class LossReader:
    """Runs `compute_loss` of a Trainer, and tells its model who reads the loss. It is made before the attachment
    replaces anything."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment, self._trainer = attachment, attachment.trainer
        self._replaced_before = {name for name in OF_LOSS if name in vars(self._trainer)}
        self._methods_of = attrgetter(*(name for name in OF_LOSS if hasattr(Trainer, name)))
        # Methods in the latest step, and names of those that are not Trainer's.
        self._methods, self._replaced = tuple[object, ...](), list[str]()

    def install(self) -> None:
        self._attachment.replace(self._trainer, "compute_loss", partial(self._read_loss, self._trainer.compute_loss))

    def _read_loss(
        self,
        compute_loss: Callable[..., object],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> object:
        kwargs["num_items_in_batch"] = num_items_in_batch
        watch = watch_of(self._trainer.model)
        if watch is None:
            return compute_loss(model, inputs, return_outputs, **kwargs)
        with watch.loss.read_as_sum(unless="compute_loss returns outputs" if return_outputs else self._reason()):
            return compute_loss(model, inputs, return_outputs, **kwargs)

    def _reason(self) -> str:
        """Returns why the loss of this rank, or more, is read; empty if only its mean over ranks is."""
        trainer, args = self._trainer, self._trainer.args
        methods = *map(vars(trainer).get, OF_LOSS), self._methods_of(type(trainer)), self._methods_of(Trainer)
        if methods != self._methods:
            self._methods, self._replaced = methods, self._not_of_trainer()
        if self._replaced:
            return (
                f"{type(trainer).__name__}.{self._replaced[0]} is not Trainer's: it may read logits or losses, or "
                "count labels"
            )
        if trainer.compute_loss_func is not None:
            return "compute_loss_func reads logits"
        if trainer.label_smoother is not None:
            return "label smoothing reads logits"
        if args.world_size > 1 and not args.average_tokens_across_devices:
            return "average_tokens_across_devices=False: ranks divide by other numbers of labels"
        return self._unlogged()

    def _not_of_trainer(self) -> list[str]:
        """Returns names of the methods in `OF_LOSS` that are not Trainer's."""
        kind, replaced = type(self._trainer), self._replaced_before | self._attachment.replaced_since(OF_LOSS)
        return [
            name
            for name in OF_LOSS
            if name in replaced
            or (method := getattr(Trainer, name, None)) is not getattr(kind, name, None)
            or (method is not None and method.__module__ != Trainer.__module__)
        ]

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
    return (step // every + 1) * every


@lru_cache(maxsize=256)
def may_stop(callback_class: Hashable) -> bool:
    """Returns whether a callback class may end a training. Classes of Transformers and distca_hf do not count."""
    for part in callback_class.__mro__:  # type: ignore[attr-defined]
        if part.__module__.partition(".")[0] not in ("builtins", "distca_hf", "transformers"):
            try:
                source = inspect.getsource(part)
            except (OSError, TypeError):
                return True
            if "should_training_stop" in source or "should_epoch_stop" in source:
                return True
    return False


def steps_per_epoch(args: TrainingArguments, train_dataloader: Any) -> int | None:
    """Returns the optimizer steps of an epoch; None if its batches are not counted."""
    if not has_length(train_dataloader):
        return None
    return ceil_div(len(train_dataloader), args.gradient_accumulation_steps)
