"""Moving tasks: a plan for a layout that must stay as it is, because somebody else packed it.

Tokens stay where they are; ranks with more than the mean work hand queries, from the end of their longest documents,
to those with less.
"""

import heapq
from math import isqrt

import numpy as np

from distca_hf.cost import IntArray, causal_pairs
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.task import Tasks


# Work this small a share of the mean is not worth moving: its keys would cost more than it saves.
SLIVER = 0.01


def plan_by_moving(layout: Layout) -> Plan:
    """A two-sided greedy plan: no rank that gives falls below the mean, none that takes gets above it.

    The longest document goes first: the later a query is in its document, the more work it takes along for the same
    bytes.
    """
    start_plan = plan_in_place(layout)
    work = start_plan.work
    mean = -(-int(work.sum()) // layout.num_ranks)
    sliver = max(1, int(SLIVER * mean))
    if int(work.max(initial=0)) <= mean + sliver:
        return start_plan
    takers = [(-(mean - int(load)), rank) for rank, load in enumerate(work) if mean - load > sliver]
    heapq.heapify(takers)
    tasks = start_plan.tasks
    stays = np.ones(len(tasks), dtype=bool)
    changed: list[tuple[int, int, int, int]] = []
    for giver in np.argsort(-work, kind="stable"):
        surplus = int(work[giver]) - mean
        longest_first = _longest_first(tasks, int(giver)) if surplus > sliver else iter(())
        for task in longest_first:
            document, start, stop = int(tasks.document[task]), int(tasks.start[task]), int(tasks.stop[task])
            end = stop
            while surplus > sliver and takers and end > start:
                lack, taker = heapq.heappop(takers)
                begin = _tail(start, end, min(surplus, -lack))
                pairs = causal_pairs(begin, end)
                if pairs == 0:
                    heapq.heappush(takers, (lack, taker))
                    break
                changed.append((document, begin, end, taker))
                surplus, lack, end = surplus - pairs, lack + pairs, begin
                if -lack > sliver:
                    heapq.heappush(takers, (lack, taker))
            if end < stop:
                stays[task] = False
                if end > start:
                    changed.append((document, start, end, int(giver)))
            if surplus <= sliver or not takers:
                break
    moved = np.array(changed, dtype=np.int64).reshape(-1, 4)
    columns = (tasks.document, tasks.start, tasks.stop, tasks.server)
    return Plan(
        layout, Tasks.sort(*(np.concatenate([column[stays], moved[:, at]]) for at, column in enumerate(columns)))
    )


def _longest_first(tasks: Tasks, server: int) -> IntArray:
    """Indices of a server's tasks, most work first."""
    mine = np.flatnonzero(tasks.server == server)
    return mine[np.argsort(-tasks.pairs[mine], kind="stable")]


def _tail(start: int, stop: int, most_pairs: int) -> int:
    """Where the longest tail of [start, stop) begins that has at most `most_pairs` attended pairs."""
    left = stop * (stop + 1) - 2 * most_pairs
    if left <= start * (start + 1):
        return start
    begin = (isqrt(4 * left + 1) - 1) // 2
    return begin if begin * (begin + 1) >= left else begin + 1
