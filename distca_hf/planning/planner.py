"""Planners: from a layout to the plan that says which rank computes which task."""

import numpy as np

from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.task import Tasks


def plan_in_place(layout: Layout) -> Plan:
    """Every rank computes the queries it holds: the plan of a placed layout, whose ranks hold equal work already.

    Only keys and values of documents that span ranks travel. Segments of one document that follow each other on one
    rank become one task.
    """
    document, start, stop, rank = (
        layout.segment_document,
        layout.segment_start,
        layout.segment_stop,
        layout.segment_rank,
    )
    order = np.lexsort((start, document, rank))
    document, start, stop, rank = document[order], start[order], stop[order], rank[order]
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (document[1:] != document[:-1]) | (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    closes = np.ones(len(order), dtype=bool)
    closes[:-1] = opens[1:]
    return Plan(layout, Tasks.sort(document[opens], start[opens], stop[closes], rank[opens]))
