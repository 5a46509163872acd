"""Given batches: plans batches that the user's own pipeline made. The model places their tokens, unless ranks already
have even work.

    lengths of this rank ── gather ──▶ live plan ┈┈┈┈┈┈▶ home layout ──▶ placed layout ──▶ plan, routing, row moves
    (batches.read_documents)           of one pass       when the decoder begins

Ranks agree and gather lengths before the pass. They make the plan when the decoder begins, while the device computes
what comes before it. If ranks without tokens take part, they make it at once, because it is posted to those ranks
before any layer runs. A thread plans micro-batches that are known before their pass (`StepAhead`):

    step begins              the batches that Trainer or its loader already holds are noted
    attention, first pass    they are read; ranks agree on their number, and gather all lengths at once
    end of the first pass    a thread starts to plan micro-batches 2, 3, ..., and the first one of the next step
    later passes             copy their plan to the device

The host does this only while the device is busy, and never waits. The thread touches neither process groups nor device
streams. The pass uses its plan if all ranks show that they have it; otherwise the pass gathers lengths and plans.

If a layer's state cannot travel between ranks, each rank needs its documents whole, in the order of its batch. Then
tokens stay, and attention tasks move.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from distca_hf.arrays import IntArray, as_int_array, offsets
from distca_hf.batches.agreement import GivenAgreement, Returning, ShownNumbers
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.placed import GivenPlans
from distca_hf.batches.read_documents import DocumentReader, PaddedRows, ReadDocuments, Reading
from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.transport import Gather, Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.errors import DistCAError, PackingError
from distca_hf.flops import StepFlops
from distca_hf.layout import Layout
from distca_hf.planning.kinds import PlanTotals, RoutedKinds
from distca_hf.planning.plan import ExtraRanks, Plan, PlanFacts
from distca_hf.planning.row_moves import RowMoves
from distca_hf.runtime.layer_kinds import PinnedKinds, Planned, PlannedLater
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import PostingTransport, among_trainers
from distca_hf.runtime.row_moves import PinnedRowMoves
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes


# Names of the numbers that ranks show each other: batches that are known and read, and their documents.
FOLLOWING, DOCUMENTS = "batches that follow", "documents that follow"


class HostPlan(NamedTuple):
    """A plan on the host.

    Attributes:
        plan, num_chunks: the plan, and the chunks of its exchanges.
        kinds: its routing, for each kind of layer.
        moves: moves of rows at the borders of the decoder; None if attention tasks move instead of rows.
    """

    plan: Plan
    num_chunks: int
    kinds: PinnedKinds
    moves: PinnedRowMoves | None


class GivenPlanner:
    """Plans one model's given batches, one micro-batch at a time. All ranks plan the same one at the same time.

    Args:
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        places_rows: whether rows are placed inside the model; otherwise they stay, and attention tasks move.
        flops: operations of the model, to count the work of a step; None if not known.
        halo_tokens: see `PlacedPlanner`.

    Attributes:
        world_size: number of ranks that exchange rows when a model trains.
        history: facts of the latest micro-batches.
        latest_moves: moves of rows of the latest micro-batch; None if attention tasks move instead of rows.
        returning: what the pass of the latest micro-batch returns.
        needing: ranks that need its hidden states, as text.
        times: how long planning took for the micro-batches that a model was trained on.
    """

    def __init__(
        self,
        config: DistCAConfig,
        transport: Transport,
        head_groups: int = 1,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
        layer_masks: LayerMasks = CAUSAL_LAYERS,
        read: Callable[[Batch], ReadDocuments] = DocumentReader().read,  # noqa: B008 (immutable)
        places_rows: bool = False,
        flops: StepFlops | None = None,
        halo_tokens: int | None = None,
    ) -> None:
        self._totals, self._uncounted = PlanTotals(), list[PlanFacts]()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self.times = LoaderTimes()
        self._config = config
        self._transport, self.world_size = transport, transport.world_size
        self._posting = transport if isinstance(transport, PostingTransport) else None
        topology = config.topology(transport.world_size)
        self._plans = GivenPlans(topology, head_groups, token_bytes, layer_masks, places_rows)
        self._read_batch, self._flops, self._halo_tokens = read, flops, halo_tokens
        self.latest_moves: RowMoves | None = None
        self.returning, self.needing = Returning.STATES, ""
        self._agreement = GivenAgreement(config, transport)
        self._step = StepAhead(transport, partial(self._prepare, extra_ranks=None))
        self._next_number = 0

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that forgets all micro-batches planned since this call. They are then planned again,
        under the same numbers."""
        number, totals, times = self._next_number, self.totals, replace(self.times)

        def go_back() -> None:
            for _ in range(self.totals.micro_batches - totals.micro_batches):
                self.history.pop()
            self._next_number, self._totals, self.times = number, totals, replace(times)

        return go_back

    def begin_step(self, readings: Sequence[Reading | None], step_batches: int, device: torch.device) -> None:
        """Lets the next pass plan the batches that are known when an optimizer step begins; see `StepAhead.begin`.

        Plans nothing ahead with ranks without tokens: which of them take part is known only when a pass begins.
        """
        if self._posting is None:
            self._step.begin(readings, step_batches, device)

    def end_pass(self) -> None:
        """Starts to plan the batches whose lengths were gathered in this pass."""
        self._step.start()
        self._count()

    @property
    def totals(self) -> PlanTotals:
        """Sums over the micro-batches that a model was trained on."""
        self._count()
        return self._totals

    def _count(self) -> None:
        """Counts micro-batches whose passes have begun; not before their first kernel."""
        for facts in self._uncounted:
            self._totals = self._totals.plus(facts, self._flops)
        self._uncounted.clear()

    def plan(
        self,
        batch: Batch,
        trains: bool = True,
        images_wait: bool = False,
        gradients_of: Sequence[bool] = (),
        returning: Returning = Returning.STATES,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> LivePlan | None:
        """Returns the plan of a batch, on the device of its tokens. A collective call.

        Args:
            trains: whether the model trains on it; only then is it counted.
            images_wait: whether a rank with an image waits for the others: for weights or gradients of towers.
            gradients_of: whether parts of the model before its decoder need gradients.
            returning: what this rank needs of the pass's results.
            meanwhile: runs while this rank waits for the others.

        Returns:
            The plan; None if some rank's batch keeps its padding: then every rank attends to its own batch.

        Raises:
            PackingError: the batch does not consist of whole documents, or no rank has any; or only some ranks hold
                images, and would wait for the others.
            PlanMismatchError, PeerLostError: other ranks are doing something else, could not do their part, or hold
                another batch although they share the data.
        """
        began = time.perf_counter()
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            read = self._read_batch(batch)
        except Exception as error:
            if isinstance(error, DistCAError):
                error.args = (f"{self._transport.grid.name}, micro-batch {number}: {error}",)
            Agreement.announce_unable(self._transport, number, Occasion.PLAN)
            raise
        device = tokens_of(batch).device
        (ahead, planned), step_batches = self._step.take(read), self._step.take_step_batches()
        of_pass = images_wait, gradients_of, returning, ahead, step_batches, meanwhile
        shown = self._agreement.reach(batch, read, number, *of_pass)
        if shown.stays_padded:
            return None
        self.returning, self.needing, lengths = shown.returning, shown.needing, read.lengths
        assert lengths is not None  # or this rank's batch would be padded
        longest_tokens = shown.longest_document_tokens
        if not longest_tokens:
            of_all = f"0 tokens on {len(shown.num_documents)} ranks"
            raise PackingError(f"micro-batch {number}: no data on any rank ({of_all}); leave this batch out")
        # Evaluation does not use ranks without tokens; some of them may be lost.
        extra_ranks = self._posting.extra_ranks if self._posting is not None and trains else None
        if planned is not None and shown.is_planned:
            prepare = planned.result
        else:
            filled_up = [*lengths.tolist(), *[0] * (max(shown.num_documents) - len(lengths))]
            where = f"micro-batch {number}, document lengths"
            gather = self._transport.gather(filled_up, where)
            pin = device.type == "cuda"
            prepare = partial(self._prepare_gathered, gather, shown, where, read.padded, pin, extra_ranks)
        spent_seconds = time.perf_counter() - began
        plan = partial(self._plan_incoming, prepare, number, trains, device, extra_ranks, shown, spent_seconds)
        later = PlannedLater(longest_tokens, plan)
        return LivePlan(
            number,
            later if extra_ranks is None else later.plan(),
            self._transport if trains else among_trainers(self._transport),
            self._config,
            document_tokens=lengths,
            also=self._step,
        )

    def _prepare_gathered(
        self,
        gather: Gather,
        shown: ShownNumbers,
        where: str,
        padded: PaddedRows | None,
        pin: bool,
        extra_ranks: ExtraRanks | None,
    ) -> HostPlan:
        """Waits for the lengths of all ranks, filled up with zeros, then plans and routes their batches."""
        counted = zip(gather.wait(), shown.num_documents, strict=True)
        return self._prepare([as_int_array(row[:count], where) for row, count in counted], padded, pin, extra_ranks)

    def _prepare(
        self, lengths: Sequence[IntArray], padded: PaddedRows | None, pin: bool, extra_ranks: ExtraRanks | None
    ) -> HostPlan:
        """Plans and routes batches on the host, from the document lengths of each rank; safe in a thread."""
        home, plans = Layout.from_packs(lengths), self._plans
        layout = plans.layout(home)
        plan = plans.plan(layout, extra_ranks)
        plan.fingerprint  # noqa: B018 (remembered from here on)
        topology = plans.topology if extra_ranks is None else extra_ranks.topology(plans.topology)
        num_chunks, rank = self._config.num_chunks(topology), self._transport.rank
        num_extra = 0 if extra_ranks is None else extra_ranks.count
        routed = RoutedKinds.of(plan, rank, num_chunks, plans.layer_masks, home.rank_work_of, num_extra)
        routed = routed._replace(facts=routed.facts.with_tokens(home, layout))
        kinds = PinnedKinds.prepare(routed, pin, self._halo_tokens)
        if not plans.places_rows:
            return HostPlan(plan, num_chunks, kinds, None)
        places = () if padded is None else (padded.token_places.numpy(), prod(padded.shape))
        moves = RowMoves.of(home, layout, rank, *places)
        return HostPlan(plan, num_chunks, kinds, PinnedRowMoves.prepare(moves, pin))

    def _plan_incoming(
        self,
        prepare: Callable[[], HostPlan],
        number: int,
        trains: bool,
        device: torch.device,
        extra_ranks: ExtraRanks | None,
        shown: ShownNumbers,
        spent_seconds: float,
    ) -> Planned:
        """Waits for the plan or makes it, and copies it to the device."""
        began = time.perf_counter()
        plan, num_chunks, kinds, moves = prepare()
        self.latest_moves = None if moves is None else moves.moves
        facts = kinds.facts
        if shown.returning is not Returning.STATES:  # head and loss run on placed rows
            facts = replace(facts, head_tokens=facts.tokens)
        self.history.append(facts)
        if trains:
            self._uncounted.append(facts)
            self.times.micro_batches += 1  # padded micro-batches are not among these
            self.times.plan_seconds += spent_seconds + time.perf_counter() - began
        posted = None
        if self._posting is not None and trains:
            posted = self._posting.post(None if extra_ranks is None else plan, number, num_chunks)
        on_device = None if moves is None else moves.to(device)
        planned = kinds.planned(device, plan.fingerprint, posted)
        return planned._replace(facts=facts, moves=on_device, batch_forms=shown.forms)


class _Gathering(NamedTuple):
    """Batches whose lengths are being gathered."""

    documents: Sequence[ReadDocuments]
    gather: Gather
    where: str


class StepAhead:
    """Plans micro-batches that are known before their pass.

    Args:
        prepare: plans a micro-batch; called in a thread with the document lengths of each rank, the rows of this
            rank's batch if they are padded, and whether to pin memory.
    """

    def __init__(
        self, transport: Transport, prepare: Callable[[Sequence[IntArray], PaddedRows | None, bool], HostPlan]
    ) -> None:
        self._transport, self._prepare = transport, prepare
        self._readings: Sequence[Reading | None] = ()
        self._documents: list[ReadDocuments] = []
        self._step_batches = 0
        self._gathering: _Gathering | None = None
        self._pins_on: torch.device | None = None
        self._last_number = 0
        # Plans that no pass asks for are forgotten with their batches.
        self._planned = WeakKeyDictionary[ReadDocuments, tuple[int, Future[HostPlan]]]()

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
        """Reads the batches that follow, and returns their number and the number of their documents.

        Both are 0 in later passes, or if a batch cannot be read or keeps its padding.
        """
        documents = [None if reading is None else reading.documents for reading in self._readings]
        read = [one for one in documents if one is not None and one.lengths is not None]
        self._documents, self._readings = read if len(read) == len(documents) else [], ()
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
        """Starts to plan the batches whose lengths were gathered, if any.

        Raises:
            PeerLostError: a rank was lost in the meantime.
        """
        if self._gathering is None:
            return
        (documents, gather, where), self._gathering = self._gathering, None
        of_ranks, device = [_divided(row, len(documents), where) for row in gather.wait()], self._pins_on
        # Otherwise pinning would open a context on the first GPU.
        enter = None if device is None else partial(torch.cuda.set_device, device)
        thread = ThreadPoolExecutor(1, "distca-ahead", initializer=enter)
        for read, lengths in zip(documents, zip(*of_ranks, strict=True), strict=True):
            self._last_number += 1
            planned = thread.submit(self._prepare, lengths, read.padded, device is not None)
            self._planned[read] = self._last_number, planned
        thread.shutdown(wait=False)  # it ends when it has planned them all

    def take(self, read: ReadDocuments) -> tuple[int, Future[HostPlan] | None]:
        """Returns the number of a micro-batch among those planned ahead, counted from 1, and its plan. Returns 0 and
        None if it was not planned ahead, or was taken before."""
        return self._planned.pop(read, (0, None))


def _lengths(documents: Sequence[ReadDocuments]) -> list[IntArray]:
    return [read.lengths for read in documents if read.lengths is not None]


def _divided(row: list[int], num_batches: int, where: str) -> list[IntArray]:
    """Returns the lengths of each micro-batch of a rank."""
    borders = num_batches + offsets(as_int_array(row[:num_batches], where))
    return [as_int_array(row[start:stop], where) for start, stop in pairwise(borders)]
