"""Read ahead: reads a Trainer's batches ahead of their passes, so that ranks can plan them ahead, too.

    worker or main process     collator ──▶ batch with its reading: done at once in a worker, later in the main process
    Accelerate's loader        holds one batch more than it has handed out, to know the last one of an epoch
    get_batch_samples          takes the readings out of the batches of the step, and of that one
    first pass of the step     ranks gather what is read, and a thread plans it while this pass runs
    passes                     find it by the tensors of their batch; losses, metrics and other models never see it

All other batches are read in their pass: batches that rank 0 dispatches, that a policy generates, or that come from a
loader other than a torch DataLoader.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from distca_hf.batches.read_documents import ENTRY, Reading, ReadingCollator, mark, reading_of, take_reading
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.patches.skip_batches import READ_AHEAD


class ReadAhead:
    """Reads the batches of one Trainer's steps.

    Args:
        replace: sets an attribute of an object, so that it can be undone.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, replace: Callable[[object, str, object], None]) -> None:
        self._model = model
        self._loader: Any = None
        self._is_training = False
        self._holds_one = False
        self._latest: Reading | None = None
        self._readings: list[Reading | None] = []  # of the step, which marks on its tensors lead to
        replace(trainer, "train", partial(self._train, trainer.train))
        replace(trainer, "get_batch_samples", partial(self._batch_samples, trainer.get_batch_samples))
        if type(trainer)._prepare_inputs is Trainer._prepare_inputs:  # it may copy, and does nothing else
            replace(trainer, "_prepare_inputs", partial(_prepare_inputs, trainer._prepare_inputs))

    def begin(self, loader: object) -> None:
        """Reads the batches of a training where they are collated, if it is one of this Trainer.

        Args:
            loader: of the training. Dispatched batches are put together on rank 0 and cut again: they are not read.
        """
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
        """Sees the batches of a loader of Accelerate as it gets them, and of one that leaves out the first of them."""
        if isinstance(loader, DataLoaderShard):
            inner = loader.base_dataloader
            vars(inner)["__iter__"] = partial(self._seen, inner)  # it calls this method by its name
            setattr(loader, READ_AHEAD, self._see)

    def _train(self, train: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Trains; the loader gets its collator back, also where training raises."""
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
            loader._iterator = None  # its workers would go on with the other one

    def _seen(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yields the batches of a loader, and notes what was read of the latest one."""
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
        """Takes the batches of a step, and lets ranks plan those after the first one, whose pass begins at once."""
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
    """Carries the mark of a batch over to its copy."""
    prepared = prepare(inputs)
    if isinstance(inputs, Mapping) and any(prepared[name] is not value for name, value in inputs.items()):
        if (reading := reading_of(inputs)) is not None:
            mark(prepared, reading)
    return prepared
