"""Baseline: work, tokens and bytes of the ranks in one micro-step, and figures of an optimizer step of them.

Plans and baselines are counted alike. Groups of ranks, where a baseline has them, are filled in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray, TokenBytes, imbalance
from distca_hf.layout import check_document_tokens
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between
from distca_hf.topology import Topology


@dataclass(frozen=True, eq=False)
class Baseline:
    """One global micro-batch as a baseline would run it.

    Attributes:
        name: how tables call it.
        work: `[ranks]` attended pairs each rank computes (times heads, where heads are divided).
        tokens: `[ranks]` tokens each rank holds.
        bytes_between: `[source, destination]` bytes sent in the forward pass of one layer; nothing to oneself.
    """

    name: str
    work: IntArray
    tokens: IntArray
    bytes_between: IntArray

    @classmethod
    def of_plan(cls, name: str, plan: Plan, token_bytes: TokenBytes) -> "Baseline":
        """What a plan says: queries and outputs of tasks that move, keys and values once per document and server."""
        return cls(name, plan.work, plan.layout.rank_tokens, bytes_between(plan, token_bytes))

    @cached_property
    def imbalance(self) -> float:
        """Max over mean of `work`."""
        return imbalance(self.work)


def nothing_sent(num_ranks: int) -> IntArray:
    """`[source, destination]` zeros."""
    return np.zeros((num_ranks, num_ranks), dtype=np.int64)


@dataclass(frozen=True)
class Figures:
    """What ranks hold, compute and send, all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work, 1.0 is perfect; of several micro-steps, the sum of the heaviest ranks over the sum of
            the means.
        bytes_total: bytes between ranks, forward, of one layer.
        bytes_max_rank: what the busiest rank sends or receives, whichever is more; summed over micro-steps.
        bytes_internode_max: the same, of what goes from one node to another.
    """

    tokens_min: int
    tokens_max: int
    imbalance: float
    bytes_total: int
    bytes_max_rank: int
    bytes_internode_max: int


def figures_of(micro_steps: Sequence[Baseline], topology: Topology) -> Figures:
    """Figures of the micro-steps of one optimizer step."""
    total_work = sum(int(step.work.sum()) for step in micro_steps)
    heaviest_work = sum(int(step.work.max()) for step in micro_steps)
    crosses = topology.node_of[:, None] != topology.node_of[None, :]
    return Figures(
        tokens_min=min(int(step.tokens.min()) for step in micro_steps),
        tokens_max=max(int(step.tokens.max()) for step in micro_steps),
        imbalance=heaviest_work * topology.num_ranks / total_work if total_work else 1.0,
        bytes_total=sum(int(step.bytes_between.sum()) for step in micro_steps),
        bytes_max_rank=sum(_busiest(step.bytes_between) for step in micro_steps),
        bytes_internode_max=sum(_busiest(step.bytes_between * crosses) for step in micro_steps),
    )


def _busiest(bytes_between: np.ndarray) -> int:
    """Most bytes that any rank sends or receives."""
    return int(max(bytes_between.sum(axis=1).max(), bytes_between.sum(axis=0).max()))


def fill_groups(document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Lengths of each group's documents: sequential fill with equal tokens.

    Attention of such a group knows nothing of the others: a document cut at the border of two groups goes on as a new
    one. That is less work than the documents ask for, in favour of whoever groups.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens)
    ends = np.cumsum(lengths)
    total_tokens = int(ends[-1]) if len(ends) else 0
    borders = np.array([total_tokens * group // num_groups for group in range(num_groups + 1)], dtype=np.int64)
    cuts = np.union1d(borders, ends)
    pieces = np.diff(cuts)
    first = np.searchsorted(cuts, borders)
    return [pieces[first[group] : first[group + 1]] for group in range(num_groups)]


def groups_of_ranks(document_tokens: IntArray, num_ranks: int, group_ranks: int) -> Iterator[tuple[slice, IntArray]]:
    """Ranks of each group of neighbours, and the lengths of its documents. The last group may have fewer ranks.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    first_ranks = range(0, num_ranks, group_ranks)
    for first, documents in zip(first_ranks, fill_groups(document_tokens, len(first_ranks)), strict=True):
        yield slice(first, min(first + group_ranks, num_ranks)), documents
