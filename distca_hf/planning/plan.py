"""Plan: all tasks of one layout. Immutable integers with a fingerprint; every rank derives the same one.

In the plan in place, every rank computes the queries that it holds, and ranks of a stripe divide its heads. A stripe
of 3 ranks and 4 head groups, with its work laid end to end:

| group 0 | group 1 | group 2 | group 3 |
| rank 0     | rank 1      | rank 2     |    whole groups where they fit, else a group divided by queries
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, ceil_div, sum_by
from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes, imbalance
from distca_hf.errors import PlanError
from distca_hf.flops import StepFlops
from distca_hf.layout import Layout, Stripe, Topology, join_neighbours
from distca_hf.planning.pieces import ALL_HEADS, Pieces, Tasks


# Version of the routing, part of every fingerprint: versions that route the same tasks differently must not agree.
PLAN_VERSION = 4
# Arrays of a plan, in the order of its fingerprint and of its integers.
LAYOUT_ARRAYS = ("document_tokens", "segment_document", "segment_start", "segment_stop", "rank_segments", "rank_rows")
TASK_ARRAYS = ("document", "start", "stop", "rank", "head")


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and its tasks.

    Attributes:
        speeds: `[ranks]` relative speeds by which work is divided, 0 for a rank that computes nothing; empty if all
            are equal.
    """

    layout: Layout
    tasks: Tasks
    speeds: tuple[float, ...] = ()

    def validate(self) -> None:
        """Checks layout, tasks and speeds.

        Raises:
            PackingError: the layout does not cover its documents.
            PlanError: the tasks do not cover them, or the speeds do not fit the ranks.
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
        work = np.zeros(self.layout.num_ranks, dtype=np.int64)
        np.add.at(work, self.tasks.rank, self.tasks.work)  # sums may exceed 2 ** 53
        return work

    def tasks_of(self, rank: int) -> IntArray:
        """Returns `[tasks, 3]` tasks of a rank: queries, keys before the first of them, and 1 if it computes only one
        group of heads."""
        tasks, mine = self.tasks, self.tasks.rank == rank
        start, stop, head = tasks.start[mine], tasks.stop[mine], tasks.head[mine]
        return np.column_stack((stop - start, start, head != ALL_HEADS))

    @cached_property
    def time(self) -> NDArray[np.float64]:
        """`[ranks]` work over speed; the work itself if all ranks are equally fast."""
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

    def of_window(self, mask: Mask) -> "Plan":
        """Returns the plan of layers with a window: every rank computes all heads of the queries that it holds.

        Tasks keep their order under this plan's mask.
        """
        stays = not (self.moves_queries or self.layout.stripes) and self.tasks.head_groups == 1
        in_place = self if stays else plan_in_place(replace(self.layout, stripes=()))
        plan = Plan(in_place.layout, replace(in_place.tasks, mask=mask))
        vars(plan)["pieces"] = in_place.pieces  # the same for every mask
        return plan

    @cached_property
    def moves_queries(self) -> bool:
        """Whether another rank than its owner computes any query."""
        return bool(self.pieces.moved.any())

    @cached_property
    def has_remote_queries(self) -> np.ndarray:
        """`[tasks]` whether queries of a task come from another rank."""
        moved = np.zeros(len(self.tasks), dtype=bool)
        moved[self.pieces.task[self.pieces.moved]] = True
        return moved

    @cached_property
    def reads_others(self) -> np.ndarray:
        """`[tasks]` whether a task may need keys that its rank does not hold."""
        return self.has_remote_queries | (self.tasks.first_key < self.tasks.start)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit digest. It is equal on two ranks only if layout, tasks, mask and speeds are."""
        digest = hashlib.blake2b(PLAN_VERSION.to_bytes(8, "little"), digest_size=8)
        layout, tasks = self.layout, self.tasks
        for array in (
            *(getattr(layout, name) for name in LAYOUT_ARRAYS),
            *(getattr(tasks, name) for name in TASK_ARRAYS),
            np.array([tasks.head_groups]),
            *(() if layout.shared is None else layout.shared.arrays),
        ):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if tasks.mask != CAUSAL_MASK:
            digest.update(repr(tasks.mask).encode())
        if self.speeds:
            digest.update(np.array(self.speeds, dtype="<f8").data)
        return int.from_bytes(digest.digest(), "big") >> 1


@dataclass(frozen=True)
class PlanFacts:
    """Numbers about a micro-batch, the same on all ranks.

    Attributes:
        num_documents, num_tokens, longest_document_tokens: documents of the global micro-batch.
        shared_tokens: tokens that layers do not compute, because another document begins with them, too.
        cut_documents: documents that lie in several segments.
        work: attended pairs x head groups of each rank, as planned.
        work_before: the same for documents packed in order, for the ranks that hold tokens.
        key_rows_sent: rows of keys and values that each rank sends, per layer, forward.
        query_rows_sent: rows of queries that each rank sends, and rows of outputs that it receives for them.
        key_rows_received: rows of keys and values that each rank receives.
        remote_query_rows: rows of queries that each rank computes for others, including local rows of the same tasks.
        rows_per_token: 1, or the number of groups into which the plan divides heads.
        speeds: relative speed of each rank, if they differ (see `Plan`).
        kinds: if a model has several masks, facts of the layers with each, and their number. Then the numbers above
            are means over all layers.
        window_tokens: window of these layers; None for full attention or several kinds.
        tokens_before, tokens: tokens of each rank that holds any, as in `work_before` and as planned; empty if only
            one is known.
        head_tokens: tokens that its head and loss compute.
    """

    num_documents: int
    longest_document_tokens: int
    work: tuple[int, ...]
    work_before: tuple[int, ...]
    key_rows_sent: tuple[int, ...]
    query_rows_sent: tuple[int, ...] = ()
    key_rows_received: tuple[int, ...] = ()
    remote_query_rows: tuple[int, ...] = ()
    rows_per_token: int = 1
    num_tokens: int = 0
    shared_tokens: int = 0
    cut_documents: int = 0
    speeds: tuple[float, ...] = ()
    kinds: tuple[tuple[Self, int], ...] = ()
    window_tokens: int | None = None
    tokens_before: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    head_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan, key_rows: IntArray, work_before: IntArray) -> "PlanFacts":
        """Counts facts of a plan.

        Args:
            key_rows: `[source rank, destination rank]` rows of keys and values sent, per layer.
            work_before: `[ranks with tokens]` attended pairs to compare the plan with.
        """
        layout, moved = plan.layout, plan.pieces.select(plan.pieces.moved)
        remote_queries = plan.pieces.select(plan.has_remote_queries[plan.pieces.task])
        queries_sent, remote_query_rows = (
            sum_by(ranks, rows, layout.num_ranks)
            for ranks, rows in ((moved.owner, moved.rows), (remote_queries.computing_rank, remote_queries.rows))
        )
        return cls(
            num_documents=layout.num_documents,
            longest_document_tokens=layout.longest_document_tokens,
            work=tuple(plan.work.tolist()),
            work_before=tuple((work_before * plan.tasks.head_groups).tolist()),
            key_rows_sent=tuple(key_rows.sum(axis=1).tolist()),
            query_rows_sent=tuple(queries_sent.tolist()),
            key_rows_received=tuple(key_rows.sum(axis=0).tolist()),
            remote_query_rows=tuple(remote_query_rows.tolist()),
            rows_per_token=plan.tasks.head_groups,
            num_tokens=int(layout.document_tokens.sum()),
            shared_tokens=layout.shared_tokens,
            cut_documents=layout.cut_documents,
            speeds=plan.speeds,
            window_tokens=plan.tasks.mask.window_tokens,
        )

    @classmethod
    def of_layers(cls, kinds: Sequence[tuple[Self, int]]) -> Self:
        """Returns facts of a model whose layers attend with several masks.

        Args:
            kinds: facts of each mask, and how many layers attend with it.
        """
        first = kinds[0][0]
        if len(kinds) == 1:
            return first
        groups, layers = max(facts.rows_per_token for facts, _ in kinds), sum(count for _, count in kinds)

        def mean(name: str) -> tuple[int, ...]:
            # If a plan divides heads, rows and work count groups of heads.
            scaled = [
                np.array(getattr(facts, name)) * (count * groups // facts.rows_per_token) for facts, count in kinds
            ]
            return tuple((np.sum(scaled, axis=0) // layers).tolist())

        rows = ("key_rows_sent", "query_rows_sent", "key_rows_received", "remote_query_rows")
        means: dict[str, Any] = {name: mean(name) for name in ("work", "work_before", *rows)}
        return replace(first, **means, rows_per_token=groups, kinds=tuple(kinds), window_tokens=None)

    def with_tokens(self, home: Layout, layout: Layout) -> Self:
        """Returns facts of given batches with the tokens of ranks, in the batches and as layers compute them. Heads
        compute the tokens of batches, until it is known that they need not."""
        of_batches, of_layers = tuple(home.rank_tokens.tolist()), tuple(layout.rank_tokens.tolist())
        return replace(self, tokens_before=of_batches, tokens=of_layers, head_tokens=of_batches)

    def with_head_on_placed_rows(self) -> Self:
        """Returns facts of given batches whose head computes the same tokens as layers."""
        facts = object.__new__(type(self))  # passes wait for this, and `replace` takes longer
        vars(facts).update(vars(self), head_tokens=self.tokens)
        return facts

    @property
    def of_full_and_windows(self) -> tuple[Self, Self] | None:
        """Facts of the layers with full attention, and of all layers with a window; None unless there are both."""
        full = [kind for kind in self.kinds if kind[0].window_tokens is None]
        windows = [kind for kind in self.kinds if kind[0].window_tokens is not None]
        return (self.of_layers(full), self.of_layers(windows)) if full and windows else None

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`; with speeds, the longest time over the time of an even split. Ranks meet in every
        layer, so for several kinds of layers it is the mean, weighted by their work."""
        return self._mean_of_kinds("imbalance", "work") if self.kinds else imbalance(self.work, self.speeds)

    @property
    def imbalance_before(self) -> float:
        """Max over mean of `work_before`."""
        return self._mean_of_kinds("imbalance_before", "work_before") if self.kinds else imbalance(self.work_before)

    def step_work(self, flops: StepFlops) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns `[ranks that hold tokens]` operations of a step, before and as planned; see `StepFlops.work`."""
        held = len(self.tokens)  # ranks without tokens come after these
        before, after = (np.array(work[:held]) / self.rows_per_token for work in (self.work_before, self.work))
        tokens_before, tokens, head_tokens = map(np.array, (self.tokens_before, self.tokens, self.head_tokens))
        return flops.work(tokens_before, before, tokens_before), flops.work(tokens, after, head_tokens)

    def _mean_of_kinds(self, name: str, work: str) -> float:
        weights = [sum(getattr(facts, work)) * count / facts.rows_per_token for facts, count in self.kinds]
        values = [getattr(facts, name) for facts, _ in self.kinds]
        return float(np.average(values, weights=weights)) if any(weights) else 1.0


class ExtraRanks(ABC):
    """Ranks without tokens that compute attention for the training ranks, and are numbered after them."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of extra ranks."""

    @abstractmethod
    def rank_speeds(self, num_trainers: int) -> tuple[float, ...]:
        """Returns `[trainers + extra ranks]` relative speeds, 0 for a rank that computes no attention."""

    @abstractmethod
    def topology(self, trainers: Topology) -> Topology:
        """Returns the topology of training ranks and extra ranks together."""

    @abstractmethod
    def plan(
        self,
        layout: Layout,
        head_groups: int = 1,
        *,
        topology: Topology | None = None,
        token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    ) -> Plan:
        """Plans a layout of the training ranks, with extra ranks computing part of its attention.

        Args:
            layout: the training ranks, and the tokens that each of them holds.
            head_groups: groups that heads may be divided into; 1 keeps heads together.
            topology: ranks of the layout that share a node; by default all of them.
            token_bytes: bytes of one token in one layer.

        Raises:
            ConfigError: head groups below 1, a topology of other ranks, or extra ranks on unknown nodes.
        """


def plan_in_place(layout: Layout, head_groups: int = 1, mask: Mask = CAUSAL_MASK) -> Plan:
    """Plans a placed layout: ranks compute the queries that they hold, and ranks of a stripe divide its heads.

    Ranks of a placed layout then have equal work. Only keys and values of documents that span ranks travel, and
    queries of stripes. Consecutive segments of one document on one rank become one task.

    Args:
        layout: ranks, and the tokens that each of them holds.
        head_groups: groups into which heads can be divided. A stripe may have more ranks than groups.
        mask: keys to which queries attend.
    """
    held = join_neighbours(layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank)
    if not layout.stripes:
        return Plan(layout, Tasks.sort(*held, mask=mask))
    # 1. Documents with a stripe have only tasks of single groups. Outside the stripe each stays with its owner. Inside
    #    it ranks divide the groups.
    rows = []
    by_task = np.stack(held, axis=1)  # document, start, stop, rank
    has_stripe = np.isin(held[0], [stripe.document for stripe in layout.stripes])
    for document, start, stop, rank in by_task[has_stripe].tolist():
        for left, right in _outside(start, stop, [stripe for stripe in layout.stripes if stripe.document == document]):
            rows += [(document, left, right, rank, group) for group in range(head_groups)]
    rows += [row for stripe in layout.stripes for row in divide_stripe(stripe, head_groups, mask)]

    # 2. All other documents stay with their owners, all heads together.
    whole = by_task[~has_stripe]
    whole = np.column_stack((whole, np.full(len(whole), ALL_HEADS)))
    document, start, stop, rank, head = np.concatenate([whole, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Plan(layout, Tasks.sort(document, start, stop, rank, head, head_groups, mask))


def _outside(start: int, stop: int, stripes: list[Stripe]) -> list[tuple[int, int]]:
    """Cuts stripes out of [start, stop), and returns the remaining ranges."""
    left = []
    for stripe in sorted(stripes, key=lambda stripe: stripe.start):
        if stripe.start < stop and stripe.stop > start:
            left.append((start, stripe.start))
            start = stripe.stop
    return [(begin, end) for begin, end in [*left, (start, stop)] if begin < end]


def divide_stripe(stripe: Stripe, head_groups: int, mask: Mask = CAUSAL_MASK) -> list[tuple[int, int, int, int, int]]:
    """Divides a stripe's work equally among its ranks: (document, start, stop, rank, group) of each task.

    Lays the work of all head groups end to end, and gives every rank the next equal part. Groups stay whole if
    possible; a group at a border is divided by queries.
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
    """Finds the query of an attended pair, counted from the stripe's first query on; `stop` after the last pair."""
    query = mask.queries_of(mask.pairs_before(stripe.start) + pairs)
    return min(max(query, stripe.start), stripe.stop)
