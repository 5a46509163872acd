"""Prepare: one rank's part of a micro-batch, made on the host in a background thread, before it is asked for.

A `Preparer` places, plans, routes and reads. A `Prefetcher` runs it ahead and hands its micro-batches over in order.
Neither uses a process group or the loader.
"""

import queue
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.data.accumulation import SteppedEpoch
from distca_hf.data.collate import Cut, RankRows, collate, cuts_of
from distca_hf.data.documents import DocumentSource
from distca_hf.layout import Layout
from distca_hf.placement.place import work_in_order
from distca_hf.planning.plan import Plan, PlanFacts
from distca_hf.planning.served import Servers
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.telemetry import LoaderTimes


Item = TypeVar("Item")

# How often a thread that waits for room looks whether it is still wanted.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Cursor:
    """Position in the data: the next micro-batch to hand out.

    Attributes:
        taken: parts of the epoch that were taken before in micro-batches of another size, as (capacity_tokens,
            micro-batches). A run may go on with other ranks than it began with.
        steps_from: a micro-batch of the epoch that an optimizer step begins with.
    """

    epoch: int = 0
    micro_batch: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    steps_from: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A micro-batch as the background thread leaves it: host tensors (pinned if they go to a GPU) and host maps.

    Attributes:
        columns: `[1, rows]` tensors by their names among the arguments of models.
        documents_checksum: of the documents that form the micro-batch.
        kinds: rank plans for each mask that layers attend with, and facts.
        cuts: cuts of documents beside this rank's segments.
        plan: the plan of all ranks, to hand to attention servers; None if there are none.
        layout: the rows of the ranks that train.
        servers: attention servers that the plan is for.
    """

    cursor: Cursor
    columns: dict[str, torch.Tensor]
    kinds: PinnedKinds
    fingerprint: int
    label_tokens: int
    documents_checksum: int
    cuts: list[Cut]
    plan_seconds: float
    plan: Plan | None = None
    layout: Layout | None = None
    servers: Servers | None = None

    @property
    def facts(self) -> PlanFacts:
        """Facts of all layers together."""
        return self.kinds.facts


@dataclass
class Preparer:
    """Prepares micro-batches of one rank."""

    source: DocumentSource
    planner: PlacedPlanner
    rank: int
    device: torch.device

    def rest(self, begin: Cursor, epoch: SteppedEpoch) -> Iterator[Prepared]:
        """Yields micro-batches from `begin` to the end of its epoch."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # or pinning would open a context on the first GPU
        for micro_batch in range(begin.micro_batch, epoch.num_micro_batches):
            yield self.prepare(epoch, replace(begin, micro_batch=micro_batch))

    def prepare(self, epoch: SteppedEpoch, cursor: Cursor) -> Prepared:
        """Places, plans and reads one micro-batch."""
        began = time.perf_counter()
        documents = epoch.micro_batch(cursor.micro_batch)
        document_tokens = self.source.document_tokens[documents]
        planner = self.planner  # another one may come meanwhile
        layout = planner.layout(document_tokens, epoch.layout(cursor.micro_batch))
        plan = planner.plan_layout(layout)
        kinds = self._routed(plan, document_tokens)
        pin = self.device.type == "cuda"
        rows = collate(plan.layout, self.rank, documents, self.source)
        return Prepared(
            cursor=cursor,
            columns=_host_tensors(rows, pin),
            kinds=kinds,
            fingerprint=plan.fingerprint,
            label_tokens=rows.num_labels,
            documents_checksum=zlib.crc32(documents.astype("<i8").tobytes()),
            cuts=cuts_of(plan.layout, self.rank, documents, self.source),
            plan_seconds=time.perf_counter() - began,
            plan=None if planner.servers is None else plan,
            layout=layout,
            servers=planner.servers,
        )

    def planned_for(self, servers: Servers | None, prepared: Prepared) -> Prepared:
        """Returns the micro-batch planned for other attention servers; its rows stay. So are those that come later."""
        if servers == prepared.servers:
            return prepared
        assert prepared.layout is not None
        planner = self.planner = replace(self.planner, servers=servers)
        plan = planner.plan_layout(prepared.layout)
        return replace(
            prepared,
            kinds=self._routed(plan, prepared.layout.document_tokens),
            fingerprint=plan.fingerprint,
            plan=None if servers is None else plan,
            servers=servers,
        )

    def _routed(self, plan: Plan, document_tokens: IntArray) -> PinnedKinds:
        """Routes all kinds of layers; facts compare them with documents packed in order."""
        planner = self.planner
        return PinnedKinds.prepare(
            plan,
            self.rank,
            planner.num_chunks,
            planner.layer_masks,
            lambda mask: work_in_order(document_tokens, planner.num_ranks, mask),
            pin=self.device.type == "cuda",
            num_servers=0 if planner.servers is None else planner.servers.count,
        )


def _host_tensors(rows: RankRows, pin: bool) -> dict[str, torch.Tensor]:
    """Returns the arrays as `[1, rows]` tensors by name."""
    tensors = {name: torch.from_numpy(array).unsqueeze(0) for name, array in vars(rows).items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """The last thing in the queue."""


class Prefetcher(Generic[Item]):
    """Items of `make()`, up to `depth` of them made before they are asked for.

    The thread never touches a process group. It ends with its iterator, when the consumer stops, or with the main
    thread. A daemon thread would be cut off in the midst of a call, which may abort the process.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int, times: LoaderTimes) -> None:
        self._make = make
        self._queue: queue.Queue[Item | _Failure | type[_End]] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._times = times

    def __iter__(self) -> Generator[Item, None, None]:
        """Yields items in order; an exception of the iterator is raised in its place."""
        thread = threading.Thread(target=self._run, name="distca-ahead")
        thread.start()
        try:
            while True:
                asked = time.perf_counter()
                item = self._queue.get()
                if self._times.begun:  # nothing can be ahead of the very first item
                    self._times.wait_seconds += time.perf_counter() - asked
                self._times.begun = True
                if item is _End:
                    return
                if isinstance(item, _Failure):
                    raise item.error
                handed_over = time.perf_counter()
                yield item  # type: ignore[misc]
                self._times.step_seconds += time.perf_counter() - handed_over
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        try:
            for item in self._make():
                if not self._put(item):
                    return
            self._put(_End)
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: "Item | _Failure | type[_End]") -> bool:
        """Puts an item when there is room; False if the consumer has stopped."""
        while not self._stopped.is_set():
            if not threading.main_thread().is_alive():
                return False
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False
