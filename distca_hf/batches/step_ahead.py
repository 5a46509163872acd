"""Step ahead: gathers the lengths of all micro-batches of an optimizer step at once, and plans them in a thread.

    step begins     agreement, one gather
    thread          plans 1   2   3 ...          on the host: it never touches a process group or a device's stream
    passes                1       2       3      copy their plan to the device

A plan is used in the pass of its batch, where all ranks show each other that they have it. Otherwise that pass gathers
and plans, as one of a batch that no step knew.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch

from distca_hf.arrays import IntArray, offsets
from distca_hf.batches.read_documents import ReadDocuments
from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.layout import as_int_array


# What planning a micro-batch returns.
Result = TypeVar("Result")


class StepAhead(Generic[Result]):
    """The micro-batches of the step that a model trains on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._planned: dict[ReadDocuments, tuple[int, Future[Result]]] = {}

    def begin(
        self,
        documents: Sequence[ReadDocuments | None],
        micro_batch: int,
        plan: Callable[[Sequence[IntArray]], Result],
        device: torch.device,
    ) -> None:
        """Gathers the lengths of a step, and starts to plan it. A collective call of all ranks.

        Nothing is planned ahead if some rank has not read all its batches, or keeps one of them padded.

        Args:
            documents: of the micro-batches.
            micro_batch: number of the first of them.
            plan: plans a micro-batch in a thread, given the document lengths of each rank.
            device: where the batches are.

        Raises:
            PlanMismatchError, PeerLostError: ranks have other numbers of micro-batches, or are doing something else.
        """
        self._planned.clear()
        lengths = [read.lengths for read in documents if read is not None and read.lengths is not None]
        is_read = len(lengths) == len(documents)
        counts = [len(of_batch) for of_batch in lengths]
        agreement = Agreement.start(
            self._transport,
            Occasion.STEP,
            micro_batch,
            {"number of micro-batches in this step": len(documents)},
            {"is read": int(is_read), "documents": sum(counts)},
        )
        shown = agreement.wait(Scope.ROWS)
        if not documents or not all(shown["is read"]):
            return
        values = [*counts, *(tokens for of_batch in lengths for tokens in of_batch.tolist())]
        filled_up = [*values, *[0] * (max(shown["documents"]) - sum(counts))]
        where = f"micro-batch {micro_batch}, document lengths of its step"
        of_ranks = [_divided(row, len(documents), where) for row in self._transport.gather(filled_up, where).wait()]
        # Pinning would open a context on the first GPU otherwise.
        enter = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        thread = ThreadPoolExecutor(1, "distca-ahead", initializer=enter)
        for at, (read, of_batch) in enumerate(zip(documents, zip(*of_ranks, strict=True), strict=True)):
            assert read is not None
            self._planned[read] = at + 1, thread.submit(plan, of_batch)
        thread.shutdown(wait=False)  # it ends when it has planned them all

    def take(self, read: ReadDocuments) -> tuple[int, Future[Result] | None]:
        """Returns the number of a micro-batch in its step, from 1 on, and its plan; 0 and None if it is in no step, or
        was taken before."""
        return self._planned.pop(read, (0, None))


def _divided(row: list[int], num_batches: int, where: str) -> list[IntArray]:
    """Returns the lengths of each micro-batch of a rank."""
    borders = num_batches + offsets(as_int_array(row[:num_batches], where))
    return [as_int_array(row[start:stop], where) for start, stop in pairwise(borders)]
