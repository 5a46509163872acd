"""Epoch: micro-batches, packed from lengths as training packs them, the balance of each, and the first optimizer step
in full.

Training packs all documents into the micro-batches of an epoch, in an order that follows from the seed. The first
optimizer step takes the first of them, one for each micro-step.

Balance of documents in order is computed for all micro-batches. Plans are made for optimizer steps spread evenly over
the epoch: for all if they are few, otherwise for as many as take about a second.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

import numpy as np

from distca_hf.analysis.models import ModelShape
from distca_hf.analysis.request import PlanRequest, epoch_of, fit_lengths, plan_micro_steps
from distca_hf.arrays import IntArray, ceil_div, exclusive_cumsum
from distca_hf.cost import causal_pairs_of
from distca_hf.data.accumulation import group_documents
from distca_hf.data.epochs import Epoch, EpochPacker
from distca_hf.errors import PackingError, PlanError
from distca_hf.layout import Topology
from distca_hf.placement.place import work_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between, received_bytes


# Maximum of ranks x micro-batches that are planned; a plan takes a quarter of a millisecond per rank.
MOST_PLANNED_RANKS = 1024

Track = Callable[[Sequence[int]], Iterable[int]]  # yields the given items, and shows progress


@dataclass(frozen=True, eq=False)
class PackedEpoch:
    """Micro-batches of an epoch. `document_tokens`: `[documents]` lengths, after overlong documents were cut. `seed`:
    of the order of documents; None if they were given as a batch."""

    document_tokens: IntArray
    epoch: Epoch
    seed: int | None

    @classmethod
    def of_batches(cls, micro_batches: Sequence[IntArray]) -> "PackedEpoch":
        """Returns an epoch of one optimizer step, from `[documents]` lengths of each of its micro-batches."""
        return cls(np.concatenate(micro_batches), epoch_of(micro_batches), None)

    def first_step(self, micro_steps: int) -> list[IntArray]:
        return [self.document_tokens[self.epoch.micro_batch(number)] for number in range(micro_steps)]


def pack_epoch(document_tokens: IntArray, request: PlanRequest, seed: int) -> PackedEpoch:
    """Packs the first epoch of a training on these documents."""
    document_tokens = fit_lengths(document_tokens, request)
    whole_steps = 1 if request.pipeline is None else request.micro_steps
    fits = request.planner.fits
    packer = EpochPacker(document_tokens, request.capacity_tokens, seed, fits=fits, multiple=whole_steps)
    if packer.num_micro_batches < request.micro_steps:
        raise PackingError(
            f"{len(document_tokens)} documents with {int(document_tokens.sum())} tokens fill "
            f"{packer.num_micro_batches} of {request.micro_steps} micro-steps of {request.capacity_tokens} tokens; "
            "choose fewer micro-steps"
        )
    return PackedEpoch(document_tokens, packer.epoch(0), seed)


def divide_batch(document_tokens: IntArray, request: PlanRequest) -> PackedEpoch:
    """Divides all documents, in order, among the micro-steps with nearly equal tokens.

    If that gives a micro-step more tokens than it holds, documents are grouped as training groups them.
    """
    document_tokens = fit_lengths(document_tokens, request)
    total_tokens, steps = int(document_tokens.sum()), request.micro_steps
    if total_tokens > request.capacity_tokens * steps:
        raise PackingError(
            f"the batch has {total_tokens} tokens, but {request.num_ranks} ranks x {request.tokens_per_rank} tokens"
            f"{f' x {steps} micro-steps' if steps > 1 else ''} hold {request.capacity_tokens * steps}; "
            f"{ceil_div(total_tokens, request.num_ranks * steps)} tokens per rank would hold it"
        )
    goals = [ceil_div(total_tokens * (step + 1), steps) for step in range(steps)]
    step_of = np.searchsorted(goals, exclusive_cumsum(document_tokens), side="right")
    micro_batches = [document_tokens[step_of == step] for step in range(steps)]
    if max(int(batch.sum()) for batch in micro_batches) > request.capacity_tokens:
        groups = group_documents(document_tokens, steps, request.capacity_tokens)
        micro_batches = [document_tokens[group.documents] for group in groups]
    return PackedEpoch.of_batches(micro_batches)


@dataclass(frozen=True, eq=False)
class EpochPlans:
    """Documents of an epoch in order, and plans of some of its optimizer steps, in numbers.

    Attributes:
        tokens: `[micro_batches]` tokens of all ranks together.
        work_before, work: `[micro_batches, ranks]` attended pairs, if documents fill the ranks in order, and
            `[planned, ranks]` as planned.
        planned: `[planned]` numbers of the micro-batches that were planned.
        received_bytes: `[planned]` most bytes that one rank receives in one layer's forward pass.
    """

    tokens: IntArray
    work_before: IntArray
    planned: IntArray
    work: np.ndarray
    received_bytes: IntArray

    @property
    def imbalance_before(self) -> np.ndarray:
        """`[micro_batches]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance_before`."""
        ranks = self.work_before.shape[1]
        return _ratios(self.work_before.max(axis=1) * ranks, self.work_before.sum(axis=1))

    @property
    def imbalance(self) -> np.ndarray:
        """`[planned]` float64 max/mean work over ranks; training logs its mean as `distca/imbalance`."""
        return _ratios(self.work.max(axis=1), self.work.mean(axis=1))


def _ratios(largest: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Divides largest work by the mean; 1.0 for micro-batches without documents, as in `cost`."""
    return np.divide(largest, mean, out=np.ones(len(mean)), where=mean > 0)


def pack_in_order(document_tokens: IntArray, epoch: Epoch, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Counts tokens of every micro-batch, and attended pairs of its ranks if documents fill these in order.

    It is `placement.place.fill_in_order`, for all micro-batches at once. `document_tokens`: of the whole dataset.
    """
    # 1. All documents of the epoch in one line: the end of each, and the pairs up to there.
    lengths = document_tokens[epoch.documents]
    stops = np.concatenate([[0], np.cumsum(lengths)])
    # The sum over millions of documents may overflow; differences within a micro-batch are still exact.
    pairs = np.concatenate([[0], np.cumsum(causal_pairs_of(np.zeros_like(lengths), lengths))])
    # 2. Borders of the ranks on that line.
    first = stops[epoch.offsets[:-1], None]
    tokens = np.diff(stops[epoch.offsets])
    borders = first + tokens[:, None] * np.arange(num_ranks + 1) // num_ranks
    # 3. Pairs up to each border: of whole documents, and inside the document that the border cuts.
    document = np.searchsorted(stops, borders, side="right") - 1
    inside = borders - stops[document]
    work = np.diff(pairs[document] + causal_pairs_of(np.zeros_like(inside), inside), axis=1)
    return tokens, work


def plan_epoch(request: PlanRequest, document_tokens: IntArray, epoch: Epoch, track: Track = iter) -> EpochPlans:
    """Plans optimizer steps that are spread evenly over the epoch, without a limit of bytes. `document_tokens`: of the
    whole dataset. `epoch`: has at least as many micro-batches as an optimizer step."""
    # 1. Steps that are planned.
    request, micro_steps = replace(request, bytes_limit=None), request.micro_steps
    steps = epoch.num_micro_batches // micro_steps
    planned_steps = min(steps, max(1, MOST_PLANNED_RANKS // (request.num_ranks * micro_steps)))
    chosen = np.unique(np.linspace(0, steps - 1, planned_steps).astype(np.int64))
    # 2. Their plans.
    work, received = [], []
    for step in track(chosen.tolist()):
        numbers = range(step * micro_steps, (step + 1) * micro_steps)
        batches = [document_tokens[epoch.micro_batch(number)] for number in numbers]
        for plan in plan_micro_steps(request, batches):
            work.append(plan.work / plan.tasks.head_groups)
            received.append(int(received_bytes(plan, request.model.token_bytes).max()))
    return EpochPlans(
        *pack_in_order(document_tokens, epoch, request.num_ranks),
        planned=(chosen[:, None] * micro_steps + np.arange(micro_steps)).reshape(-1),
        work=np.array(work),
        received_bytes=np.array(received, dtype=np.int64),
    )


@dataclass(frozen=True)
class Figures:
    """Balance and bytes of all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work; of several micro-steps the sum of the heaviest ranks over the sum of the means.
        bytes_total: bytes between ranks in the forward pass of one layer.
        bytes_max_rank, bytes_internode_max: the most that one rank sends or receives of all bytes, and between nodes;
            summed over micro-steps.
        state_bytes_max_rank: the same in the forward pass of one mixer; None if sizes of states are not known.
    """

    tokens_min: int
    tokens_max: int
    imbalance: float
    bytes_total: int
    bytes_max_rank: int
    bytes_internode_max: int
    state_bytes_max_rank: int | None = 0


def figures_of(micro_steps: Sequence["PlannedMicroBatch"], topology: Topology) -> Figures:
    """Returns the figures of the micro-steps of one optimizer step."""
    # In pairs, exactly: micro-steps of one plan may divide heads into other numbers of parts.
    total_pairs = sum(Fraction(int(step.work.sum()), step.head_parts) for step in micro_steps)
    heaviest_pairs = sum(Fraction(int(step.work.max()), step.head_parts) for step in micro_steps)
    crosses = topology.node_of[:, None] != topology.node_of[None, :]
    state_bytes = [step.state_bytes for step in micro_steps if step.state_bytes is not None]
    return Figures(
        tokens_min=min(int(step.tokens.min()) for step in micro_steps),
        tokens_max=max(int(step.tokens.max()) for step in micro_steps),
        imbalance=float(heaviest_pairs * topology.num_ranks / total_pairs) if total_pairs else 1.0,
        bytes_total=sum(int(step.bytes_between.sum()) for step in micro_steps),
        bytes_max_rank=sum(largest_rank_bytes(step.bytes_between) for step in micro_steps),
        bytes_internode_max=sum(largest_rank_bytes(step.bytes_between * crosses) for step in micro_steps),
        state_bytes_max_rank=sum(state_bytes) if len(state_bytes) == len(micro_steps) else None,
    )


def largest_rank_bytes(bytes_between: np.ndarray) -> int:
    """Returns the most bytes that any rank sends or receives."""
    return int(max(bytes_between.sum(axis=1).max(), bytes_between.sum(axis=0).max()))


@dataclass(frozen=True, eq=False)
class StepReport:
    """A planned optimizer step.

    Attributes:
        seed, epoch_micro_batches: seed and size of the first epoch; None if the documents were given as a batch.
        cut_documents, shards: documents with more than one task, and tasks of these together.
        imbalance_before: of documents in order, if every rank computes its own tokens.
        fingerprint: equal for equal plans.
        work_before, work: `[ranks]` work of all micro-steps together: attended pairs, and pairs x head groups of the
            model.
    """

    request: PlanRequest
    source: str
    seed: int | None
    epoch_micro_batches: int | None
    documents: int
    tokens: int
    longest_document_tokens: int
    cut_documents: int
    shards: int
    imbalance_before: float
    figures: Figures
    planning_seconds: float
    fingerprint: str
    work_before: IntArray
    work: IntArray
    micro_batches: Sequence["PlannedMicroBatch"]
    plans: Sequence[Plan]

    def as_json(self) -> dict[str, object]:
        request, model = self.request, self.request.model
        of_documents = ("documents", "tokens", "longest_document_tokens", "imbalance_before")
        of_plans = ("planning_seconds", "fingerprint", "cut_documents", "shards")
        return {
            "model": model.name,
            "other_layers": model.other_layers,
            "limits": list(model.limits),
            "layout": request.layout,
            "source": self.source,
            **{"seed": self.seed, "epoch": None if self.seed is None else 0},
            **{"epoch_micro_batches": self.epoch_micro_batches, "ranks": request.num_ranks},
            **{name: getattr(request, name) for name in ("tokens_per_rank", "ranks_per_node", "micro_steps")},
            **{name: getattr(self, name) for name in of_documents},
            **asdict(self.figures),
            **{name: getattr(self, name) for name in of_plans},
            "micro_batches": [planned.as_json() for planned in self.micro_batches],
        }


@dataclass(frozen=True, eq=False)
class PlannedMicroBatch:
    """The ranks in one micro-step.

    Attributes:
        work: `[ranks]` attended pairs that each rank computes, times `head_parts`: parts into which heads are divided.
        tokens: `[ranks]` tokens that each rank holds.
        bytes_between: `[source, destination]` bytes sent in the forward pass of one layer; 0 to the same rank. Queries
            and outputs of tasks that move are sent once, keys and values once per document and server.
        state_bytes: most bytes that one rank sends or receives in the forward pass of one mixer; None if sizes of
            states are not known.
    """

    document_tokens: IntArray
    work: IntArray
    tokens: IntArray
    bytes_between: IntArray
    head_parts: int = 1
    state_bytes: int | None = 0

    @classmethod
    def of(cls, plan: Plan, model: ModelShape) -> "PlannedMicroBatch":
        layout, sent = plan.layout, bytes_between(plan, model.token_bytes)
        states = None if model.has_unknown_states else 0
        if model.state_size is not None:
            states = model.state_size.most_bytes(layout)
        return cls(layout.document_tokens, plan.work, layout.rank_tokens, sent, plan.tasks.head_groups, states)

    def as_json(self) -> dict[str, object]:
        """Returns one object. Work is attended pairs: of the same documents in order, and as planned. Bytes are
        (source, destination, bytes) of one layer's forward pass."""
        sent = self.bytes_between
        source, destination = np.nonzero(sent)
        return {
            "documents": len(self.document_tokens),
            "longest_document_tokens": int(self.document_tokens.max(initial=0)),
            "rank_work_before": work_in_order(self.document_tokens, len(self.work)).tolist(),
            "rank_work": (self.work / self.head_parts).tolist(),
            "rank_tokens": self.tokens.tolist(),
            "bytes_between": np.stack([source, destination, sent[source, destination]], axis=1).tolist(),
        }


def make_report(request: PlanRequest, packed: PackedEpoch, source: str = "lengths") -> StepReport:
    """Plans the first optimizer step of an epoch, and counts work and bytes."""
    # 1. Plans. Only these are timed.
    batches = packed.first_step(request.micro_steps)
    began = time.perf_counter()
    plans = plan_micro_steps(request, batches)
    planning_seconds = time.perf_counter() - began
    for plan in plans:
        plan.validate()
    planned = [PlannedMicroBatch.of(plan, request.model) for plan in plans]
    _check_bytes_limit(planned, request.bytes_limit)
    # 2. The same documents in order.
    in_order = [work_in_order(batch, request.num_ranks) for batch in batches]
    lengths = np.concatenate(batches)
    tasks = np.concatenate([np.bincount(plan.tasks.document) for plan in plans])  # of each document
    pairs_in_order = sum(int(work.sum()) for work in in_order)
    heaviest_in_order = sum(int(work.max()) for work in in_order)
    fingerprints = [plan.fingerprint for plan in plans]
    joined = hashlib.blake2b(",".join(map(str, fingerprints)).encode(), digest_size=8).hexdigest()
    return StepReport(
        request=request,
        source=source,
        seed=packed.seed,
        epoch_micro_batches=None if packed.seed is None else packed.epoch.num_micro_batches,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        longest_document_tokens=int(lengths.max()),
        cut_documents=int((tasks > 1).sum()),
        shards=int(tasks[tasks > 1].sum()),
        imbalance_before=heaviest_in_order * request.num_ranks / pairs_in_order if pairs_in_order else 1.0,
        figures=figures_of(planned, request.topology),
        planning_seconds=planning_seconds,
        fingerprint=f"{fingerprints[0]:016x}" if len(fingerprints) == 1 else joined,
        work_before=np.sum(in_order, axis=0),
        work=np.sum([plan.work * (request.model.heads.groups // plan.tasks.head_groups) for plan in plans], axis=0),
        micro_batches=planned,
        plans=plans,
    )


def _check_bytes_limit(micro_steps: Sequence[PlannedMicroBatch], bytes_limit: int | None) -> None:
    for number, step in enumerate(micro_steps):
        for verb, axis in (("send", 1), ("receive", 0)):
            of_ranks = step.bytes_between.sum(axis=axis)
            rank, needed = int(of_ranks.argmax()), int(of_ranks.max())
            if bytes_limit is not None and needed > bytes_limit:
                raise PlanError(
                    f"micro-step {number}: rank {rank} has to {verb} {needed} bytes per layer, but --bytes-limit is "
                    f"{bytes_limit}; set it to at least {needed}"
                )
