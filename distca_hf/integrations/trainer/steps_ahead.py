"""Steps ahead: a Trainer's batches are read where they are collated, and ranks plan them before their passes.

    worker or main process     collator ──▶ batch with what was read of it
    Accelerate's loader        holds one batch more than it has handed out, to know the last one of an epoch
    get_batch_samples          takes what was read out of the batches of the step, and of that one: ranks gather it,
                               and a thread plans it while the first one of the step runs
    passes                     find it by their tensors: no loss, metric or other model ever sees it

Batches that come otherwise (dispatched from rank 0, made by a policy, from a loader that is none of torch) are read in
their pass.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from distca_hf.batches.read_documents import ENTRY, ReadDocuments, ReadingCollator, mark_read, read_before, take_read
from distca_hf.integrations.models.forward_watch import watch_of


class StepsAhead:
    """The steps of one Trainer.

    Args:
        model: its enabled model.
        replace: sets an attribute of the Trainer.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, replace: Callable[[object, str, object], None]) -> None:
        self._model = model
        self._loader: Any = None
        self._outer: Any = None
        replace(trainer, "train", partial(self._train, trainer.train))
        replace(trainer, "get_batch_samples", partial(self._batch_samples, trainer.get_batch_samples))
        if type(trainer)._prepare_inputs is Trainer._prepare_inputs:  # it only copies, on CPUs every time
            replace(trainer, "_prepare_inputs", partial(_prepare_inputs, trainer._prepare_inputs))

    def begin(self, loader: object) -> None:
        """Reads the batches of a training where they are collated.

        Args:
            loader: of the training. Dispatched batches are put together on rank 0 and cut again: they are not read.
        """
        self.end()
        inner, watch = getattr(loader, "base_dataloader", loader), watch_of(self._model)
        if watch is not None and isinstance(inner, DataLoader) and not isinstance(loader, DataLoaderDispatcher):
            self._loader = inner
            inner.collate_fn = ReadingCollator(inner.collate_fn, watch.reader)
            if isinstance(loader, DataLoaderShard):
                self._outer, loader.base_dataloader = loader, SeenLoader(inner)

    def _train(self, train: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Trains; the loader gets its collator back, also where training raises."""
        try:
            return train(*args, **kwargs)
        finally:
            self.end()

    def end(self) -> None:
        """Gives the loader its collator back."""
        if self._outer is not None:
            self._outer.base_dataloader, self._outer = self._loader, None
        if self._loader is not None:
            self._loader.collate_fn = self._loader.collate_fn.collate
            self._loader = None

    def _batch_samples(
        self,
        take: Callable[..., tuple[list[Any], Any]],
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[Any], Any]:
        """Takes the batches of a step, and lets ranks plan those that follow the first one: it begins at once."""
        batches, num_items = take(epoch_iterator, num_batches, device)
        watch = watch_of(self._model)
        if self._loader is not None and watch is not None:
            following = [take_read(batch) for batch in batches]
            held = None if self._outer is None else self._outer.base_dataloader.latest
            if held is not None and held not in following:
                following.append(held)
            if num_batches > 1 or self._outer is not None:
                watch.begin_step(following[1:], num_batches, device)
        return batches, num_items


class SeenLoader:
    """A loader whose latest batch is known by what was read of it.

    Attributes:
        latest: what was read; None after the last batch, and if it was not read.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.latest: ReadDocuments | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.latest = batch.get(ENTRY) if isinstance(batch, MutableMapping) else None
            yield batch
        self.latest = None

    def __getattr__(self, name: str) -> Any:
        """Returns what the loader has by this name; Accelerate asks it for more than batches."""
        return getattr(self.__dict__["_loader"], name)


def _prepare_inputs(prepare: Callable[[Any], Any], inputs: Any) -> Any:
    """Carries the mark of a batch that was read over to its copy."""
    read, prepared = read_before(inputs) if isinstance(inputs, Mapping) else None, prepare(inputs)
    if read is not None:
        mark_read(prepared, read)
    return prepared
