"""Facts: numbers about planned micro-batches, the same on all ranks, for logs, metrics, traces and room on devices."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, sum_by
from distca_hf.cost import imbalance
from distca_hf.flops import StepFlops
from distca_hf.planning.plan import Plan


@dataclass(frozen=True)
class PlanFacts:
    """Numbers about a micro-batch, the same on all ranks.

    Attributes:
        num_documents, num_tokens, longest_document_tokens: documents of the global micro-batch.
        cut_documents: documents that lie in several segments.
        work: attended pairs x head groups of each rank, as planned.
        work_before: the same for documents packed in order; of the ranks that hold tokens, without servers.
        key_rows_sent: rows of keys and values that each rank sends, per layer, forward.
        query_rows_sent: rows of queries that each rank sends, and rows of outputs that it receives for them.
        key_rows_received: rows of keys and values that each rank receives.
        remote_query_rows: rows of queries that each rank computes for others, with local rows of the same tasks.
        rows_per_token: 1, or the groups that the plan divides heads into.
        speeds: relative speed of each rank, where they differ (see `Plan`).
        kinds: facts of layers with one mask, and how many there are, where a model has several masks. Numbers above
            are means over all layers then.
        window_tokens: window of these layers; None: full attention, or several kinds.
        tokens_before, tokens: of each rank that holds any, as in `work_before` and as planned; empty if only one of
            them is known.
        head_tokens: that its head and loss compute.
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
            plan: the plan.
            key_rows: `[source rank, destination rank]` rows of keys and values that it sends, per layer.
            work_before: `[ranks with tokens]` attended pairs to compare the plan with.
        """
        layout, moved = plan.layout, plan.pieces.select(plan.pieces.moved)
        remote_queries = plan.pieces.select(plan.has_remote_queries[plan.pieces.task])
        queries_sent, remote_query_rows = (
            sum_by(ranks, rows, layout.num_ranks)
            for ranks, rows in ((moved.owner, moved.rows), (remote_queries.server, remote_queries.rows))
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
            cut_documents=layout.cut_documents,
            speeds=plan.speeds,
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
            # In plans that divide heads, rows and work count groups of heads.
            scaled = [
                np.array(getattr(facts, name)) * (count * groups // facts.rows_per_token) for facts, count in kinds
            ]
            return tuple((np.sum(scaled, axis=0) // layers).tolist())

        return replace(
            first,
            work=mean("work"),
            work_before=mean("work_before"),
            key_rows_sent=mean("key_rows_sent"),
            query_rows_sent=mean("query_rows_sent"),
            key_rows_received=mean("key_rows_received"),
            remote_query_rows=mean("remote_query_rows"),
            rows_per_token=groups,
            kinds=tuple(kinds),
            window_tokens=None,
        )

    def with_tokens(self, before: IntArray, tokens: IntArray) -> Self:
        """Returns facts that know the tokens of ranks, `[ranks that hold any]` before, and `[ranks]` as planned. Heads
        compute the tokens of `before`, until it is known that they need not."""
        of_batches, of_layers = tuple(before.tolist()), tuple(tokens[: len(before)].tolist())
        return replace(self, tokens_before=of_batches, tokens=of_layers, head_tokens=of_batches)

    @property
    def of_full_and_windows(self) -> tuple[Self, Self] | None:
        """Facts of the layers with full attention, and of all layers with a window; None unless there are both."""
        full = [kind for kind in self.kinds if kind[0].window_tokens is None]
        windows = [kind for kind in self.kinds if kind[0].window_tokens is not None]
        return (self.of_layers(full), self.of_layers(windows)) if full and windows else None

    @property
    def imbalance(self) -> float:
        """Max over mean of `work`; with speeds, the longest time over the time of an even split. Ranks meet in every
        layer: of several kinds of layers it is the mean, weighted by their work."""
        return self._mean_of_kinds("imbalance", "work") if self.kinds else imbalance(self.work, self.speeds)

    @property
    def imbalance_before(self) -> float:
        """Max over mean of `work_before`."""
        return self._mean_of_kinds("imbalance_before", "work_before") if self.kinds else imbalance(self.work_before)

    def step_work(self, flops: StepFlops) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns `[ranks that hold tokens]` operations of a step, before and as planned; see `StepFlops.work`."""
        held = len(self.tokens)  # behind these are attention servers
        before, after = (np.array(work[:held]) / self.rows_per_token for work in (self.work_before, self.work))
        tokens_before, tokens, head_tokens = map(np.array, (self.tokens_before, self.tokens, self.head_tokens))
        return flops.work(tokens_before, before, tokens_before), flops.work(tokens, after, head_tokens)

    def _mean_of_kinds(self, name: str, work: str) -> float:
        weights = [sum(getattr(facts, work)) * count / facts.rows_per_token for facts, count in self.kinds]
        values = [getattr(facts, name) for facts, _ in self.kinds]
        return float(np.average(values, weights=weights)) if any(weights) else 1.0


@dataclass(frozen=True)
class PlanTotals:
    """Sums over planned micro-batches, the same on all ranks, to report the gain of balancing by.

    Attributes:
        micro_batches: how many there were.
        tokens, pairs: of all ranks; a pair of a query and a key counts once for all heads.
        imbalance_before, imbalance: sums of these numbers of every micro-batch.
        mixed_micro_batches: how many had layers with full attention and layers with a window.
        imbalance_full, imbalance_window: sums of the imbalance of either over these micro-batches.
        token_imbalance_before, token_imbalance: sums of max over mean of the tokens of ranks, before and as planned.
        step_imbalance_before, step_imbalance: the same of the work of a step; 0 if operations are not known.
    """

    micro_batches: int = 0
    tokens: int = 0
    pairs: float = 0.0
    imbalance_before: float = 0.0
    imbalance: float = 0.0
    mixed_micro_batches: int = 0
    imbalance_full: float = 0.0
    imbalance_window: float = 0.0
    token_imbalance_before: float = 0.0
    token_imbalance: float = 0.0
    step_imbalance_before: float = 0.0
    step_imbalance: float = 0.0

    def plus(self, facts: PlanFacts, flops: StepFlops | None = None) -> Self:
        """Returns the sums with one micro-batch more.

        Args:
            flops: operations of a model whose batches are given; None if they are not known.
        """
        mixed = facts.of_full_and_windows
        before, after = (0.0, 0.0) if flops is None else (imbalance(work.tolist()) for work in facts.step_work(flops))
        full, window = (0.0, 0.0) if mixed is None else (kind.imbalance for kind in mixed)
        return type(self)(
            micro_batches=self.micro_batches + 1,
            tokens=self.tokens + facts.num_tokens,
            pairs=self.pairs + sum(facts.work) / facts.rows_per_token,
            imbalance_before=self.imbalance_before + facts.imbalance_before,
            imbalance=self.imbalance + facts.imbalance,
            mixed_micro_batches=self.mixed_micro_batches + (mixed is not None),
            imbalance_full=self.imbalance_full + full,
            imbalance_window=self.imbalance_window + window,
            token_imbalance_before=self.token_imbalance_before + imbalance(facts.tokens_before),
            token_imbalance=self.token_imbalance + imbalance(facts.tokens),
            step_imbalance_before=self.step_imbalance_before + before,
            step_imbalance=self.step_imbalance + after,
        )

    @property
    def balance(self) -> str:
        """Words for the balance, means over these micro-batches: of a step where it is counted, else of attention."""

        def means(name: str) -> str:
            before, after = (getattr(self, f"{name}{when}") / self.micro_batches for when in ("_before", ""))
            return f"{before:.2f} -> {after:.2f}"

        if not self.step_imbalance:
            return f"attention work of the busiest rank {means('imbalance')} times the mean"
        return (
            f"work of the busiest rank in a step {means('step_imbalance')} times the mean (its tokens "
            f"{means('token_imbalance')}, attention {means('imbalance')})"
        )

    def since(self, earlier: Self) -> Self:
        """Returns sums over the micro-batches that came after earlier ones."""
        return type(self)(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )
