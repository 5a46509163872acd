"""First step: the first optimizer step, planned as training plans it, in numbers."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, Figures, figures_of
from distca_hf.analysis.compare import bound_bytes_total, run_baselines
from distca_hf.analysis.packed_epoch import OptimizerStep, Origin
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.cost import IntArray
from distca_hf.errors import PlanError
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """One way to run the optimizer step.

    Attributes:
        figures: its balance and bytes.
        bound_bytes_total: bytes that no plan of these documents on equally loaded ranks can do without (see
            `plan_bound`); None where it is not known.
        planning_seconds: time it took to plan.
        fingerprint: equal for equal outcomes.
    """

    figures: Figures
    bound_bytes_total: int | None
    planning_seconds: float
    fingerprint: str


@dataclass(frozen=True, eq=False)
class StepReport:
    """A planned optimizer step, and baselines on the same documents.

    Attributes:
        request: what was asked.
        source: where lengths come from.
        origin: where in training the documents are; None if they were given.
        documents, tokens, longest_document_tokens: what was planned.
        cut_documents, shards: documents that more than one rank or task computes, and their tasks.
        imbalance_before: of documents in order, every rank computing what it holds.
        planned: what distca does.
        baselines: what others do, by name.
        work_before, work: `[ranks]` work of all micro-steps together.
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
    planned: Outcome
    baselines: dict[str, Outcome]
    work_before: IntArray
    work: IntArray

    def as_json(self) -> dict[str, Any]:
        """Returns one flat object; `baselines` holds one more for each baseline, with the same keys."""
        names = [field.name for field in fields(Origin)]
        drawn = dict.fromkeys(names) if self.origin is None else asdict(self.origin)
        world = {
            "ranks": self.request.num_ranks,
            "tokens_per_rank": self.request.tokens_per_rank,
            "ranks_per_node": self.request.ranks_per_node,
            "micro_steps": self.request.micro_steps,
            "documents": self.documents,
            "tokens": self.tokens,
            "longest_document_tokens": self.longest_document_tokens,
            "imbalance_before": self.imbalance_before,
        }
        return {
            "model": self.request.model.name,
            "layout": self.request.layout,
            "source": self.source,
            **drawn,
            **world,
            **_flat(self.planned),
            "cut_documents": self.cut_documents,
            "shards": self.shards,
            "baselines": {name: {**world, **_flat(outcome)} for name, outcome in self.baselines.items()},
        }


def make_report(
    request: PlanRequest, step: OptimizerStep, source: str = "lengths", compare: bool = False
) -> StepReport:
    """Plans an optimizer step and counts.

    Args:
        request: world, model and way of planning.
        step: its documents.
        source: where they come from.
        compare: whether to run the baselines, too.

    Raises:
        PackingError: lengths are out of range.
        PlanError: a rank has to send or receive more than the request's limit.
    """
    batches = step.micro_batches
    began = time.perf_counter()
    try:
        plans = plan_micro_steps(request, batches)
        planning_seconds = time.perf_counter() - began
        for plan in plans:
            plan.validate()
        planned = [Baseline.of_plan("distca", plan, request.model.token_bytes) for plan in plans]
        _check_bytes_limit(planned, request.bytes_limit)
    except PlanError as error:
        raise PlanError(f"{error}; {_world_that_fits(request, batches)}") from error
    in_order = [fill_in_order(batch, request.num_ranks).rank_work for batch in batches]
    lengths = np.concatenate(batches)
    cut_documents, shards = np.sum([_shards(plan) for plan in plans], axis=0).tolist()
    bound = bound_bytes_total(request, plans)
    baselines = {}
    if compare:
        for name, micro_steps, seconds in run_baselines(request, batches):
            figures = figures_of(micro_steps, request.topology)
            baselines[name] = Outcome(figures, bound, seconds, _fingerprint(micro_steps))
    return StepReport(
        request=request,
        source=source,
        origin=step.origin,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        longest_document_tokens=int(lengths.max()),
        cut_documents=cut_documents,
        shards=shards,
        imbalance_before=_imbalance(in_order),
        planned=Outcome(
            figures_of(planned, request.topology), bound, planning_seconds, _join([plan.fingerprint for plan in plans])
        ),
        baselines=baselines,
        work_before=np.sum(in_order, axis=0),
        work=np.sum([plan.work for plan in plans], axis=0),
    )


def _check_bytes_limit(micro_steps: Sequence[Baseline], bytes_limit: int | None) -> None:
    """Raises PlanError if a rank sends or receives more in a micro-step."""
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
    """Returns the most ranks, halved again and again, on which the same documents stay within the limit of bytes."""
    most_tokens = max(int(batch.sum()) for batch in batches)
    ranks = request.num_ranks
    while ranks > 1:
        ranks //= 2
        world = replace(request, num_ranks=ranks, tokens_per_rank=-(-most_tokens // ranks), bytes_limit=None)
        planned = [Baseline.of_plan("", plan, request.model.token_bytes) for plan in plan_micro_steps(world, batches)]
        largest = max(int(step.bytes_between.sum(axis=axis).max()) for step in planned for axis in (0, 1))
        if largest <= (request.bytes_limit or 0):
            break
    return f"or train these documents on {ranks} ranks of {-(-most_tokens // ranks)} tokens, where it is met"


def _shards(plan: Plan) -> tuple[int, int]:
    """Counts documents with more than one task, and their tasks."""
    tasks = np.bincount(plan.tasks.document, minlength=plan.layout.num_documents)
    return int((tasks > 1).sum()), int(tasks[tasks > 1].sum())


def _imbalance(work: Sequence[IntArray]) -> float:
    """Returns the sum of the heaviest ranks over the sum of the means."""
    total = sum(int(step.sum()) for step in work)
    return sum(int(step.max()) for step in work) * len(work[0]) / total if total else 1.0


def _fingerprint(micro_steps: Sequence[Baseline]) -> str:
    """Returns a fingerprint that is equal for baselines that say the same."""
    digests = []
    for step in micro_steps:
        digest = hashlib.blake2b(digest_size=8)
        for array in (step.work, step.tokens, step.bytes_between):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        digests.append(int.from_bytes(digest.digest(), "big"))
    return _join(digests)


def _join(fingerprints: Sequence[int]) -> str:
    """Returns one fingerprint of several, as hexadecimal digits."""
    if len(fingerprints) == 1:
        return f"{fingerprints[0]:016x}"
    text = ",".join(str(fingerprint) for fingerprint in fingerprints)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _flat(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome and its figures side by side."""
    flat = asdict(outcome)
    return {**flat.pop("figures"), **flat}
