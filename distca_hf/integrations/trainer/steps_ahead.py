"""Steps ahead: a Trainer's batches are read where they are collated, and ranks plan all those of a step at once.

    worker or main process     collator ──▶ batch with what was read of it
    get_batch_samples          takes that out of all batches of the step, ranks gather it, a thread plans
    passes                     find it by their tensors: no loss, metric or other model ever sees it

Batches that come otherwise (dispatched from rank 0, made by a policy, from a loader that is none of torch) are read in
their pass.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from distca_hf.batches.read_documents import ReadingCollator, mark_read, read_before, take_read
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

    def end(self) -> None:
        """Gives the loader its collator back."""
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
        """Takes the batches of a step. Of a step of one batch there is nothing to plan ahead."""
        batches, num_items = take(epoch_iterator, num_batches, device)
        watch = watch_of(self._model)
        if self._loader is not None and watch is not None:
            read = [take_read(batch) for batch in batches]
            if num_batches > 1:
                watch.begin_step(read, device)
        return batches, num_items


def _prepare_inputs(prepare: Callable[[Any], Any], inputs: Any) -> Any:
    """Carries the mark of a batch that was read over to its copy."""
    read, prepared = read_before(inputs) if isinstance(inputs, Mapping) else None, prepare(inputs)
    if read is not None:
        mark_read(prepared, read)
    return prepared
