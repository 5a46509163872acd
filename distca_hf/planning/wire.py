"""Wire: a plan as one array of integers and back, to hand it to processes that do not plan themselves.

    | version, head groups, window | lengths of the 12 arrays | the arrays, one after the other |

Both sides have equal plans: equal fingerprints, and so the same routings. Stripes are left out, because tasks already
hold what planning made of them.
"""

from typing import Any

import numpy as np

from distca_hf.arrays import IntArray, offsets
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PackingError, PlanError
from distca_hf.layout import Layout
from distca_hf.planning.pieces import Tasks
from distca_hf.planning.plan import PLAN_VERSION, Plan


# Integers before the lengths: version, head groups, tokens of the window (0 for none).
NUM_NUMBERS = 3
LAYOUT_ARRAYS = (
    "document_tokens",
    "segment_document",
    "segment_start",
    "segment_stop",
    "rank_segments",
    "rank_rows",
)
TASK_ARRAYS = ("document", "start", "stop", "server", "head")
NUM_ARRAYS = len(LAYOUT_ARRAYS) + len(TASK_ARRAYS) + 1  # and the speeds
HEADER_LENGTH = NUM_NUMBERS + NUM_ARRAYS


def plan_to_integers(plan: Plan) -> IntArray:
    """Writes a plan as a flat int64 array. Speeds are the bits of float64 numbers."""
    layout, tasks = plan.layout, plan.tasks
    arrays = [
        *(getattr(layout, name) for name in LAYOUT_ARRAYS),
        *(getattr(tasks, name) for name in TASK_ARRAYS),
        np.array(plan.speeds, dtype=np.float64).view(np.int64),
    ]
    header = [PLAN_VERSION, tasks.head_groups, tasks.mask.window_tokens or 0, *map(len, arrays)]
    return np.concatenate([np.array(header, dtype=np.int64), *arrays])


def plan_from_integers(integers: IntArray) -> Plan:
    """Reads a plan from the array that `plan_to_integers` wrote, and validates it.

    Raises:
        PlanError: it is no such array, is cut off or goes on behind the plan, is of another version, or holds a plan
            that breaks its own invariants.
    """
    # 1. Header: numbers, and lengths that add up to the rest.
    if not isinstance(integers, np.ndarray) or integers.dtype != np.int64 or integers.ndim != 1:
        found = f"{integers.dtype} {integers.shape}" if isinstance(integers, np.ndarray) else type(integers).__name__
        raise PlanError(f"a plan is a flat array of int64, not {found}")
    if len(integers) < HEADER_LENGTH:
        raise PlanError(f"a plan of {len(integers)} integers is cut off: its header alone has {HEADER_LENGTH}")
    version, head_groups, window_tokens, *lengths = integers[:HEADER_LENGTH].tolist()
    if version != PLAN_VERSION:
        raise PlanError(f"the plan is of version {version}, this is {PLAN_VERSION}; run one version on all processes")
    if min(lengths) < 0 or sum(lengths) != len(integers) - HEADER_LENGTH:
        raise PlanError(
            f"the arrays of a plan have {lengths} integers, in all {sum(lengths)}; {len(integers) - HEADER_LENGTH} "
            "follow its header"
        )

    # 2. Arrays of one table are equally long; no number asks for more room than the arrays take.
    _, *of_segments, borders, ranks = lengths[: len(LAYOUT_ARRAYS)]
    of_tasks, speeds = lengths[len(LAYOUT_ARRAYS) : -1], lengths[-1]
    if len({*of_segments}) > 1 or borders != ranks + 1 or len({*of_tasks}) > 1 or speeds not in (0, ranks):
        raise PlanError(
            f"arrays of one plan do not belong together: lengths {lengths} of {', '.join(LAYOUT_ARRAYS)}; of "
            f"{', '.join(TASK_ARRAYS)} of tasks; and of speeds"
        )
    if not 1 <= head_groups <= max(1, of_tasks[0]) or window_tokens < 0:
        raise PlanError(
            f"a plan of {of_tasks[0]} tasks cannot have {head_groups} head groups and a window of {window_tokens}"
        )

    # 3. The plan.
    begins = HEADER_LENGTH + offsets(np.array(lengths, dtype=np.int64))[:-1]
    arrays = np.split(integers.copy(), begins)[1:]
    of_layout: dict[str, Any] = dict(zip(LAYOUT_ARRAYS, arrays[: len(LAYOUT_ARRAYS)], strict=True))
    tasks = dict(zip(TASK_ARRAYS, arrays[len(LAYOUT_ARRAYS) : -1], strict=True))
    mask = Mask(window_tokens) if window_tokens else CAUSAL_MASK
    speeds_of_ranks = tuple(arrays[-1].view(np.float64).tolist())
    plan = Plan(Layout(**of_layout), Tasks(**tasks, head_groups=head_groups, mask=mask), speeds_of_ranks)
    try:
        plan.validate()
    except PackingError as error:
        raise PlanError(f"the layout of a plan is damaged: {error}") from error
    return plan
