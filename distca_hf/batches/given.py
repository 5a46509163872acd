"""Given batches: plans batches that the user's own pipeline made. The model places their tokens, unless ranks already
have even work.

    lengths of this rank ── gather ──▶ live plan ┈┈┈┈┈┈▶ home layout ──▶ placed layout ──▶ plan, routing, row moves
    (batches.read_documents)           of one pass       when the decoder begins

Ranks agree and gather lengths before the pass. They make the plan when the decoder begins, while the device computes
what comes before it. If ranks without tokens take part, they make it at once, because it is posted to those ranks
before any layer runs. A thread plans micro-batches that are known before their pass (`step_ahead`).

Documents that begin alike share their prefix: its tokens are rows of one of them (`prefixes`).

If a layer's state cannot travel between ranks, each rank needs its documents whole, in the order of its batch. Then
tokens stay, and attention tasks move.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod

import torch

from distca_hf.batches.agreement import GivenAgreement, Returning, ShownNumbers
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.document_gather import BatchDocuments, DocumentGather, say_unshared, to_share
from distca_hf.batches.image_plans import ImagePlan, ImagePlanner, ShownImages
from distca_hf.batches.images import HEADER, BatchImages
from distca_hf.batches.placed import GivenPlans
from distca_hf.batches.read_documents import DocumentReader, PaddedRows, ReadDocuments, Reading
from distca_hf.batches.step_ahead import AheadPlan, HostPlan, StepAhead
from distca_hf.comm.agreement import NO_FACTS, Announced, Facts, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.errors import DistCAError, PackingError
from distca_hf.flops import StepFlops, costs_to_place
from distca_hf.layout import Layout
from distca_hf.planning.kinds import PlanTotals, RoutedKinds
from distca_hf.planning.plan import ExtraRanks, PlanFacts
from distca_hf.planning.row_moves import RowMoves
from distca_hf.runtime.layer_kinds import PinnedKinds, Planned, PlannedLater
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import PostingTransport, among_trainers
from distca_hf.runtime.row_moves import PinnedRowMoves
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes


# Why documents that begin alike do not share their prefix.
LEARNT = (
    "its tokens predict labels to learn, and the head runs on placed rows, which have one label each; set labels of "
    "prompts to -100 to share them"
)
EXTRA_RANKS = "attention servers take part"


class _Meanwhile:
    """Work of this rank while it waits for the others. `check` raises its error, where a gather tells them of it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class GivenPlanner:
    """Plans one model's given batches, one micro-batch at a time. All ranks plan the same one at the same time.

    Args:
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        places_rows: whether rows are placed inside the model; otherwise they stay, and attention tasks move.
        flops: operations of the model, by which batches are even and a step is counted; None if not known.
        halo_tokens: see `PlacedPlanner`.
        image_planner: plans images; None if these stay.

    Attributes:
        world_size: number of ranks that exchange rows when a model trains.
        history: facts of the latest micro-batches.
        latest_moves: moves of rows of the latest micro-batch; None if attention tasks move instead of rows.
        returning: what the pass of the latest micro-batch returns.
        needing: ranks that need its hidden states, as text.
        times: how long planning took for the micro-batches that a model was trained on.
        images: images of the latest micro-batch; None if they stay, or no rank has any.
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
        image_planner: ImagePlanner | None = None,
    ) -> None:
        self._totals, self._uncounted = PlanTotals(), list[PlanFacts]()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self.times = LoaderTimes()
        self._config = config
        self._transport, self.world_size = transport, transport.world_size
        self._posting = transport if isinstance(transport, PostingTransport) else None
        topology, cost = config.topology(transport.world_size), costs_to_place(flops).both
        self._plans = GivenPlans(topology, head_groups, token_bytes, layer_masks, places_rows, cost)
        self._read_batch, self._flops, self._halo_tokens = read, flops, halo_tokens
        self.latest_moves: RowMoves | None = None
        self.returning, self.needing = Returning.STATES, ""
        self.images: ShownImages | None = None
        self._image_planner, self._images_wait = image_planner, False
        self._agreement = GivenAgreement(config, transport)
        can_share = places_rows and self._posting is None
        self._least_tokens, self._said_unshared = config.shared_prefix_tokens if can_share else 0, False
        self._step = StepAhead(transport, partial(self._prepare, extra_ranks=None), self._least_tokens)
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

    def announced(self) -> Announced:
        """Returns a context that tells the other ranks if this one cannot prepare the next micro-batch."""
        return Announced(self._transport, self._next_number, Occasion.PLAN)

    def begin_step(self, readings: Sequence[Reading | None], step_batches: int, device: torch.device) -> None:
        """Lets the next pass plan the batches that are known when an optimizer step begins; see `StepAhead.begin`.

        Plans nothing ahead with ranks without tokens: which of them take part is known only when a pass begins.
        """
        if self._posting is None:
            self._step.begin(readings, step_batches, device)

    def end_pass(self) -> None:
        """Starts to plan the batches whose lengths were gathered in this pass, or that the only rank knows."""
        if self.world_size == 1:
            of_ranks = {name: [number] for name, number in self._step.show().items()}
            self._step.seen(of_ranks, self._next_number - 1)
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
        meanwhile: Callable[[Planned | None], None] = lambda planned: None,
        unshared: Callable[[], str] = lambda: "",
        towers: Facts = NO_FACTS,
    ) -> LivePlan | None:
        """Returns the plan of a batch, on the device of its tokens; None if some rank's batch keeps its padding: then
        every rank attends to its own batch. A collective call.

        Args:
            trains: whether the model trains on it; only then is it counted.
            images_wait: whether a rank with an image waits for the others: for weights or gradients of towers.
            gradients_of: whether parts of the model before its decoder need gradients.
            returning: what this rank needs of the pass's results.
            meanwhile: runs while this rank waits for the others, and gets the plan if it was made ahead.
            unshared: returns why documents of this rank must not share prefixes, empty if they may. Called only if
                that matters; then perhaps not before the first attention call, when the device is busy.
            towers: arguments of towers, by name.

        Raises:
            PackingError: the batch does not consist of whole documents, or no rank has any; or only some ranks hold
                images, and would wait for the others.
            PlanMismatchError, PeerLostError: other ranks are doing something else, could not do their part, or hold
                another batch although they share the data.
        """
        began = time.perf_counter()
        number, self._next_number = self._next_number, self._next_number + 1
        read, planned, work = self._read_next(batch, number, unshared)
        device, step_batches = tokens_of(batch).device, self._step.take_step_batches()
        ahead = 0 if planned is None else planned.number
        known = None if planned is None or self._posting is not None else planned.known
        copied: Planned | None = None

        def while_waiting() -> None:
            nonlocal copied
            if known is not None:  # most likely all ranks have planned it ahead
                copied = known.to(device)
            meanwhile(copied)

        done = _Meanwhile(while_waiting)
        of_pass = images_wait, gradients_of, returning, ahead, step_batches, done.run, towers, work
        shown = self._agreement.reach(batch, read, number, *of_pass)
        self.images = None
        if shown.stays_padded:
            done.check()
            return None
        self.returning, self.needing, lengths = shown.returning, shown.needing, read.known_lengths
        self._step.unshared, self._step.returning = unshared, shown.returning
        longest_tokens = shown.longest_document_tokens
        if not longest_tokens:
            of_all = f"0 tokens on {len(shown.num_documents)} ranks"
            raise PackingError(f"micro-batch {number}: no data on any rank ({of_all}); leave this batch out")
        # Evaluation does not use ranks without tokens; some of them may be lost.
        extra_ranks = self._posting.extra_ranks if self._posting is not None and trains else None
        if planned is not None and not (shown.is_planned and planned.fits(shown.returning)):
            planned = copied = None

        def show() -> list[ReadDocuments]:
            done.check()
            shares, has_one_label = self._least_tokens > 0 and not unshared(), shown.returning is not Returning.STATES
            shown_as = to_share(read, shares, has_one_label, self._least_tokens)
            if self._looks_for_unshared and shown_as is not read:
                why = unshared() or read.unshared or (EXTRA_RANKS if self._posting is not None else LEARNT)
                self._said_unshared = say_unshared(read, shown_as, why, self._config.shared_prefix_tokens)
            return [shown_as]

        if planned is not None:
            try:
                done.check()
                if self._looks_for_unshared:
                    show()
            except Exception as error:
                Announced(self._transport, number, Occasion.ATTEND).tell(error)
                raise
            prepare = planned.result
            plan_images = partial(self._images_ahead, prepare)
        else:
            where = f"micro-batch {number}, document lengths"
            most_images = shown.most_images if shown.images_even is None else 0
            of_images = HEADER + 3 * most_images if most_images else 0, shown.most_borders
            most = max(shown.num_documents), self._least_tokens, where, of_images
            gather = DocumentGather(self._transport, 1, show, *most)
            wait = cache(lambda: gather.wait()[0])  # towers and the decoder both need it
            prepare = partial(self._prepare_gathered, wait, read.padded, device.type == "cuda", extra_ranks)
            plan_images = partial(self._images_gathered, wait)
        self._images_wait = shown.images_wait
        if shown.most_images and shown.image_dtype is not None and self._image_planner is not None:
            self.images = ShownImages(plan_images, shown.image_dtype, shown.images_train, shown.images_even)
        spent_seconds = time.perf_counter() - began
        plan = partial(self._plan_incoming, prepare, copied, number, trains, device, extra_ranks, shown, spent_seconds)
        later = PlannedLater(longest_tokens, plan)
        routed = later if extra_ranks is None else later.plan()
        transport = self._transport if trains else among_trainers(self._transport)
        return LivePlan(number, routed, transport, self._config, document_tokens=lengths, also=self._step)

    def _read_next(
        self, batch: Batch, number: int, unshared: Callable[[], str]
    ) -> tuple[ReadDocuments, AheadPlan | None, int]:
        """Returns what was read of the next batch, its plan if it was planned ahead, and the work of its images. Tells
        the other ranks of an error."""
        try:
            read = self._read_batch(batch)
            planned = self._step.take(read)
            if planned is not None and planned.may_share and unshared():
                planned = None
            work = 0 if self._image_planner is None else self._image_planner.total_work(read.images)
        except Exception as error:
            if isinstance(error, DistCAError):
                error.args = (f"{self._transport.grid.name}, micro-batch {number}: {error}",)
            Announced(self._transport, number, Occasion.PLAN).tell(error)
            raise
        return read, planned, work

    @property
    def _looks_for_unshared(self) -> bool:
        """Whether to find out in this pass if documents that begin alike share no prefix: until that was logged, in
        passes 1, 2, 4, 8 and so on, which wait for it."""
        tokens, passes = self._config.shared_prefix_tokens, self._next_number
        return tokens > 0 and not self._said_unshared and passes & (passes - 1) == 0

    def _prepare_gathered(
        self, wait: Callable[[], BatchDocuments], padded: PaddedRows | None, pin: bool, extra_ranks: ExtraRanks | None
    ) -> HostPlan:
        """Waits for the documents of all ranks, then plans and routes their batches. Leaves out images, which towers
        have planned by then."""
        return self._prepare(wait()._replace(images=()), padded, pin, extra_ranks)

    def _images_gathered(self, wait: Callable[[], BatchDocuments]) -> ImagePlan:
        """Waits for the images of all ranks, then plans them."""
        assert self._image_planner is not None
        images = [BatchImages.of_numbers(numbers) for numbers in wait().images]
        return self._image_planner.plan(images, self._images_wait)

    def _images_ahead(self, prepare: Callable[[], HostPlan]) -> ImagePlan:
        """Returns the plan that was made ahead; or a new one if towers have begun to wait for each other since."""
        plan = prepare().images
        assert plan is not None
        assert self._image_planner is not None
        is_right = plan.every_rank == self._images_wait
        return plan if is_right else self._image_planner.plan(plan.images, self._images_wait)

    def _prepare(
        self, documents: BatchDocuments, padded: PaddedRows | None, pin: bool, extra_ranks: ExtraRanks | None
    ) -> HostPlan:
        """Plans and routes batches on the host, from the documents of each rank; safe in a thread."""
        images = None
        if self._image_planner is not None and any(map(len, documents.images)):
            of_ranks = [BatchImages.of_numbers(numbers) for numbers in documents.images]
            images = self._image_planner.plan(of_ranks, self._images_wait)
        home, plans = Layout.from_packs(documents.lengths), self._plans
        layout = plans.layout(home, documents.hashes, self._least_tokens)
        plan = plans.plan(layout, extra_ranks)
        plan.fingerprint  # noqa: B018 (remembered from here on)
        topology = plans.topology if extra_ranks is None else extra_ranks.topology(plans.topology)
        num_chunks, rank = self._config.num_chunks(topology), self._transport.rank
        num_extra = 0 if extra_ranks is None else extra_ranks.count
        routed = RoutedKinds.of(plan, rank, num_chunks, plans.layer_masks, home.rank_work_of, num_extra)
        routed = routed._replace(facts=routed.facts.with_tokens(home, layout))
        kinds = PinnedKinds.prepare(routed, pin, self._halo_tokens)
        if not plans.places_rows:
            return HostPlan(plan, num_chunks, kinds, None, images)
        places, num_places = (None, 1) if padded is None else (padded.token_places.numpy(), prod(padded.shape))
        moves = RowMoves.of(home, layout, rank, places, num_places, documents.image_runs)
        return HostPlan(plan, num_chunks, kinds, PinnedRowMoves.prepare(moves, pin), images)

    def _plan_incoming(
        self,
        prepare: Callable[[], HostPlan],
        copied: Planned | None,
        number: int,
        trains: bool,
        device: torch.device,
        extra_ranks: ExtraRanks | None,
        shown: ShownNumbers,
        spent_seconds: float,
    ) -> Planned:
        """Waits for the plan or makes it, and copies it to the device unless it was `copied` while ranks waited."""
        began = time.perf_counter()
        host = prepare()
        self.latest_moves = None if host.moves is None else host.moves.moves
        facts = host.kinds.facts
        if shown.returning is not Returning.STATES:  # head and loss run on placed rows
            facts = facts.with_head_on_placed_rows()
        self.history.append(facts)
        if trains:
            self._uncounted.append(facts)
            self.times.micro_batches += 1  # padded micro-batches are not among these
            self.times.plan_seconds += spent_seconds + time.perf_counter() - began
        posted = None
        if self._posting is not None and trains:
            posted = self._posting.post(None if extra_ranks is None else host.plan, number, host.num_chunks)
        planned = host.to(device, posted) if copied is None else copied
        return planned._replace(facts=facts, batch_forms=shown.forms)
