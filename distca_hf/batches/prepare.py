"""Prepare: makes one rank's part of a micro-batch on the host, in a background thread, before training asks for it.

A `Preparer` places, plans, routes and reads. A `Prefetcher` runs it ahead and hands over its micro-batches in order.
Neither uses a process group or the loader.

Worker processes draw the rows of a transform, or the thread that asks for the micro-batch does: all threads of a
process share the generators from which transforms draw.
"""

import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.data.accumulation import SteppedEpoch
from distca_hf.data.collate import Cut, RankRows, collate, cuts_of
from distca_hf.data.documents import NO_DRAWS, DocumentSource
from distca_hf.data.rows import Draws
from distca_hf.errors import PackingError
from distca_hf.layout import Layout
from distca_hf.placement.place import work_in_order
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import ExtraRanks, Plan, PlanFacts
from distca_hf.runtime.layer_kinds import PinnedKinds, Planned
from distca_hf.runtime.posted import PostingTransport
from distca_hf.telemetry import LoaderTimes


Item = TypeVar("Item")

# How often a thread that waits for room checks whether it is still needed.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Cursor:
    """Position in the data: the next micro-batch to hand out.

    Attributes:
        taken: parts of the epoch taken earlier in micro-batches of another size, as (capacity_tokens, micro-batches).
            A run may continue with other ranks than it began with.
        steps_from: a micro-batch of the epoch with which an optimizer step begins.
        documents: `sum_of_documents` of the earlier documents of this epoch.
    """

    epoch: int = 0
    micro_batch: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    steps_from: int = 0
    documents: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A micro-batch as the background thread makes it: host tensors (pinned if they go to a GPU) and host maps.

    Attributes:
        columns: `[1, rows]` tensors by the names of models' arguments; empty until rows are read.
        kinds: rank plans for each mask that layers attend with, and facts.
        cuts: cuts of documents next to this rank's segments, once rows are read.
        plan: the plan of all ranks, for extra ranks; None if there are none.
        layout: the rows of the ranks that train.
        documents: `[documents]` index in the dataset of each document of the layout.
        extra_ranks: see `PlacedPlanner`.
    """

    cursor: Cursor
    kinds: PinnedKinds
    fingerprint: int
    documents: IntArray
    layout: Layout
    plan_seconds: float
    plan: Plan | None = None
    extra_ranks: ExtraRanks | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    label_tokens: int = 0
    cuts: list[Cut] = field(default_factory=list)

    @property
    def facts(self) -> PlanFacts:
        """Facts of all layers together."""
        return self.kinds.facts

    @property
    def documents_checksum(self) -> int:
        """Checksum of the micro-batch's documents."""
        return zlib.crc32(self.documents.astype("<i8").tobytes())


@dataclass(kw_only=True)
class HostPlans:
    """Plans micro-batches on the host, and adds the rows of one rank."""

    planner: PlacedPlanner
    rank: int
    device: torch.device

    def plan(self, cursor: Cursor, documents: IntArray, document_tokens: IntArray, placed: Layout | None) -> Prepared:
        """Places and plans one micro-batch, without rows.

        Args:
            documents, document_tokens: `[documents]` number and length of each.
            placed: their placement, if already made.
        """
        planner = self.planner  # it may be replaced meanwhile
        layout = planner.layout(document_tokens, placed)
        plan = planner.plan_layout(layout)
        return Prepared(
            cursor=cursor,
            kinds=self._routed(plan, document_tokens),
            fingerprint=plan.fingerprint,
            documents=documents,
            layout=layout,
            plan_seconds=0,
            plan=None if planner.extra_ranks is None else plan,
            extra_ranks=planner.extra_ranks,
        )

    def with_rows(self, prepared: Prepared, rows: RankRows, cuts: list[Cut]) -> Prepared:
        """Returns the micro-batch with the rows of this rank."""
        arrays = {name: values for name, values in vars(rows).items() if name != "inputs"} | dict(rows.inputs)
        columns = {name: torch.from_numpy(array).unsqueeze(0) for name, array in arrays.items()}
        if self.device.type == "cuda":
            columns = {name: tensor.pin_memory() for name, tensor in columns.items()}
        return replace(prepared, columns=columns, label_tokens=rows.num_labels, cuts=cuts)

    def use_device(self) -> None:
        """Makes this thread use its GPU. Otherwise pinning memory would open a context on the first GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def planned_for(self, extra_ranks: ExtraRanks | None, prepared: Prepared) -> Prepared:
        """Returns the micro-batch, planned for other extra ranks, with the same rows. Later ones are planned for them,
        too."""
        if extra_ranks == prepared.extra_ranks:
            return prepared
        planner = self.planner = replace(self.planner, extra_ranks=extra_ranks)
        plan = planner.plan_layout(prepared.layout)
        return replace(
            prepared,
            kinds=self._routed(plan, prepared.layout.document_tokens),
            fingerprint=plan.fingerprint,
            plan=None if extra_ranks is None else plan,
            extra_ranks=extra_ranks,
        )

    def _routed(self, plan: Plan, document_tokens: IntArray) -> PinnedKinds:
        """Routes all kinds of layers; facts compare them with documents packed in order."""
        planner = self.planner
        routed = RoutedKinds.of(
            plan,
            self.rank,
            planner.num_chunks,
            planner.layer_masks,
            lambda mask: work_in_order(document_tokens, planner.num_ranks, mask),
            0 if planner.extra_ranks is None else planner.extra_ranks.count,
        )
        return PinnedKinds.prepare(routed, self.device.type == "cuda", planner.halo_tokens)


@dataclass(kw_only=True)
class Preparer(HostPlans):
    """Prepares micro-batches of one rank.

    Attributes:
        num_workers: processes that draw the rows of a transform.
    """

    source: DocumentSource
    num_workers: int = 0

    def rest(self, begin: Cursor, epoch: SteppedEpoch) -> Iterator[Prepared]:
        """Yields micro-batches from `begin` to the end of its epoch, with their rows. Without workers, the rows of a
        transform are left to `finish`."""
        self.use_device()
        planned = (
            self.prepare(epoch, replace(begin, micro_batch=micro_batch))
            for micro_batch in range(begin.micro_batch, epoch.num_micro_batches)
        )
        return self._with_workers(planned) if self.source.are_drawn and self.num_workers else planned

    def prepare(self, epoch: SteppedEpoch, cursor: Cursor) -> Prepared:
        """Places and plans one micro-batch, and reads its rows unless they are to be drawn."""
        began = time.perf_counter()
        documents = epoch.micro_batch(cursor.micro_batch)
        placed = epoch.layout(cursor.micro_batch)
        prepared = self.plan(cursor, documents, self.source.document_tokens[documents], placed)
        if not self.source.are_drawn:
            prepared = self._read(prepared, NO_DRAWS)
        return replace(prepared, plan_seconds=time.perf_counter() - began)

    def finish(self, prepared: Prepared) -> Prepared:
        """Returns the micro-batch with its rows, in the thread that trains."""
        if prepared.columns:
            return prepared
        return self._read(prepared, self.source.draw(self._held(prepared), prepared.cursor.epoch))

    def _with_workers(self, planned: Iterator[Prepared]) -> Iterator[Prepared]:
        """Yields micro-batches whose rows worker processes have drawn, one process for each."""
        waiting: deque[Prepared] = deque()

        def asked_for() -> Iterator[tuple[IntArray, int]]:
            for prepared in planned:
                waiting.append(prepared)
                yield self._held(prepared), prepared.cursor.epoch

        drawn: DataLoader[Draws | PackingError] = DataLoader(
            _DrawnBatches(self.source),
            batch_size=None,
            sampler=asked_for(),
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # the global one is the training's
        )
        for draws in drawn:
            if isinstance(draws, PackingError):
                raise draws
            yield self._read(waiting.popleft(), draws)

    def _held(self, prepared: Prepared) -> IntArray:
        """Returns the documents of the source of which this rank holds parts."""
        held = [document for document, _, _ in prepared.layout.held_by(self.rank)]
        return prepared.documents[np.array(held, dtype=np.int64)]

    def _read(self, prepared: Prepared, draws: Draws) -> Prepared:
        """Returns the micro-batch with the rows of this rank."""
        of_rank = prepared.layout, self.rank, prepared.documents, self.source, draws
        return self.with_rows(prepared, collate(*of_rank), cuts_of(*of_rank))


class Replanner:
    """Plans a micro-batch again when the ranks without tokens that take part have changed."""

    def __init__(self, transport: PostingTransport, preparer: HostPlans, prepared: Prepared, micro_batch: int) -> None:
        self._transport, self._preparer, self._micro_batch = transport, preparer, micro_batch
        self._prepared, self._membership = replace(prepared, columns={}), transport.membership

    def __call__(self) -> Planned | None:
        """Returns the current plan; None if it has not changed."""
        if self._membership == self._transport.membership:
            return None
        self._membership = self._transport.membership
        prepared = self._prepared = self._preparer.planned_for(self._transport.extra_ranks, self._prepared)
        device, num_chunks = self._preparer.device, self._preparer.planner.num_chunks
        posted = self._transport.post(prepared.plan, self._micro_batch, num_chunks)
        return prepared.kinds.planned(device, prepared.fingerprint, posted)


class _DrawnBatches(Dataset[Draws | PackingError]):
    """Rows of a micro-batch, as a worker process draws them."""

    def __init__(self, source: DocumentSource) -> None:
        self._source = source

    def __getitem__(self, asked_for: tuple[IntArray, int]) -> Draws | PackingError:
        """Returns the rows; or the error, which torch would raise with a call stack in its message."""
        try:
            return self._source.draw(*asked_for)
        except PackingError as error:
            return error


def _as_it_is(drawn: Any) -> Any:
    return drawn


class Prefetcher(Generic[Item]):
    """Items of `make()`, of which up to `depth` are made ahead. The thread that asks for an item runs `finish` on it.

    The thread ends with its iterator, when the consumer stops, or with the main thread. A daemon thread would be cut
    off in the middle of a call, which may abort the process.

    If `make()` has collective calls (`in_step`), an item is made on all ranks or on none: when the consumer stops, the
    thread first makes what it was asked for, and then closes the iterator. Consumers that take equally many items have
    asked for equally many. Without `in_step`, the thread must not use a process group.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Item]],
        depth: int,
        times: LoaderTimes,
        finish: Callable[[Item], Item] = lambda item: item,
        in_step: bool = False,
    ) -> None:
        self._make, self._finish, self._in_step = make, finish, in_step
        # Items, then what ended `make`: StopIteration, or the error that it raised.
        self._queue: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue()
        self._asked_for = threading.Semaphore(depth + 1)  # one more is made before there is room for it
        self._stopped = threading.Event()
        self._times = times

    def __iter__(self) -> Generator[Item, None, None]:
        """Yields items in order; raises an exception of the iterator in its place."""
        thread = threading.Thread(target=self._run, name="distca-ahead")
        thread.start()
        try:
            while True:
                asked = time.perf_counter()
                item, ended = self._queue.get()
                self._asked_for.release()
                if ended is None:
                    item = self._finish(cast(Item, item))
                if self._times.begun:  # nothing can be ahead of the very first item
                    self._times.wait_seconds += time.perf_counter() - asked
                self._times.begun = True
                if isinstance(ended, StopIteration):
                    return
                if ended is not None:
                    raise ended
                handed_over = time.perf_counter()
                yield cast(Item, item)
                self._times.step_seconds += time.perf_counter() - handed_over
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        ended: BaseException = StopIteration()
        try:
            items = self._make()
            while self._is_asked_for():
                self._queue.put((next(items), None))
            if isinstance(items, Generator):
                items.close()
        except BaseException as error:
            ended = error
        self._queue.put((None, ended))

    def _is_asked_for(self) -> bool:
        """Waits until another item is asked for; False if the consumer has stopped."""
        while not self._asked_for.acquire(timeout=POLL_SECONDS):
            if self._stopped.is_set() or not threading.main_thread().is_alive():
                return False
        return self._in_step or not self._stopped.is_set()
