"""First step: the first optimizer step, planned as training plans it, in numbers.

If asked for, baselines on the same documents stand next to the plan of distca.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

import numpy as np

from distca_hf.analysis.baselines import (
    Baseline,
    Figures,
    context_parallel,
    figures_of,
    sorted_packs,
    ulysses,
    whole_documents,
)
from distca_hf.analysis.epoch import OptimizerStep, Origin
from distca_hf.analysis.request import PlanRequest, plan_micro_steps
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.errors import PlanError
from distca_hf.placement.place import work_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between


@dataclass(frozen=True)
class Outcome:
    """One way to run the optimizer step.

    Attributes:
        figures: its balance and bytes.
        planning_seconds: time of planning.
        fingerprint: equal for equal outcomes.
    """

    figures: Figures
    planning_seconds: float
    fingerprint: str


@dataclass(frozen=True, eq=False)
class StepReport:
    """A planned optimizer step, and baselines on the same documents.

    Attributes:
        request: ranks, model and layout.
        source: file or dataset of the lengths.
        origin: place of the step in training; None if the documents were given as a batch.
        documents, tokens: how many there are.
        longest_document_tokens: length of the longest document.
        cut_documents: number of documents with more than one task.
        shards: number of their tasks.
        imbalance_before: imbalance of documents in order, if every rank computes its own tokens.
        planned: the plan of distca.
        baselines: other kinds of parallelism, by name.
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
    planned: Outcome
    baselines: dict[str, Outcome]
    work_before: IntArray
    work: IntArray
    micro_batches: list["PlannedMicroBatch"]

    def as_json(self) -> dict[str, object]:
        """Returns one flat JSON object; `baselines` has one more for each baseline, with the same keys."""
        names = [field.name for field in fields(Origin)]
        origin = dict.fromkeys(names) if self.origin is None else asdict(self.origin)
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
            "other_layers": self.request.model.other_layers,
            "limits": list(self.request.model.limits),
            "layout": self.request.layout,
            "source": self.source,
            **origin,
            **world,
            **_flat(self.planned),
            "cut_documents": self.cut_documents,
            "shards": self.shards,
            "micro_batches": [planned.as_json() for planned in self.micro_batches],
            "baselines": {name: {**world, **_flat(outcome)} for name, outcome in self.baselines.items()},
        }


@dataclass(frozen=True, eq=False)
class PlannedMicroBatch:
    """The ranks in one micro-step.

    Attributes:
        document_tokens: `[documents]` lengths, in the order of the micro-step.
        planned: work, tokens and bytes of the plan.
    """

    document_tokens: IntArray
    planned: Baseline

    def as_json(self) -> dict[str, object]:
        """Returns one object. Work is attended pairs: of the same documents in order, and as planned. Bytes are
        (source, destination, bytes) of one layer's forward pass."""
        sent = self.planned.bytes_between
        source, destination = np.nonzero(sent)
        return {
            "documents": len(self.document_tokens),
            "longest_document_tokens": int(self.document_tokens.max(initial=0)),
            "rank_work_before": work_in_order(self.document_tokens, len(self.planned.work)).tolist(),
            "rank_work": (self.planned.work / self.planned.head_parts).tolist(),
            "rank_tokens": self.planned.tokens.tolist(),
            "bytes_between": np.stack([source, destination, sent[source, destination]], axis=1).tolist(),
        }


def make_report(
    request: PlanRequest, step: OptimizerStep, source: str = "lengths", compare: bool = False
) -> StepReport:
    """Plans an optimizer step and counts work and bytes.

    Args:
        request: ranks, model and layout.
        step: documents of the step.
        source: file or dataset of the lengths.
        compare: whether to run the baselines, too.

    Raises:
        PackingError: lengths are out of range.
        PlanError: a rank has to send or receive more than the limit of the request.
    """
    # 1. Plans, which alone are timed.
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
    # 2. The same documents in order, and baselines.
    in_order = [work_in_order(batch, request.num_ranks) for batch in batches]
    lengths = np.concatenate(batches)
    cut_documents, shards = np.sum([_shards(plan) for plan in plans], axis=0).tolist()
    baselines = {}
    if compare:
        for name, micro_steps, seconds in run_baselines(request, batches):
            figures = figures_of(micro_steps, request.topology)
            baselines[name] = Outcome(figures, seconds, _fingerprint(micro_steps))
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
            figures_of(planned, request.topology), planning_seconds, _join([plan.fingerprint for plan in plans])
        ),
        baselines=baselines,
        work_before=np.sum(in_order, axis=0),
        work=np.sum([plan.work * (request.model.heads.groups // plan.tasks.head_groups) for plan in plans], axis=0),
        micro_batches=[
            PlannedMicroBatch(plan.layout.document_tokens, of_ranks)
            for plan, of_ranks in zip(plans, planned, strict=True)
        ],
    )


def _check_bytes_limit(micro_steps: Sequence[Baseline], bytes_limit: int | None) -> None:
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
    """Returns advice in words: the most ranks, halved repeatedly, on which the same documents meet the limit."""
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


def _shards(plan: Plan) -> tuple[int, int]:
    """Counts the documents with more than one task, and their tasks."""
    tasks = np.bincount(plan.tasks.document, minlength=plan.layout.num_documents)
    return int((tasks > 1).sum()), int(tasks[tasks > 1].sum())


def _imbalance(work: Sequence[IntArray]) -> float:
    """Returns the sum of the heaviest ranks over the sum of the means."""
    total = sum(int(step.sum()) for step in work)
    return sum(int(step.max()) for step in work) * len(work[0]) / total if total else 1.0


def _fingerprint(micro_steps: Sequence[Baseline]) -> str:
    """Returns a fingerprint that is equal for baselines with equal work, tokens and bytes."""
    digests = []
    for step in micro_steps:
        digest = hashlib.blake2b(digest_size=8)
        for array in (step.work, step.tokens, step.bytes_between):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        digests.append(int.from_bytes(digest.digest(), "big"))
    return _join(digests)


def _join(fingerprints: Sequence[int]) -> str:
    """Combines fingerprints into one, as hexadecimal digits."""
    if len(fingerprints) == 1:
        return f"{fingerprints[0]:016x}"
    text = ",".join(str(fingerprint) for fingerprint in fingerprints)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _flat(outcome: Outcome) -> dict[str, object]:
    """Returns an outcome and its figures in one flat JSON object."""
    flat = asdict(outcome)
    return {**flat.pop("figures"), **flat}


def run_baselines(request: PlanRequest, batches: Sequence[IntArray]) -> Iterator[tuple[str, list[Baseline], float]]:
    """Yields name, micro-steps and seconds of every baseline; each has the same documents in the same order.

    Args:
        request: ranks and model.
        batches: lengths of the documents of every micro-step.
    """
    for run in _each_micro_step(request):
        began = time.perf_counter()
        micro_steps = [run(batch) for batch in batches]
        yield micro_steps[0].name, micro_steps, time.perf_counter() - began
    began = time.perf_counter()
    micro_steps = sorted_packs(np.concatenate(batches), request.num_ranks, len(batches))
    yield micro_steps[0].name, micro_steps, time.perf_counter() - began


def _each_micro_step(request: PlanRequest) -> Iterator[Callable[[IntArray], Baseline]]:
    """Yields the baselines that treat each micro-step separately, as functions of its document lengths."""
    ranks, model = request.num_ranks, request.model
    token_bytes, heads, key_value_heads = model.token_bytes, model.heads.query, model.heads.key_value
    groups = [ranks] if ranks <= request.ranks_per_node else [ranks, request.ranks_per_node]
    for group in groups:
        yield partial(context_parallel, num_ranks=ranks, token_bytes=token_bytes, group_ranks=group)
    for group in groups:
        if group <= heads:
            yield partial(
                ulysses,
                num_ranks=ranks,
                token_bytes=token_bytes,
                heads=heads,
                key_value_heads=key_value_heads,
                group_ranks=group,
            )
    yield partial(whole_documents, num_ranks=ranks, token_bytes=token_bytes)
