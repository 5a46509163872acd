"""Compare: all baselines on the documents of one optimizer step, and a lower bound of the bytes of its plans."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline
from distca_hf.analysis.baselines.packing import sorted_packs, whole_documents
from distca_hf.analysis.baselines.published_greedy import PUBLISHED_TOLERANCE, published_greedy
from distca_hf.analysis.baselines.sequence_parallel import context_parallel, ulysses
from distca_hf.analysis.bounds import bytes_bound
from distca_hf.analysis.bounds.placed import key_tokens_bound
from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.planning.plan import Plan


# Tolerances of the published planner, as shares of the mean work: of its code, of its paper's figures, and none.
TOLERANCES = (PUBLISHED_TOLERANCE, 0.05, 0.0)


def run_baselines(request: PlanRequest, batches: Sequence[IntArray]) -> Iterator[tuple[str, list[Baseline], float]]:
    """Yields name, micro-steps and seconds of every baseline; each has the same documents in the same order.

    Args:
        request: world and model.
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
    for tolerance in TOLERANCES:
        yield partial(published_greedy, num_ranks=ranks, token_bytes=token_bytes, tolerance=tolerance)
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


# Maximum number of ranks of the linear program, which takes a third of a second for these, and seconds for more.
MOST_RANKS_OF_LINEAR_PROGRAM = 128


def bound_bytes_total(request: PlanRequest, plans: Sequence[Plan]) -> int | None:
    """Returns a lower bound of the bytes of all ranks and micro-steps, with the documents of each as they are.

    For placed layouts it is the counting bound, for placements that do not divide heads (stripes may need less). For
    fixed layouts it is the optimum of the linear program; None where that takes too long, or scipy is not installed.
    """
    if request.layout == "placed":
        return sum(_placed(request, plan) for plan in plans)
    if request.num_ranks > MOST_RANKS_OF_LINEAR_PROGRAM:
        return None
    try:
        return sum(_fixed(request, plan) for plan in plans)
    except ImportError:
        return None


def _placed(request: PlanRequest, plan: Plan) -> int:
    """Returns the counting bound of one micro-step."""
    tokens = key_tokens_bound(
        plan.layout.document_tokens,
        request.num_ranks,
        most_work=ceil_div(int(plan.work.max()), plan.tasks.head_groups),
        fewest_tokens=int(plan.layout.rank_tokens.min()),
        most_tokens=int(plan.layout.rank_tokens.max()),
    )
    return tokens * request.model.token_bytes.key_value


def _fixed(request: PlanRequest, plan: Plan) -> int:
    """Returns the bound of the linear program of one micro-step."""
    groups = request.model.heads.groups
    largest_work = int(plan.work.max()) * groups // plan.tasks.head_groups
    limits = np.full(request.num_ranks, largest_work)
    return bytes_bound(plan.layout, limits, groups, request.model.token_bytes).total
