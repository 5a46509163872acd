"""First step: the first optimizer step, planned as training plans it, in numbers."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction

import numpy as np

from distca_hf.analysis.epoch import Origin, PackedEpoch
from distca_hf.analysis.models import ModelShape
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import PlanError
from distca_hf.layout import Topology
from distca_hf.placement.place import work_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between


@dataclass(frozen=True)
class Figures:
    """Balance and bytes of all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work, 1.0 is perfect. For several micro-steps it is the sum of the heaviest ranks over the
            sum of the means.
        bytes_total: bytes between ranks in the forward pass of one layer.
        bytes_max_rank: the most of these bytes that one rank sends or receives; summed over micro-steps.
        bytes_internode_max: the same for bytes between nodes.
        state_bytes_max_rank: the most bytes that one rank sends or receives in the forward pass of one mixer; summed
            over micro-steps. None if sizes of states are not known.
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
        origin: place of the step in training; None if the documents were given as a batch.
        cut_documents: number of documents with more than one task.
        imbalance_before: imbalance of documents in order, if every rank computes its own tokens.
        figures: balance and bytes of the plans.
        fingerprint: equal for equal plans.
        work_before, work: `[ranks]` work of all micro-steps together: attended pairs, and pairs x head groups of the
            model.
        micro_batches: the ranks in every micro-step.
    """

    request: PlanRequest
    source: str
    origin: Origin | None
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
        """Returns one flat JSON object."""
        names = [field.name for field in fields(Origin)]
        origin = dict.fromkeys(names) if self.origin is None else asdict(self.origin)
        return {
            "model": self.request.model.name,
            "other_layers": self.request.model.other_layers,
            "limits": list(self.request.model.limits),
            "layout": self.request.layout,
            "source": self.source,
            **origin,
            "ranks": self.request.num_ranks,
            "tokens_per_rank": self.request.tokens_per_rank,
            "ranks_per_node": self.request.ranks_per_node,
            "micro_steps": self.request.micro_steps,
            "documents": self.documents,
            "tokens": self.tokens,
            "longest_document_tokens": self.longest_document_tokens,
            "imbalance_before": self.imbalance_before,
            **asdict(self.figures),
            "planning_seconds": self.planning_seconds,
            "fingerprint": self.fingerprint,
            "cut_documents": self.cut_documents,
            "shards": self.shards,
            "micro_batches": [planned.as_json() for planned in self.micro_batches],
        }


@dataclass(frozen=True, eq=False)
class PlannedMicroBatch:
    """The ranks in one micro-step.

    Attributes:
        document_tokens: `[documents]` lengths, in the order of the micro-step.
        work: `[ranks]` attended pairs that each rank computes, times `head_parts`.
        tokens: `[ranks]` tokens that each rank holds.
        bytes_between: `[source, destination]` bytes sent in the forward pass of one layer; 0 to the same rank. Queries
            and outputs of tasks that move are sent once, keys and values once per document and server.
        head_parts: parts into which heads are divided, of which a rank may compute some; 1 if it computes all heads.
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
        """Returns work, tokens and bytes of a plan."""
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
    """Plans the first optimizer step of an epoch, and counts work and bytes.

    Raises:
        PackingError: lengths are out of range.
        PlanError: a rank has to send or receive more than the limit of the request.
    """
    # 1. Plans. Only these are timed.
    batches = packed.first_step(request.micro_steps)
    began = time.perf_counter()
    try:
        plans = plan_micro_steps(request, batches)
        planning_seconds = time.perf_counter() - began
        for plan in plans:
            plan.validate()
        planned = [PlannedMicroBatch.of(plan, request.model) for plan in plans]
        _check_bytes_limit(planned, request.bytes_limit)
    except PlanError as error:
        raise PlanError(f"{error}; {_world_that_fits(request, batches)}") from error
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
        origin=packed.origin,
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
    """Raises PlanError if a rank sends or receives more than the limit in a micro-step."""
    for number, step in enumerate(micro_steps):
        for verb, axis in (("send", 1), ("receive", 0)):
            of_ranks = step.bytes_between.sum(axis=axis)
            rank, needed = int(of_ranks.argmax()), int(of_ranks.max())
            if bytes_limit is not None and needed > bytes_limit:
                raise PlanError(
                    f"micro-step {number}: rank {rank} has to {verb} {needed} bytes per layer, but --bytes-limit is "
                    f"{bytes_limit}; set it to at least {needed}"
                )


def _world_that_fits(request: PlanRequest, batches: Sequence[IntArray]) -> str:
    """Returns advice as text: the most ranks, halved repeatedly, on which the same documents meet the limit."""
    most_tokens = max(int(batch.sum()) for batch in batches)
    ranks = request.num_ranks
    while ranks > 1:
        ranks //= 2
        world = replace(request, num_ranks=ranks, tokens_per_rank=ceil_div(most_tokens, ranks), bytes_limit=None)
        moved = [bytes_between(plan, request.model.token_bytes) for plan in plan_micro_steps(world, batches)]
        largest = max(int(sent.sum(axis=axis).max()) for sent in moved for axis in (0, 1))
        if largest <= (request.bytes_limit or 0):
            break
    return f"or train these documents on {ranks} ranks of {ceil_div(most_tokens, ranks)} tokens, where it is met"
