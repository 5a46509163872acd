"""Loader: from a dataset to placed micro-batches, planned and read ahead of the training loop.

    dataset ── lengths ──▶ epochs ──▶ placement ──▶ plan, routing ──▶ rows of this rank ──▶ batch on the device
               once                   `────────── background thread ──────────────────'    main thread

Every rank computes the same layouts and plans only from lengths and reads only the tokens it holds.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distca_hf.batches.base_loader import BaseLoader
from distca_hf.batches.meter import Meter
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor, Prefetcher, Preparer
from distca_hf.batches.preview import PlacedData
from distca_hf.comm.agreement import Announced, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.data.accumulation import SteppedEpoch
from distca_hf.data.collate import checked_contents
from distca_hf.data.documents import DocumentSource, Tokens
from distca_hf.data.epochs import EpochPacker, ResumedEpoch
from distca_hf.data.positions import SavedPosition, check_checksum, sum_of_documents, with_checksum
from distca_hf.data.rows import Reading
from distca_hf.errors import ConfigError
from distca_hf.parallel_context import shown_to_accelerate
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from distca_hf.data.documents import Dataset

log = get_logger(__name__)

# Version of `state_dict`. A checkpoint of another version holds a position in other units, and is refused.
STATE_VERSION = 4


class PlacedLoader(BaseLoader):
    """Iterates over placed micro-batches: dicts that a Transformers model takes as they are.

    `input_ids`, `position_ids`, `shift_labels`, `labels`, `attention_mask` (0 in padding rows): int64 `[1, rows]` on
    the device; `distca_plan`: the plan, opaque.

    One iteration is one epoch: `len(loader)` micro-batches, every document exactly once; the next iteration is the
    next epoch, in another order. It is not a torch `DataLoader`: it is sharded already, so Accelerate must not touch
    it.

    Args:
        dataset: tokenised map-style `datasets.Dataset`; see `DocumentSource`.
        planner: settings and facts about the model; for as many ranks as the transport has.
        transport: connects the ranks that share each micro-batch, and the attention servers of the planner.
        device: device of the batches.
        seed: decides, with the epoch's number, the order of documents.
        shuffle: False keeps the dataset's order.
        prefetch: micro-batches to prepare ahead; by default the setting of this name.
        micro_steps: micro-batches of an optimizer step; within a step, long documents train together. With a pipeline,
            steps are whole and shaped for its stages, and rows are `tokens_per_rank`.
        reading: which columns of the dataset count, and how.
        num_workers: processes that draw the rows of a transform; if 0, the iterating thread draws them.

    Raises:
        ConfigError: the planner's step shape does not allow this number of micro-batches per step.
        PackingError: the dataset cannot be packed.
    """

    preparer: Preparer

    def __init__(
        self,
        dataset: "Dataset",
        planner: PlacedPlanner,
        transport: Transport,
        device: torch.device,
        *,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int | None = None,
        micro_steps: int = 1,
        reading: Reading = Reading(),  # noqa: B008 (immutable)
        num_workers: int = 0,
    ) -> None:
        config = planner.config
        super().__init__(planner, transport, device, micro_steps, prefetch or config.prefetch)
        self.dataset = dataset
        self._seed, self._shuffle = seed, shuffle
        if planner.step_shape is not None:
            planner.step_shape.check(micro_steps)
        self._capacity_tokens = planner.capacity_tokens
        self._planner.kernel_times  # noqa: B018  raises here if the table cannot be read
        source_settings = planner.longest_tokens, config.overlong, planner.whole_documents, reading, seed
        self._source = DocumentSource(dataset, *source_settings)
        self.documents_truncated = self._source.documents_truncated  # of an epoch
        self._planner.check_kernel_times(int(self._source.document_tokens.max(initial=0)))
        lengths = self._source.document_tokens
        whole_steps = 1 if planner.step_shape is None else micro_steps
        self._packer = EpochPacker(lengths, self._capacity_tokens, seed, shuffle, planner.fits, whole_steps)
        self.preparer = Preparer(
            source=self._source, planner=self._planner, rank=transport.rank, device=device, num_workers=num_workers
        )
        self._next = Cursor()
        self._loaded: Cursor | None = None
        self._position = Cursor()
        self._is_left_early = False

    def __len__(self) -> int:
        """Returns the number of micro-batches of an epoch; the same for every epoch."""
        return self._packer.num_micro_batches

    @property
    def num_documents(self) -> int:
        """Documents of an epoch, after splitting."""
        return len(self._source)

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self._source.document_tokens.sum())

    @property
    def longest_document_tokens(self) -> int:
        """Tokens of the longest document, after splitting or truncating."""
        return int(self._source.document_tokens.max())

    def log_masks(self) -> None:
        """Logs which masks of the dataset decide what is learnt, and which do not."""
        if followed := self._source.masks:
            log.info("the dataset's %s: tokens with 0 there are not learnt", " and ".join(followed))
        if left := self._source.masks_left:
            log.info("the dataset's %s: not followed, as the Trainer itself does not follow them", " and ".join(left))

    @cached_property
    def contents(self) -> str:
        """Checksum of tokens and labels (see `data.collate`); reads documents when first asked for."""
        return checked_contents(self._source)

    def documents(self, epoch: int, micro_batch: int) -> list[Tokens]:
        """Returns the whole documents of one micro-batch, as they were before placement cut and ordered them."""
        source, chosen = self._source, self._packed(Cursor(epoch)).micro_batch(micro_batch).tolist()
        draws = source.draw(chosen, epoch)
        return [source.read(document, 0, int(source.document_tokens[document]), draws) for document in chosen]

    def set_epoch(self, epoch: int) -> None:
        """Begins this epoch at the next iteration, unless `load_state_dict` gave a position in it."""
        self._next, self._is_left_early = Cursor(epoch), False

    def restart(self) -> None:
        """Begins the first epoch at the next iteration."""
        self._next, self._loaded, self._position, self._is_left_early = Cursor(), None, Cursor(), False

    def state_dict(self) -> dict[str, object]:
        """Returns the position after the micro-batches handed out so far, with everything it depends on."""
        place = asdict(self._position)
        documents = place.pop("documents")
        return with_checksum({**self._identity(), **self._sizes, **place, "pipeline": self._shape}, documents)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position. If ranks x tokens_per_rank changed, packs the rest of
        the epoch anew: no document is lost, and none comes twice.

        Raises:
            ConfigError: a field is missing, wrong or changed; or the state is from another dataset or seed, or from
                the middle of an optimizer step of other sizes. Names both values.
        """
        # 1. The order of documents must be the same, or the position would mean other documents.
        position = SavedPosition.read(state, self._identity(), self.longest_document_tokens)
        # 2. If micro-batches depend on sizes, these must be the same, too.
        position.check_sizes(self._sizes, self._shape, self._planner.whole_documents)
        micro_batch, taken, steps_from = position.micro_batch, position.taken, position.steps_from
        # 3. If micro-batches hold another number of tokens, the rest is packed anew, and counted from its beginning.
        if position.sizes != self._sizes:
            steps_from = micro_batch
        if position.capacity_tokens != self._capacity_tokens:
            log.warning(
                "micro-batches held %d tokens when the position was saved and hold %d now: the rest of the "
                "epoch is packed anew",
                position.capacity_tokens,
                self._capacity_tokens,
            )
            taken = (*taken, (position.capacity_tokens, micro_batch)) if position.is_within_epoch else ()
            micro_batch = steps_from = 0
        saved = Cursor(position.epoch, micro_batch, taken, steps_from)
        packed = self._packed(saved)
        if micro_batch > packed.num_micro_batches:
            raise ConfigError(
                f"the saved loader position has micro_batch={micro_batch}, and epoch {position.epoch} has "
                f"{packed.num_micro_batches}"
            )
        # 4. Earlier documents must be the ones that had been trained when the state was saved.
        saved = replace(saved, documents=self._documents_before(packed, micro_batch))
        check_checksum(state, self.state_dict(), saved.documents)
        self._go_on_at(saved, packed)

    def _documents_before(self, packed: SteppedEpoch, micro_batch: int) -> int:
        """Returns the sum of the documents of an epoch that come before one of its micro-batches."""
        return sum_of_documents(np.arange(len(self._source))) - sum_of_documents(packed.left(micro_batch))

    def _go_on_at(self, cursor: Cursor, packed: SteppedEpoch) -> bool:
        """Makes the next iteration continue there. At the end of an epoch, begins the next one and returns False."""
        is_left = cursor.micro_batch < packed.num_micro_batches
        self._loaded = self._position = cursor if is_left else Cursor(cursor.epoch + 1)
        return is_left

    def skip(self, num_batches: int) -> bool:
        """Skips the first micro-batches of the next iteration; returns whether any of its epoch are left."""
        begin = self._next if self._loaded is None else self._loaded
        packed, later = self._packed(begin), begin.micro_batch + num_batches
        documents = self._documents_before(packed, later)
        return self._go_on_at(replace(begin, micro_batch=later, documents=documents), packed)

    def resumed_epoch(self, accumulation_steps: int) -> ResumedEpoch:
        """Counts the rest of the epoch from the loader's position, in optimizer steps of this many micro-batches."""
        at = self._position
        return self._packer.resumed(at.epoch, at.taken, at.micro_batch, accumulation_steps)

    def _packed(self, cursor: Cursor) -> SteppedEpoch:
        """Returns the epoch of a position, or its rest if that was packed anew because micro-batches changed their
        size."""
        packed = self._packer.rest(cursor.epoch, cursor.taken)
        return self._planner.regroup(packed, self._source.document_tokens, self._micro_steps, cursor.steps_from)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the micro-batches from the loader's position to the end of its epoch."""
        begin = self._next if self._loaded is None else self._loaded
        packed = self._packed(begin)
        is_begun_again = self._is_left_early and self._loaded is None
        if is_begun_again and self._position.micro_batch > 1:  # a first batch is often only looked at
            log.warning(
                "epoch %d was left after micro-batch %d of %d, and begins again: its first documents come twice. Call "
                "loader.set_epoch(%d) for the next epoch",
                begin.epoch,
                self._position.micro_batch,
                packed.num_micro_batches,
                begin.epoch + 1,
            )
        self._is_left_early = True
        self._loaded, self._next, self._position = None, Cursor(begin.epoch), begin
        data = PlacedData(
            planner=self._planner,
            document_tokens=self._source.document_tokens,
            micro_batches=copy(packed),  # the thread's own remembers which optimizer step it is in
            first=begin.micro_batch,
            micro_steps=self._micro_steps,
            per_epoch=len(self),
        )
        meter = Meter(self._transport, self._device, None)
        meter.begin(self)
        preparer = self.preparer  # the thread holds only this: a dropped loader ends its thread
        documents = begin.documents
        ahead_of = Prefetcher(lambda: preparer.rest(begin, packed), self._prefetch, self.times, preparer.finish)
        with closing(ahead_of.__iter__()) as ahead, shown_to_accelerate(self):
            for micro_batch in range(begin.micro_batch, packed.num_micro_batches):
                number = self._number(Cursor(begin.epoch, micro_batch))
                with Announced(self._transport, number, Occasion.TAKE):
                    self._source.check_unchanged()
                    facts = self._facts  # reads documents before the first micro-batch
                    prepared = next(ahead)
                batch = self._deliver(prepared, data, self._number(prepared.cursor), facts)
                documents += sum_of_documents(prepared.documents)
                self._position = replace(begin, micro_batch=micro_batch + 1, documents=documents)
                self.end_of_dataloader = micro_batch + 1 == packed.num_micro_batches
                if self.end_of_dataloader:  # known before the next batch is requested
                    self._next = self._position = Cursor(begin.epoch + 1)
                    self._is_left_early = False
                use = batch["distca_plan"].use  # the training loop may take the plan out of the batch
                yield batch
            if self.writes_epochs and use.trained:
                log.info("%s", meter.read_here(self).in_words(f"epoch {begin.epoch}"))

    @property
    def _facts(self) -> dict[str, object]:
        """Facts of the data that ranks must share."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "pipeline": self._shape,
            "number of documents": len(self._source),
            "lengths of documents": self._source.fingerprint,
            "contents of documents": self.contents,
        }

    def _number(self, cursor: Cursor) -> int:
        """Returns the number of a micro-batch, counted over all epochs."""
        return cursor.epoch * len(self) + cursor.micro_batch

    @property
    def _shape(self) -> tuple[int, ...]:
        """Numbers of the step shape, as saved; empty without one."""
        return () if self._planner.step_shape is None else self._planner.step_shape.numbers

    def _identity(self) -> dict[str, object]:
        return {
            "version": STATE_VERSION,
            "dataset": self._source.fingerprint,
            "contents": self.contents,
            "documents": len(self._source),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "whole_documents": self._planner.whole_documents,
        }
