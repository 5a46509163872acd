"""Plan: all tasks of one layout. Immutable integers with a fingerprint; every rank derives the same one.

In the plan in place every rank computes the queries that it holds, and ranks of a stripe divide its heads. A stripe of
3 ranks and 4 head groups, its work laid end to end:

| group 0 | group 1 | group 2 | group 3 |
| rank 0     | rank 1      | rank 2     |    whole groups where they fit, else a group divided by queries
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import CAUSAL_MASK, Mask, imbalance
from distca_hf.errors import PlanError
from distca_hf.layout import Layout, Stripe, join_neighbours
from distca_hf.planning.pieces import ALL_HEADS, Pieces, Tasks


# Version of the routing, a part of every fingerprint: versions that route the same tasks differently must not agree.
PLAN_VERSION = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and the tasks computed for it.

    Attributes:
        speeds: `[ranks]` relative speeds of the ranks that the work is divided by, 0 for a rank that computes nothing;
            empty where all are equal.
    """

    layout: Layout
    tasks: Tasks
    speeds: tuple[float, ...] = ()

    def validate(self) -> None:
        """Checks layout, tasks and speeds.

        Raises:
            PackingError: the layout does not cover its documents.
            PlanError: the tasks do not cover them, or the speeds are not those of the ranks.
        """
        self.layout.validate()
        self.tasks.validate(self.layout)
        if not self.speeds:
            return
        if len(self.speeds) != self.layout.num_ranks:
            raise PlanError(f"the plan has {len(self.speeds)} speeds for {self.layout.num_ranks} ranks")
        for rank, (speed, work) in enumerate(zip(self.speeds, self.work.tolist(), strict=True)):
            if not 0 <= speed < float("inf") or (speed == 0 and work):
                raise PlanError(f"rank {rank} of speed {speed} computes {work} pairs x groups of heads")

    @cached_property
    def work(self) -> IntArray:
        """`[ranks]` attended pairs x groups of heads computed by each rank."""
        return self.tasks.work_of(self.layout.num_ranks)

    def tasks_of(self, rank: int) -> IntArray:
        """Returns `[tasks, 3]` tasks of a rank: queries, keys before the first of them, and 1 if it computes one group
        of heads alone."""
        tasks, mine = self.tasks, self.tasks.server == rank
        start, stop, head = tasks.start[mine], tasks.stop[mine], tasks.head[mine]
        return np.column_stack((stop - start, start, head != ALL_HEADS))

    @cached_property
    def time(self) -> NDArray[np.float64]:
        """`[ranks]` work over speed; the work itself where all ranks are equally fast."""
        if not self.speeds:
            return self.work.astype(np.float64)
        speeds = np.array(self.speeds, dtype=np.float64)
        return np.divide(self.work, speeds, out=np.zeros_like(speeds), where=speeds > 0)

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`; with speeds, the longest time over the time of an even split."""
        return imbalance(self.work, self.speeds)

    @cached_property
    def pieces(self) -> Pieces:
        """Layout and tasks cut at each other's borders."""
        return Pieces.cut(self.layout, self.tasks)

    @cached_property
    def moves_queries(self) -> bool:
        """Whether any query is computed on another rank than its owner."""
        return bool(self.pieces.moved.any())

    @cached_property
    def has_remote_queries(self) -> np.ndarray:
        """`[tasks]` whether queries of a task come from another rank."""
        moved = np.zeros(len(self.tasks), dtype=bool)
        moved[self.pieces.task[self.pieces.moved]] = True
        return moved

    @cached_property
    def reads_others(self) -> np.ndarray:
        """`[tasks]` whether a task may need keys that its server does not hold."""
        return self.has_remote_queries | (self.tasks.first_key < self.tasks.start)

    @cached_property
    def fingerprint(self) -> int:
        """Digest of 63 bits. It is equal on two ranks only if layout, tasks, mask and speeds are."""
        digest = hashlib.blake2b(PLAN_VERSION.to_bytes(8, "little"), digest_size=8)
        layout, tasks = self.layout, self.tasks
        for array in (
            layout.document_tokens,
            layout.segment_document,
            layout.segment_start,
            layout.segment_stop,
            layout.rank_segments,
            layout.rank_rows,
            tasks.document,
            tasks.start,
            tasks.stop,
            tasks.server,
            tasks.head,
            np.array([tasks.head_groups]),
        ):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if tasks.mask != CAUSAL_MASK:
            digest.update(repr(tasks.mask).encode())
        if self.speeds:
            digest.update(np.array(self.speeds, dtype="<f8").data)
        return int.from_bytes(digest.digest(), "big") >> 1


def plan_in_place(layout: Layout, head_groups: int = 1, mask: Mask = CAUSAL_MASK) -> Plan:
    """Plans a placed layout: ranks compute the queries that they hold, and ranks of a stripe divide its heads.

    Ranks of a placed layout then have equal work. Keys and values of documents that span ranks travel, and queries of
    stripes; no other rows do. Segments of one document that follow each other on one rank become one task.

    Args:
        layout: ranks, and the tokens that each of them holds.
        head_groups: groups that heads can be divided into. A stripe may have more ranks than groups.
        mask: keys that queries attend.
    """
    held = join_neighbours(layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank)
    if not layout.stripes:
        return Plan(layout, Tasks.sort(*held, mask=mask))
    return Plan(layout, _with_stripes(layout, np.stack(held, axis=1), head_groups, mask))


def _with_stripes(layout: Layout, held: IntArray, head_groups: int, mask: Mask) -> Tasks:
    """Returns tasks of a layout with stripes. A document with a stripe has tasks of single groups only.

    Args:
        layout: ranks, and the tokens that each of them holds.
        held: `[tasks, 4]` document, start, stop and rank of the ranges that ranks hold, neighbours joined.
        head_groups, mask: see `plan_in_place`.
    """
    # 1. Documents with a stripe: outside of it each group stays with its owner, inside of it ranks divide the groups.
    rows = []
    is_striped = np.zeros(layout.num_documents, dtype=bool)
    is_striped[[stripe.document for stripe in layout.stripes]] = True
    has_stripe = is_striped[held[:, 0]]
    for document, start, stop, rank in held[has_stripe].tolist():
        for left, right in _outside(start, stop, [stripe for stripe in layout.stripes if stripe.document == document]):
            rows += [(document, left, right, rank, group) for group in range(head_groups)]
    rows += [row for stripe in layout.stripes for row in divide_stripe(stripe, head_groups, mask)]

    # 2. All other documents stay with their owners, all heads together.
    whole = held[~has_stripe]
    whole = np.column_stack((whole, np.full(len(whole), ALL_HEADS)))
    document, start, stop, server, head = np.concatenate([whole, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Tasks.sort(document, start, stop, server, head, head_groups, mask)


def _outside(start: int, stop: int, stripes: list[Stripe]) -> list[tuple[int, int]]:
    """Cuts stripes out of [start, stop) and returns the ranges that are left."""
    left = []
    for stripe in sorted(stripes, key=lambda stripe: stripe.start):
        if stripe.start < stop and stripe.stop > start:
            left.append((start, stripe.start))
            start = stripe.stop
    return [(begin, end) for begin, end in [*left, (start, stop)] if begin < end]


def divide_stripe(stripe: Stripe, head_groups: int, mask: Mask = CAUSAL_MASK) -> list[tuple[int, int, int, int, int]]:
    """Divides a stripe's work equally among its ranks: (document, start, stop, rank, group) of each task.

    The work of all head groups is laid end to end, and every rank gets the next equal part. Groups stay whole where
    they can; a group at a border is divided by queries.
    """
    ranks = stripe.stop_rank - stripe.first_rank
    of_group = mask.pairs(stripe.start, stripe.stop)
    borders = [rank * head_groups * of_group // ranks for rank in range(ranks + 1)]
    tasks = []
    for rank, (begin, end) in enumerate(pairwise(borders)):
        for group in range(begin // of_group, ceil_div(end, of_group)):
            first, last = max(0, begin - group * of_group), min(of_group, end - group * of_group)
            start, stop = _query_at(stripe, first, mask), _query_at(stripe, last, mask)
            if start < stop:
                tasks.append((stripe.document, start, stop, stripe.first_rank + rank, group))
    return tasks


def _query_at(stripe: Stripe, pairs: int, mask: Mask) -> int:
    """Finds the query that attended pair number `pairs` belongs to, counted from the stripe's first query on; `stop`
    behind the last pair."""
    query = mask.queries_of(mask.pairs_before(stripe.start) + pairs)
    return min(max(query, stripe.start), stripe.stop)
