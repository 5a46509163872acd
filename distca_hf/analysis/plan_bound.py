"""Plan bound: bytes that no plan as balanced as this one can do without."""

from collections.abc import Sequence

import numpy as np

from distca_hf.analysis.bounds import bytes_bound
from distca_hf.analysis.bounds.placed import key_tokens_bound
from distca_hf.analysis.plan_request import PlanRequest
from distca_hf.planning.plan import Plan


# The linear program takes a third of a second for so many ranks, and seconds for more.
MOST_RANKS_OF_LINEAR_PROGRAM = 128


def bound_bytes_total(request: PlanRequest, plans: Sequence[Plan]) -> int | None:
    """Returns the bytes of all ranks and micro-steps, documents being grouped in micro-steps as they are.

    Placed: the counting bound, on placements that do not divide heads (stripes can do with less). Fixed: the linear
    program; None where that takes too long, or scipy is not installed.
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
        most_work=-(-int(plan.work.max()) // plan.tasks.head_groups),
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
