"""Step ahead: gathers the lengths of micro-batches before their passes begin, and plans them in a thread.

    step begins              agreement on the batches that Trainer, or its loader, holds already
    plan of the first pass   one gather of all their lengths
    end of the first pass    a thread plans them: 2, 3, ..., and the first one of the next step
    later passes             copy their plan to the device

The host never waits here: what ranks show each other arrives while the first pass waits for its own agreement. The
thread touches neither process groups nor a device's stream.

A plan is used in the pass of its batch if all ranks show each other that they have it. Otherwise that pass gathers and
plans, as for a batch that was not known before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from distca_hf.arrays import IntArray, offsets
from distca_hf.batches.read_documents import ReadDocuments
from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Gather, Transport
from distca_hf.layout import as_int_array


Prepared = TypeVar("Prepared")


class _Announced(NamedTuple):
    """Batches that ranks agree on, or whose lengths are being gathered."""

    documents: Sequence[ReadDocuments | None]
    micro_batch: int
    device: torch.device
    agreement: Agreement
    gather: Gather | None = None

    @property
    def where(self) -> str:
        return f"micro-batch {self.micro_batch}, document lengths of its step"


class StepAhead(Generic[Prepared]):
    """Micro-batches that are known before their pass.

    Args:
        prepare: plans a micro-batch in a thread, given the document lengths of each rank, and whether to pin memory.
    """

    def __init__(self, transport: Transport, prepare: Callable[[Sequence[IntArray], bool], Prepared]) -> None:
        self._transport, self._prepare = transport, prepare
        self._announced: _Announced | None = None
        self._last_number = 0
        # Plans of batches that no pass asks for are forgotten with these.
        self._planned = WeakKeyDictionary[ReadDocuments, tuple[int, Future[Prepared]]]()

    def begin(
        self, documents: Sequence[ReadDocuments | None], step_batches: int, micro_batch: int, device: torch.device
    ) -> None:
        """Shows all ranks which batches are known. A collective call that does not wait.

        Nothing is planned ahead if some rank has not read all of them, knows of more than others, or keeps one padded.

        Args:
            documents: of the batches that follow the first one of the step.
            step_batches: micro-batches of the step.
            micro_batch: number of the first one of the step.
            device: where the batches are.
        """
        lengths = _lengths(documents)
        agreement = Agreement.start(
            self._transport,
            Occasion.STEP,
            micro_batch,
            {"number of micro-batches in this step": step_batches},
            {
                "batches": len(documents),
                "is read": int(len(lengths) == len(documents)),
                "documents": sum(map(len, lengths)),
            },
        )
        self._announced = _Announced(documents, micro_batch, device, agreement)

    def gather(self) -> None:
        """Gathers the lengths of these batches. A collective call, in the first pass after `begin`.

        Raises:
            PlanMismatchError, PeerLostError: ranks have other numbers of micro-batches, or are doing something else.
        """
        announced, self._announced = self._announced, None
        if announced is None or announced.gather is not None:
            self._announced = announced
            return
        shown = announced.agreement.wait(Scope.ROWS)
        if not all(shown["is read"]) or len({*shown["batches"]}) > 1 or not announced.documents:
            return
        lengths = _lengths(announced.documents)
        values = [*map(len, lengths), *(tokens for of_batch in lengths for tokens in of_batch.tolist())]
        filled_up = [*values, *[0] * (len(lengths) + max(shown["documents"]) - len(values))]
        self._announced = announced._replace(gather=self._transport.gather(filled_up, announced.where))

    def start(self) -> None:
        """Starts to plan the batches whose lengths were gathered, if there are any.

        Raises:
            PeerLostError: a rank was lost since.
        """
        announced = self._announced
        if announced is None or announced.gather is None:
            return
        self._announced = None
        rows, documents, device = announced.gather.wait(), announced.documents, announced.device
        of_ranks = [_divided(row, len(documents), announced.where) for row in rows]
        # Pinning would open a context on the first GPU otherwise.
        enter = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        thread = ThreadPoolExecutor(1, "distca-ahead", initializer=enter)
        for read, lengths in zip(documents, zip(*of_ranks, strict=True), strict=True):
            assert read is not None
            self._last_number += 1
            planned = thread.submit(self._prepare, lengths, device.type == "cuda")
            self._planned[read] = self._last_number, planned
        thread.shutdown(wait=False)  # it ends when it has planned them all

    def take(self, read: ReadDocuments) -> tuple[int, Future[Prepared] | None]:
        """Returns the number of a micro-batch among all that were planned ahead, from 1 on, and its plan; 0 and None
        if it was not, or was taken before."""
        return self._planned.pop(read, (0, None))


def _lengths(documents: Sequence[ReadDocuments | None]) -> list[IntArray]:
    """Returns the lengths of the batches that are read, and do not stay padded."""
    return [read.lengths for read in documents if read is not None and read.lengths is not None]


def _divided(row: list[int], num_batches: int, where: str) -> list[IntArray]:
    """Returns the lengths of each micro-batch of a rank."""
    borders = num_batches + offsets(as_int_array(row[:num_batches], where))
    return [as_int_array(row[start:stop], where) for start, stop in pairwise(borders)]
