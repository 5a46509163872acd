"""Compare: all baselines on the documents of one window."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline
from distca_hf.analysis.baselines.context_parallel import context_parallel
from distca_hf.analysis.baselines.lpt import whole_documents
from distca_hf.analysis.baselines.published_greedy import PUBLISHED_TOLERANCE, published_greedy
from distca_hf.analysis.baselines.sorted_packs import sorted_packs
from distca_hf.analysis.baselines.ulysses import ulysses
from distca_hf.analysis.plan_request import PlanRequest
from distca_hf.cost import IntArray


# Tolerances of the published planner: that of its code, that of its paper's figures, and none.
TOLERANCES = (PUBLISHED_TOLERANCE, 0.05, 0.0)


def run_baselines(request: PlanRequest, batches: Sequence[IntArray]) -> Iterator[tuple[str, list[Baseline], float]]:
    """Returns name, micro-steps and seconds of every baseline; each sees the same documents in the same order.

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
    """Baselines that know nothing of other micro-steps."""
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
