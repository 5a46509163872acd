"""Facts of a planned micro-batch, the same on all ranks, and their sums over many of them."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import KeyTransfers


@dataclass(frozen=True)
class PlanFacts:
    """Numbers about a micro-batch, the same on all ranks.

    Attributes:
        num_documents, num_tokens, longest_document_tokens: documents of the global micro-batch.
        work: attended pairs x head groups of each rank, as planned.
        work_before: the same for documents packed in order; of the ranks that hold tokens, without servers.
        key_rows_sent: rows of keys and values that each rank sends, per layer, forward.
        query_rows_sent: rows of queries that each rank sends, and rows of outputs that it receives for them.
        key_rows_received: rows of keys and values that each rank receives.
        remote_query_rows: rows of queries that each rank computes for others, with local rows of the same tasks.
        rows_per_token: 1, or the groups that the plan divides heads into.
        speeds: relative speed of each rank, where they differ (see `Plan`).
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
    speeds: tuple[float, ...] = ()

    @classmethod
    def of(cls, plan: Plan, transfers: KeyTransfers, work_before: IntArray) -> "PlanFacts":
        """Counts facts of a plan.

        Args:
            plan: the plan.
            transfers: its key transfers.
            work_before: `[ranks with tokens]` attended pairs to compare the plan with.
        """
        layout, moved = plan.layout, plan.pieces.select(plan.pieces.moved)
        num_ranks, keys = layout.num_ranks, transfers.rows_between(layout.num_ranks)
        remote_queries = plan.pieces.select(plan.has_remote_queries[plan.pieces.task])
        queries_sent, remote_query_rows = (
            np.bincount(ranks, weights=rows, minlength=num_ranks).astype(np.int64)
            for ranks, rows in ((moved.owner, moved.rows), (remote_queries.server, remote_queries.rows))
        )
        return cls(
            num_documents=layout.num_documents,
            longest_document_tokens=layout.longest_document_tokens,
            work=tuple(plan.work.tolist()),
            work_before=tuple((work_before * plan.tasks.head_groups).tolist()),
            key_rows_sent=tuple(keys.sum(axis=1).tolist()),
            query_rows_sent=tuple(queries_sent.tolist()),
            key_rows_received=tuple(keys.sum(axis=0).tolist()),
            remote_query_rows=tuple(remote_query_rows.tolist()),
            rows_per_token=plan.tasks.head_groups,
            num_tokens=int(layout.document_tokens.sum()),
            speeds=plan.speeds,
        )

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`; with speeds, the longest time over the time of an even split."""
        return imbalance(self.work, self.speeds)

    @property
    def imbalance_before(self) -> float:
        """Max over mean of `work_before`."""
        return imbalance(self.work_before)


@dataclass(frozen=True)
class PlanTotals:
    """Sums over planned micro-batches, the same on all ranks, to report the gain of balancing by.

    Attributes:
        micro_batches: how many there were.
        tokens, pairs: of all ranks; a pair of a query and a key counts once for all heads.
        imbalance_before, imbalance: sums of these numbers of every micro-batch.
    """

    micro_batches: int = 0
    tokens: int = 0
    pairs: float = 0.0
    imbalance_before: float = 0.0
    imbalance: float = 0.0

    def plus(self, facts: PlanFacts) -> Self:
        """Returns the sums with one micro-batch more."""
        return type(self)(
            micro_batches=self.micro_batches + 1,
            tokens=self.tokens + facts.num_tokens,
            pairs=self.pairs + sum(facts.work) / facts.rows_per_token,
            imbalance_before=self.imbalance_before + facts.imbalance_before,
            imbalance=self.imbalance + facts.imbalance,
        )

    def since(self, earlier: Self) -> Self:
        """Returns sums over the micro-batches that came after earlier ones."""
        return type(self)(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )
