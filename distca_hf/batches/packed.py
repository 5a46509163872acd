"""Packs: batches that others made. Inside the model their tokens are placed, unless they are even already.

lengths of this rank ── gather ──▶ live plan ┈┈┈┈┈┈┈┈▶ layout of all packs ──▶ placed layout ──▶ plan, routing
from cu_seq_lens_q, position_ids or rows     of one pass   when the decoder begins          moves of rows

Ranks meet before the pass. The plan is made when the decoder begins: the device then computes what comes before. Where
the micro-batches of a step are known when it begins, they are planned in a thread instead (`batches.step_ahead`).

Layers that carry a state from token to token need the documents of their rank whole, in the order of its batch. There
tokens stay, and attention tasks move.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.batch_documents import Batch, tokens_of
from distca_hf.batches.given_plans import GivenPlans
from distca_hf.batches.pack_agreement import PackAgreement, PackNumbers
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments
from distca_hf.batches.step_ahead import StepAhead
from distca_hf.batches.taking import order_plan
from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.served_transport import ServedTransport
from distca_hf.comm.transport import Gather, Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, TokenBytes
from distca_hf.errors import PackingError
from distca_hf.flops import StepFlops
from distca_hf.layout import Layout, as_int_array
from distca_hf.planning.plan import Plan
from distca_hf.planning.plan_facts import PlanFacts, PlanTotals
from distca_hf.planning.row_moves import RowMoves
from distca_hf.planning.served import Servers
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.planned import Planned, PlannedLater
from distca_hf.runtime.row_moves import DeviceRowMoves
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes


class PreparedPacks(NamedTuple):
    """A plan on the host.

    Attributes:
        plan, num_chunks: the plan, and the chunks of its exchanges.
        kinds: its routing.
        moves: of rows; None if rows stay where batches have them.
    """

    plan: Plan
    num_chunks: int
    kinds: PinnedKinds
    moves: RowMoves | None


@dataclass(frozen=True)
class IncomingPacks:
    """Packs of all ranks, whose lengths are on their way to this one, or which are being planned.

    Attributes:
        micro_batch: its number.
        trains: whether it is trained on, and counted.
        device: where its tokens are.
        servers: attention servers that compute some of its tasks; None if there are none.
        forms: see `PackNumbers`.
        results_return: whether some rank needs results of its own rows, so that all heads compute these.
        prepare: waits for the lengths, and plans; or waits for the plan.
        spent_seconds: time that planning has taken so far.
    """

    micro_batch: int
    trains: bool
    device: torch.device
    servers: Servers | None
    forms: tuple[int, ...]
    results_return: bool
    prepare: Callable[[], PreparedPacks]
    spent_seconds: float


class PackPlanner:
    """Plans one model's packs, micro-batch after micro-batch. Every rank plans the same one at the same time.

    Args:
        servers: attention servers behind the ranks, for micro-batches that are trained on; then `transport` reaches
            them. None if there are none.
        layer_masks: masks that the model's layers attend with, each with the number of its layers.
        read: reads the documents of a batch.
        moves_rows: whether the model moves rows, so that tokens may be placed; else attention tasks move.
        flops: operations of the model, to count the work of a step by; None if they are not known.

    Attributes:
        history: facts of the latest micro-batches.
        latest_moves: of rows of the latest micro-batch; None if they stay where batches have them.
        returning: ranks that need results of the latest micro-batch, in words; empty: head and loss may run on placed
            rows.
        totals, times: sums over micro-batches that a model was trained on, and how long planning them took.
    """

    def __init__(
        self,
        config: DistCAConfig,
        transport: Transport,
        head_groups: int = 1,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
        servers: Servers | None = None,
        layer_masks: LayerMasks = CAUSAL_LAYERS,
        read: Callable[[Batch], ReadDocuments] = DocumentReader().read,  # noqa: B008 (immutable)
        moves_rows: bool = False,
        flops: StepFlops | None = None,
    ) -> None:
        self.totals = PlanTotals()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self.times = LoaderTimes()
        self._config = config
        self._transport = transport
        self._alone = transport.among_trainers if isinstance(transport, ServedTransport) else transport
        topology = config.topology(transport.world_size)
        self._planner = GivenPlans(topology, head_groups, token_bytes, layer_masks, moves_rows)
        self._servers, self._read_batch, self._flops = servers, read, flops
        self.latest_moves: RowMoves | None = None
        self.returning = ""
        self._agreement = PackAgreement(config, transport)
        self._step = StepAhead[PreparedPacks](transport)
        self._next_number = 0

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that forgets all micro-batches planned since this call: they are planned again, under
        their numbers."""
        number, totals, times = self._next_number, self.totals, replace(self.times)

        def go_back() -> None:
            for _ in range(self.totals.micro_batches - totals.micro_batches):
                self.history.pop()
            self._next_number, self.totals, self.times = number, totals, replace(times)

        return go_back

    def begin_step(self, documents: Sequence[ReadDocuments | None], device: torch.device) -> None:
        """Plans the micro-batches of an optimizer step ahead; see `StepAhead`. A collective call.

        With attention servers nothing is planned ahead: which of them take part is known when a pass begins.
        """
        if self._servers is None:
            prepare = partial(self._prepare, servers=None, pin=device.type == "cuda")
            self._step.begin(documents, self._next_number, prepare, device)

    def plan(
        self,
        batch: Batch,
        trains: bool = True,
        images_wait: bool = False,
        gradients_of: Sequence[bool] = (),
        results_return: bool = True,
    ) -> LivePlan | None:
        """Returns the plan of a batch, on the device of its tokens. A collective call.

        It is a plan that is made later, when the decoder begins. With attention servers it is made here: it is
        posted to them before any layer runs.

        Args:
            trains: whether it is trained on, and counted.
            images_wait: whether a rank with an image waits for the others: for weights or gradients of towers.
            gradients_of: whether parts of the model before its decoder need gradients.
            results_return: whether this rank needs the results of its own rows.

        Returns:
            The plan; None if some rank's batch keeps its padding: then every rank attends to its own batch.

        Raises:
            PackingError: the batch holds something else than whole documents, or no rank has any; or only some
                ranks hold images, and would wait for the others.
            PlanMismatchError, PeerLostError: other ranks are doing something else, could not do their part, or hold
                another batch although they share the data.
        """
        began = time.perf_counter()
        number, self._next_number = self._next_number, self._next_number + 1
        read, device = self._read(batch, number), tokens_of(batch).device
        of_step, planned = self._step.take(read)
        shown = self._agreement.reach(batch, read, number, images_wait, gradients_of, results_return, of_step)
        if shown is None:
            return None
        self.returning, lengths = shown.returning, read.lengths
        assert lengths is not None  # or this rank's batch would be padded
        longest_tokens = shown.longest_document_tokens
        if not longest_tokens:
            raise PackingError(f"micro-batch {number}: no data on any rank; leave this batch out")
        servers = self._servers if trains else None  # evaluation uses none
        served = self._transport if isinstance(self._transport, ServedTransport) and trains else None
        if served is not None:
            servers = served.servers  # some may be lost
        if planned is not None and shown.is_planned:
            prepare = planned.result
        else:
            filled_up = [*lengths.tolist(), *[0] * (max(shown.num_documents) - len(lengths))]
            gather = self._transport.gather(filled_up, _where(number))
            prepare = partial(self._prepare_gathered, gather, shown, number, servers, device.type == "cuda")
        spent_seconds = time.perf_counter() - began
        packs = IncomingPacks(
            number, trains, device, servers, shown.forms, bool(shown.returning), prepare, spent_seconds
        )
        later = PlannedLater(longest_tokens, partial(self._plan_incoming, packs))
        return LivePlan(
            number,
            later if servers is None else later.plan(),
            self._transport if trains else self._alone,
            self._config,
            stopwatch=None if served is None else served.speeds.stopwatch,
            document_tokens=lengths,
        )

    def _prepare_gathered(
        self, gather: Gather, shown: PackNumbers, number: int, servers: Servers | None, pin: bool
    ) -> PreparedPacks:
        """Waits for the lengths of packs, filled up with zeros, then plans and routes them."""
        where, rows = _where(number), gather.wait()
        counted = zip(rows, shown.num_documents, strict=True)
        return self._prepare([as_int_array(row[:count], where) for row, count in counted], servers, pin)

    def _prepare(self, packs: Sequence[IntArray], servers: Servers | None, pin: bool) -> PreparedPacks:
        """Plans and routes packs on the host, given the document lengths of each; safe in a background thread."""
        home, planner = Layout.from_packs(packs), self._planner
        layout = planner.layout(home)
        plan = planner.plan(layout, servers)
        topology = planner.topology if servers is None else servers.topology(planner.topology)
        num_chunks, rank = self._config.num_chunks(topology), self._transport.rank
        num_servers = 0 if servers is None else servers.count
        masks = planner.layer_masks
        kinds = PinnedKinds.prepare(plan, rank, num_chunks, masks, home, pin=pin, num_servers=num_servers)
        moves = RowMoves.of(home, layout, rank) if planner.moves_rows else None
        return PreparedPacks(plan, num_chunks, kinds, moves)

    def _plan_incoming(self, packs: IncomingPacks) -> Planned:
        """Waits for the plan of packs, or makes it, and copies it to the device."""
        began = time.perf_counter()
        plan, num_chunks, kinds, self.latest_moves = packs.prepare()
        if not packs.results_return:
            kinds = replace(kinds, facts=replace(kinds.facts, head_tokens=kinds.facts.tokens))
        self.history.append(kinds.facts)
        if packs.trains:
            self.totals = self.totals.plus(kinds.facts, self._flops)
            self.times.micro_batches += 1  # padded micro-batches are in none of these
            self.times.plan_seconds += packs.spent_seconds + time.perf_counter() - began
        posted = order_plan(self._transport, None if packs.servers is None else plan, packs.micro_batch, num_chunks)
        planned = kinds.planned(packs.device, plan.fingerprint, posted)
        if self.latest_moves is None:
            return planned
        moves = DeviceRowMoves.of(self.latest_moves, packs.device)
        return planned._replace(moves=moves, batch_forms=packs.forms)

    def _read(self, batch: Batch, number: int) -> ReadDocuments:
        """Returns the documents of this rank's batch. Announces a failure to others."""
        try:
            return self._read_batch(batch)
        except Exception:
            Agreement.announce_unable(self._transport, number, Occasion.PLAN)
            raise


def _where(micro_batch: int) -> str:
    return f"micro-batch {micro_batch}, document lengths"
