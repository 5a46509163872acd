"""Plan step: the plans of an optimizer step, made by the planners of training: `PlacedPlanner` for documents that are
placed, `plan_by_moving` for packs of others."""

from collections.abc import Sequence

import numpy as np

from distca_hf.analysis.plan_request import PlanRequest
from distca_hf.cost import IntArray
from distca_hf.data.epochs import Epoch
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving


def plan_micro_steps(request: PlanRequest, micro_batches: Sequence[IntArray]) -> list[Plan]:
    """Plans every micro-step.

    Args:
        request: world, model and way of planning.
        micro_batches: lengths of the documents of each, in the order in which they were packed; none holds more
            tokens than all ranks together.

    Raises:
        PackingError: lengths are out of range.
        PlanError: documents stay where they are, and no plan meets the request's limit of bytes.
    """
    if request.layout == "fixed":
        return [_plan_fixed(request, batch) for batch in micro_batches]
    planner = request.planner
    lengths = np.concatenate(micro_batches)
    as_packed = Epoch(np.arange(len(lengths)), np.cumsum([0] + [len(batch) for batch in micro_batches]))
    step = planner.regroup(as_packed, lengths, len(micro_batches))
    return [planner.plan(lengths[step.micro_batch(index)]) for index in range(step.num_micro_batches)]


def _plan_fixed(request: PlanRequest, document_tokens: IntArray) -> Plan:
    """Plans documents in order, and moves tasks. In training other packers decide which documents are where; each of
    their packs holds whole documents."""
    return plan_by_moving(
        fill_in_order(document_tokens, request.num_ranks),
        request.model.heads.groups,
        topology=request.topology,
        token_bytes=request.model.token_bytes,
        bytes_limit=request.bytes_limit,
    )
