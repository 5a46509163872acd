"""Epoch: micro-batches, packed from lengths as training packs them, and the balance of each.

Training packs all documents into the micro-batches of an epoch, in an order that follows from the seed. The first
optimizer step takes the first of them, one for each micro-step.

Balance of documents in order is computed for all micro-batches. Plans are made for optimizer steps spread evenly over
the epoch: for all if they are few, otherwise for as many as take about a second.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.arrays import IntArray, ceil_div, exclusive_cumsum
from distca_hf.cost import causal_pairs_of
from distca_hf.data.accumulation import group_documents
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import Epoch, EpochPacker
from distca_hf.errors import PackingError, and_more
from distca_hf.planning.transfers import received_bytes


# Maximum of ranks x micro-batches that are planned; a plan takes a quarter of a millisecond per rank.
MOST_PLANNED_RANKS = 1024

Track = Callable[[Sequence[int]], Iterable[int]]  # yields the given items, and shows progress


@dataclass(frozen=True)
class Origin:
    """Place of an optimizer step in training: the first one of this epoch.

    Attributes:
        seed: seed of the order of documents, together with the epoch's number.
    """

    seed: int
    epoch: int
    epoch_micro_batches: int


@dataclass(frozen=True, eq=False)
class PackedEpoch:
    """Micro-batches of an epoch.

    Attributes:
        document_tokens: `[documents]` lengths, after overlong documents were cut.
        origin: place in training; None if the documents were given as a batch.
    """

    document_tokens: IntArray
    epoch: Epoch
    origin: Origin | None

    @classmethod
    def of_batches(cls, micro_batches: Sequence[IntArray]) -> "PackedEpoch":
        """Returns an epoch of one optimizer step, from `[documents]` lengths of each of its micro-batches."""
        lengths = np.concatenate(micro_batches)
        ends = np.cumsum([0] + [len(batch) for batch in micro_batches])
        return cls(lengths, Epoch(np.arange(len(lengths)), ends), None)

    def first_step(self, micro_steps: int) -> list[IntArray]:
        """Returns `[documents]` lengths of each micro-batch of the first optimizer step, in the order of packing."""
        return [self.document_tokens[self.epoch.micro_batch(number)] for number in range(micro_steps)]


def pack_epoch(document_tokens: IntArray, request: PlanRequest, seed: int) -> PackedEpoch:
    """Packs the first epoch of a training on these documents.

    Raises:
        PackingError: a document is longer than a micro-batch, or the epoch has fewer micro-batches than a step.
    """
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
    return PackedEpoch(document_tokens, packer.epoch(0), Origin(seed, 0, packer.num_micro_batches))


def divide_batch(document_tokens: IntArray, request: PlanRequest) -> PackedEpoch:
    """Divides all documents, in order, among the micro-steps with nearly equal tokens.

    If that gives a micro-step more tokens than it holds, documents are grouped as training groups them.

    Raises:
        PackingError: the documents do not fit.
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


def fit_lengths(document_tokens: IntArray, request: PlanRequest) -> IntArray:
    """Returns lengths after the policy for documents that are longer than a micro-batch, or, if documents stay whole,
    than a rank holds.

    Raises:
        PackingError: there are such documents, and the policy refuses them; or documents are longer than the model
            takes.
    """
    longest, most_tokens, model = int(document_tokens.max()), request.planner.longest_tokens, request.model
    if request.overlong == "error" and longest > most_tokens:
        others = int((document_tokens > most_tokens).sum()) - 1
        if model.whole_documents:
            where = f"one rank, where documents of {model.name} stay whole: it holds {most_tokens} tokens"
            remedy = f"{longest} tokens per rank would hold it"
        else:
            where = f"{request.num_ranks} ranks x {request.tokens_per_rank} tokens = {most_tokens}"
            tokens, ranks = ceil_div(longest, request.num_ranks), ceil_div(longest, request.tokens_per_rank)
            remedy = f"{tokens} tokens per rank or {ranks} ranks would hold it"
        raise PackingError(
            f"a document of {longest} tokens{and_more(others)} does not fit on {where}; {remedy}, or --overlong split "
            "or truncate cuts it"
        )
    document_tokens = fit_documents(document_tokens, most_tokens, request.overlong)[2]
    longest, limit = int(document_tokens.max()), model.longest_document_tokens
    if limit is not None and longest > limit:
        raise PackingError(
            f"a document of {longest} tokens is longer than the {limit} that {model.name} takes (`distca check` says "
            "why); split documents before, or remove longer ones"
        )
    return document_tokens


@dataclass(frozen=True, eq=False)
class EpochPlans:
    """Documents of an epoch in order, and plans of some of its optimizer steps, in numbers.

    Attributes:
        tokens: `[micro_batches]` tokens of all ranks together.
        work_before: `[micro_batches, ranks]` attended pairs, if documents fill the ranks in order.
        planned: `[planned]` numbers of the micro-batches that were planned.
        work: `[planned, ranks]` attended pairs, as planned.
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
    """Divides `[micro_batches]` largest work by the mean; 1.0 for micro-batches without documents, as in `cost`."""
    return np.divide(largest, mean, out=np.ones(len(mean)), where=mean > 0)


def pack_in_order(document_tokens: IntArray, epoch: Epoch, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Counts tokens of every micro-batch, and attended pairs of its ranks if documents fill these in order.

    It is `placement.place.fill_in_order`, for all micro-batches at once.

    Args:
        document_tokens: `[documents]` lengths of the whole dataset.
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
    """Plans optimizer steps that are spread evenly over the epoch.

    Args:
        request: ranks, model and layout; its limit of bytes is ignored.
        document_tokens: `[documents]` lengths of the whole dataset.
        epoch: its micro-batches, at least as many as an optimizer step has.
    """
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
