"""Unstacking: from stacks, and what they gave, to tasks."""

import numpy as np

from distca_hf.layout import Layout
from distca_hf.planning.moving.stacks import Stack
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.task import ALL_HEADS, Tasks


Range = tuple[int, int, int]  # start, stop, server


def tasks_of(layout: Layout, stacks: list[Stack], head_groups: int) -> Tasks:
    """Tasks of a layout: what stacks say of their documents, and every other document where it is held.

    A document gets tasks of single groups of heads only if not all groups go the same ways.
    """
    home = plan_in_place(layout).tasks
    ranges: dict[int, list[list[Range]]] = {}
    for stack in stacks:
        heads = ranges.setdefault(stack.document, [[] for _ in range(head_groups)])
        for head, start, stop, server in stack.parts():
            heads[head].append((start, stop, server))
    rows: list[tuple[int, int, int, int, int]] = []
    for document, heads in ranges.items():
        joined = [_join(parts) for parts in heads]
        if all(parts == joined[0] for parts in joined):
            rows += [(document, *part, ALL_HEADS) for part in joined[0]]
        else:
            rows += [(document, *part, head) for head, parts in enumerate(joined) for part in parts]
    stays = np.ones(layout.num_documents, dtype=bool)
    stays[list(ranges)] = False
    kept = np.flatnonzero(stays[home.document])
    untouched = np.stack((home.document, home.start, home.stop, home.server, home.head), axis=1)[kept]
    columns = np.concatenate([untouched, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Tasks.sort(columns[0], columns[1], columns[2], columns[3], columns[4], head_groups)


def _join(parts: list[Range]) -> list[Range]:
    """Ranges in order, neighbours of one server as one."""
    joined: list[Range] = []
    for start, stop, server in sorted(parts):
        if joined and joined[-1][1:] == (start, server):
            start = joined.pop()[0]
        joined.append((start, stop, server))
    return joined
