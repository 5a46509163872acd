"""Step ahead: gathers the document lengths of micro-batches before their passes begin, and plans them in a thread.

    step begins              the batches that Trainer or its loader already holds are noted
    attention, first pass    they are read; ranks agree on their number, and gather all lengths at once
    end of the first pass    a thread starts to plan micro-batches 2, 3, ..., and the first one of the next step
    later passes             copy their plan to the device

The host does this only while the device is busy, and never waits: lengths arrive while the pass runs. The thread
touches neither process groups nor device streams.

A plan is used in the pass of its batch if all ranks show that they have it. Otherwise that pass gathers lengths and
plans, as for a batch that was not known before.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from distca_hf.arrays import IntArray, as_int_array, offsets
from distca_hf.batches.read_documents import ReadDocuments, Reading
from distca_hf.comm.transport import Gather, Transport


Prepared = TypeVar("Prepared")


# Names of the numbers that ranks show each other: batches that are known and read, and the documents in them.
FOLLOWING, DOCUMENTS = "batches that follow", "documents that follow"


class _Gathering(NamedTuple):
    """Batches whose lengths are being gathered."""

    documents: Sequence[ReadDocuments]
    gather: Gather
    where: str


class StepAhead(Generic[Prepared]):
    """Plans micro-batches that are known before their pass.

    Args:
        prepare: plans a micro-batch; called in a thread with the document lengths of each rank, and whether to pin
            memory.
    """

    def __init__(self, transport: Transport, prepare: Callable[[Sequence[IntArray], bool], Prepared]) -> None:
        self._transport, self._prepare = transport, prepare
        self._readings: Sequence[Reading | None] = ()
        self._documents: list[ReadDocuments] = []
        self._step_batches = 0
        self._gathering: _Gathering | None = None
        self._pins_on: torch.device | None = None
        self._last_number = 0
        # Plans of batches that no pass asks for are forgotten with these.
        self._planned = WeakKeyDictionary[ReadDocuments, tuple[int, Future[Prepared]]]()

    def begin(self, readings: Sequence[Reading | None], step_batches: int, device: torch.device) -> None:
        """Notes which batches are known when a step begins.

        Args:
            readings: readings of the batches that follow the first one of the step; None for one that has none.
        """
        self._readings, self._step_batches = readings, step_batches
        self._pins_on = device if device.type == "cuda" else None

    def take_step_batches(self) -> int:
        """Returns the number of micro-batches in the step, in the first pass after `begin`; 0 in later passes."""
        step_batches, self._step_batches = self._step_batches, 0
        return step_batches

    def show(self) -> dict[str, int]:
        """Reads the batches that follow, and returns their number and the number of their documents.

        Both are 0 if one batch cannot be read or keeps its padding, and in later passes.
        """
        documents = [None if reading is None else reading.documents for reading in self._readings]
        read = [one for one in documents if one is not None and one.lengths is not None]
        self._documents, self._readings = read if len(read) == len(documents) else [], ()
        for one in self._documents if self._pins_on is not None else ():
            if one.padded is not None:
                one.padded.pin()
        return {FOLLOWING: len(self._documents), DOCUMENTS: sum(map(len, _lengths(self._documents)))}

    def seen(self, shown: Mapping[str, list[int]], micro_batch: int) -> None:
        """Gathers the lengths of these batches, if all ranks know equally many of them. A collective call.

        Args:
            shown: the numbers of all ranks, by name.
        """
        documents, self._documents = self._documents, []
        if {*shown[FOLLOWING]} != {len(documents)} or not documents:
            return
        lengths, most_documents = _lengths(documents), max(shown[DOCUMENTS])
        values = [*map(len, lengths), *(tokens for of_batch in lengths for tokens in of_batch.tolist())]
        filled_up = [*values, *[0] * (len(lengths) + most_documents - len(values))]
        where = f"micro-batch {micro_batch}, document lengths of its step"
        self._gathering = _Gathering(documents, self._transport.gather(filled_up, where), where)

    def start(self) -> None:
        """Starts to plan the batches whose lengths were gathered, if there are any.

        Raises:
            PeerLostError: a rank was lost in the meantime.
        """
        if self._gathering is None:
            return
        (documents, gather, where), self._gathering = self._gathering, None
        of_ranks, device = [_divided(row, len(documents), where) for row in gather.wait()], self._pins_on
        # Pinning would open a context on the first GPU otherwise.
        enter = None if device is None else partial(torch.cuda.set_device, device)
        thread = ThreadPoolExecutor(1, "distca-ahead", initializer=enter)
        for read, lengths in zip(documents, zip(*of_ranks, strict=True), strict=True):
            self._last_number += 1
            self._planned[read] = self._last_number, thread.submit(self._prepare, lengths, device is not None)
        thread.shutdown(wait=False)  # it ends when it has planned them all

    def take(self, read: ReadDocuments) -> tuple[int, Future[Prepared] | None]:
        """Returns the plan of a micro-batch, and its number among all that were planned ahead, counted from 1. Returns
        0 and None if it was not planned ahead, or was taken before."""
        return self._planned.pop(read, (0, None))


def _lengths(documents: Sequence[ReadDocuments]) -> list[IntArray]:
    return [read.lengths for read in documents if read.lengths is not None]


def _divided(row: list[int], num_batches: int, where: str) -> list[IntArray]:
    """Returns the lengths of each micro-batch of a rank."""
    borders = num_batches + offsets(as_int_array(row[:num_batches], where))
    return [as_int_array(row[start:stop], where) for start, stop in pairwise(borders)]
