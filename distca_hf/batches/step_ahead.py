"""Step ahead: plans micro-batches that are known before their pass, in a thread.

    step begins              the batches that Trainer or its loader already holds are noted
    attention, first pass    they are read; ranks agree on their number, and gather all lengths at once
    end of the first pass    a thread starts to plan micro-batches 2, 3, ..., and the first one of the next step
    later passes             copy their plan to the device, while ranks wait for each other

The host does this only while the device is busy, and waits only if documents begin alike. The thread touches neither
process groups nor device streams. The pass uses its plan if all ranks show that they have it; otherwise the pass
gathers lengths and plans.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from distca_hf.batches.agreement import Returning
from distca_hf.batches.document_gather import BatchDocuments, DocumentGather, to_share
from distca_hf.batches.image_plans import ImagePlan
from distca_hf.batches.read_documents import PaddedRows, ReadDocuments, Reading
from distca_hf.comm.transport import Transport
from distca_hf.planning.plan import Plan
from distca_hf.runtime.layer_kinds import PinnedKinds, Planned
from distca_hf.runtime.posted import Posted
from distca_hf.runtime.row_moves import PinnedRowMoves


# Names of the counts that ranks show each other: batches that are read, their documents, numbers that tell their
# images, and borders of runs of image tokens.
FOLLOWING, DOCUMENTS = "batches that follow", "documents that follow"
IMAGES, BORDERS = "numbers of images that follow", "borders of images that follow"


class HostPlan(NamedTuple):
    """A plan on the host.

    Attributes:
        plan, num_chunks: the plan, and the chunks of its exchanges.
        kinds: its routing, for each kind of layer.
        moves: moves of rows at the borders of the decoder; None if attention tasks move instead of rows.
        images: plan of images; None if they stay, or no rank has any.
    """

    plan: Plan
    num_chunks: int
    kinds: PinnedKinds
    moves: PinnedRowMoves | None
    images: ImagePlan | None = None

    def to(self, device: torch.device, posted: Posted | None = None) -> Planned:
        """Returns the planned micro-batch, on the device; the host does not wait. `posted`: see `Planned`."""
        moves = None if self.moves is None else self.moves.to(device)
        return self.kinds.planned(device, self.plan.fingerprint, posted, moves)


class AheadPlan(NamedTuple):
    """A micro-batch that was planned ahead.

    Attributes:
        number: its number among these, counted from 1.
        planned: its plan, which a thread makes.
        made: holds the plan once it is made, and is read without the lock of `planned`.
        shares: whether documents of this rank could share prefixes.
        returning: what its pass was expected to return.
    """

    number: int
    planned: Future[HostPlan]
    made: list[HostPlan]
    shares: bool
    returning: Returning

    def fits(self, returning: Returning) -> bool:
        """Returns whether the plan fits what the pass returns; the same on all ranks.

        If hidden states were expected, documents may share tokens that predict labels; other passes must not share
        them.
        """
        only_unlearnt = self.returning is not Returning.STATES or returning is Returning.STATES
        return only_unlearnt or self.result().plan.layout.shared is None

    @property
    def may_share(self) -> bool:
        """Whether documents of this rank may share prefixes in the plan, as far as it is known without waiting."""
        known = self.known
        return self.shares and not (known is not None and known.plan.layout.shared is None)

    @property
    def known(self) -> HostPlan | None:
        """The plan, as far as it is known without waiting."""
        return self.made[0] if self.made else None

    def result(self) -> HostPlan:
        """Waits for the plan. Raises the error of the thread that planned it."""
        return self.known or self.planned.result()


class StepAhead:
    """Plans micro-batches that are known before their pass.

    Args:
        prepare: plans a micro-batch; called in a thread with the documents of each rank, the rows of this rank's batch
            if they are padded, and whether to pin memory.
        least_tokens: shortest prefix that documents share; 0: none is shared.

    Attributes:
        unshared: returns why documents of this rank must not share prefixes, empty if they may; called once a pass.
        returning: what passes are expected to return; the same on all ranks.
    """

    def __init__(
        self,
        transport: Transport,
        prepare: Callable[[BatchDocuments, PaddedRows | None, bool], HostPlan],
        least_tokens: int,
    ) -> None:
        self._transport, self._prepare = transport, prepare
        self._least_tokens, self.returning = least_tokens, Returning.STATES
        self.unshared: Callable[[], str] = lambda: ""
        self._readings: Sequence[Reading | None] = ()
        self._documents: list[ReadDocuments] = []
        self._step_batches = 0
        self._gathering: tuple[Sequence[ReadDocuments], bool, DocumentGather] | None = None
        self._pins_on: torch.device | None = None
        self._last_number = 0
        # Plans that no pass asks for are forgotten with their batches.
        self._planned = WeakKeyDictionary[ReadDocuments, AheadPlan]()

    def begin(self, readings: Sequence[Reading | None], step_batches: int, device: torch.device) -> None:
        """Notes which batches are known when a step begins.

        Args:
            readings: readings of the batches after the first one of the step; None for a batch without one.
        """
        self._readings, self._step_batches = readings, step_batches
        self._pins_on = device if device.type == "cuda" else None

    def take_step_batches(self) -> int:
        """Returns the number of micro-batches in the step, in the first pass after `begin`; 0 in later passes."""
        step_batches, self._step_batches = self._step_batches, 0
        return step_batches

    def show(self) -> dict[str, int]:
        """Reads the batches that follow, and returns how many there are, and how many integers ranks will gather of
        their documents and images.

        All are 0 in later passes, or if a batch cannot be read or keeps its padding.
        """
        documents = [None if reading is None else reading.documents for reading in self._readings]
        read = [one for one in documents if one is not None and one.lengths is not None]
        self._documents, self._readings = read if len(read) == len(documents) else [], ()
        return {
            FOLLOWING: len(self._documents),
            DOCUMENTS: sum(len(one.known_lengths) for one in self._documents),
            IMAGES: sum(len(one.image_numbers) for one in self._documents),
            BORDERS: sum(len(one.image_runs) for one in self._documents),
        }

    def seen(self, shown: Mapping[str, list[int]], micro_batch: int) -> None:
        """Gathers the lengths of the batches that `show` read, if all ranks read equally many. A collective call.

        Args:
            shown: the numbers of all ranks, by name.
        """
        documents, self._documents = self._documents, []
        if {*shown[FOLLOWING]} != {len(documents)} or not documents:
            return
        where = f"micro-batch {micro_batch}, document lengths of its step"
        shares = False

        def show() -> list[ReadDocuments]:
            nonlocal shares
            shares = self._least_tokens > 0 and not self.unshared()
            of_pass = shares, self.returning is not Returning.STATES, self._least_tokens
            return [to_share(read, *of_pass) for read in documents]

        most = max(shown[DOCUMENTS]), self._least_tokens, where, (max(shown[IMAGES]), max(shown[BORDERS]))
        gather = DocumentGather(self._transport, len(documents), show, *most)
        self._gathering = documents, shares, gather

    def start(self) -> None:
        """Starts to plan the batches whose lengths were gathered, if any. A collective call.

        Raises:
            PeerLostError: a rank was lost in the meantime.
        """
        if self._gathering is None:
            return
        (documents, shares, gather), self._gathering = self._gathering, None
        of_batches, device = gather.wait(), self._pins_on
        # Otherwise pinning would open a context on the first GPU.
        enter = None if device is None else partial(torch.cuda.set_device, device)
        thread = ThreadPoolExecutor(1, "distca-ahead", initializer=enter)
        for read, of_batch in zip(documents, of_batches, strict=True):
            self._last_number += 1
            made = list[HostPlan]()
            planned = thread.submit(self._plan, made, of_batch, read.padded, device is not None)
            self._planned[read] = AheadPlan(self._last_number, planned, made, shares, self.returning)
        thread.shutdown(wait=False)  # it ends when it has planned them all

    def _plan(self, made: list[HostPlan], documents: BatchDocuments, padded: PaddedRows | None, pin: bool) -> HostPlan:
        made.append(self._prepare(documents, padded, pin))
        return made[0]

    def take(self, read: ReadDocuments) -> AheadPlan | None:
        """Returns the plan of a micro-batch; None if it was not planned ahead, or was taken before."""
        return self._planned.pop(read, None)
