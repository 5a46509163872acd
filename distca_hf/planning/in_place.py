"""Planners: from a layout to the plan that says which rank computes which task."""

from itertools import pairwise
from math import isqrt

import numpy as np

from distca_hf.cost import IntArray, causal_pairs
from distca_hf.layout import Layout, Stripe, join_neighbours
from distca_hf.planning.plan import Plan
from distca_hf.planning.tasks import ALL_HEADS, Tasks


def plan_in_place(layout: Layout, head_groups: int = 1) -> Plan:
    """Every rank computes the queries it holds, but for stripes, whose ranks divide their heads: the plan of a placed
    layout, which gives equal work to all ranks.

    Only keys and values of documents that span ranks travel, and queries of stripes. Segments of one document that
    follow each other on one rank become one task.

    Args:
        layout: who holds what.
        head_groups: groups that heads can be divided in; any number, also fewer than a stripe has ranks.
    """
    at_home = join_neighbours(layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank)
    if not layout.stripes:
        return Plan(layout, Tasks.sort(*at_home))
    return Plan(layout, _with_stripes(layout, np.stack(at_home, axis=1), head_groups))


def _with_stripes(layout: Layout, at_home: IntArray, head_groups: int) -> Tasks:
    """Tasks at home, where a document with a stripe has one for every group of heads, and tasks of stripes.

    Args:
        layout: who holds what.
        at_home: `[tasks, 4]` document, start, stop and rank of what each rank holds, neighbours joined.
        head_groups: see `plan_in_place`.
    """
    rows = []
    is_striped = np.zeros(layout.num_documents, dtype=bool)
    is_striped[[stripe.document for stripe in layout.stripes]] = True
    has_stripe = is_striped[at_home[:, 0]]
    for document, start, stop, rank in at_home[has_stripe].tolist():
        for left, right in _outside(start, stop, [stripe for stripe in layout.stripes if stripe.document == document]):
            rows += [(document, left, right, rank, group) for group in range(head_groups)]
    rows += [row for stripe in layout.stripes for row in divide_stripe(stripe, head_groups)]
    whole = at_home[~has_stripe]
    whole = np.column_stack((whole, np.full(len(whole), ALL_HEADS)))
    document, start, stop, server, head = np.concatenate([whole, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Tasks.sort(document, start, stop, server, head, head_groups)


def _outside(start: int, stop: int, stripes: list[Stripe]) -> list[tuple[int, int]]:
    """What is left of [start, stop) without some stripes."""
    left = []
    for stripe in sorted(stripes, key=lambda stripe: stripe.start):
        if stripe.start < stop and stripe.stop > start:
            left.append((start, stripe.start))
            start = stripe.stop
    return [(begin, end) for begin, end in [*left, (start, stop)] if begin < end]


def divide_stripe(stripe: Stripe, head_groups: int) -> list[tuple[int, int, int, int, int]]:
    """Equal shares of a stripe's work for its ranks: (document, start, stop, rank, group) of each task.

    The work of all groups of heads, one after the other, is a line; every rank takes the next stretch of it. So whole
    groups stay together where they can, and a group is divided by queries where they cannot.
    """
    ranks = stripe.stop_rank - stripe.first_rank
    of_group = causal_pairs(stripe.start, stripe.stop)
    borders = [rank * head_groups * of_group // ranks for rank in range(ranks + 1)]
    tasks = []
    for rank, (begin, end) in enumerate(pairwise(borders)):
        for group in range(begin // of_group, -(-end // of_group)):
            first, last = max(0, begin - group * of_group), min(of_group, end - group * of_group)
            start, stop = _query_at(stripe, first), _query_at(stripe, last)
            if start < stop:
                tasks.append((stripe.document, start, stop, stripe.first_rank + rank, group))
    return tasks


def _query_at(stripe: Stripe, pairs: int) -> int:
    """The query of a stripe that the `pairs`-th attended pair belongs to, of a group whose pairs are counted from the
    stripe's first query on; `stop` if there are no more."""
    before = causal_pairs(0, stripe.start)
    query = (isqrt(8 * (before + pairs) + 1) - 1) // 2
    return min(max(query, stripe.start), stripe.stop)
