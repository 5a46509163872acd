"""Baseline: work, tokens and bytes of the ranks in one micro-step, and figures of an optimizer step of them.

Plans and baselines are counted alike. Groups of ranks, where a baseline has them, are filled in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes, imbalance
from distca_hf.layout import check_document_tokens
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import bytes_between
from distca_hf.topology import Topology


@dataclass(frozen=True, eq=False)
class Baseline:
    """One global micro-batch, as a baseline would run it.

    Attributes:
        name: its short name, a key of the JSON output.
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
        """Returns work, tokens and bytes of a plan.

        Queries and outputs of tasks that move are sent once. Keys and values are sent once per document and server.
        """
        return cls(name, plan.work, plan.layout.rank_tokens, bytes_between(plan, token_bytes))

    @cached_property
    def imbalance(self) -> float:
        """Max/mean of `work`; 1.0 is perfect."""
        return imbalance(self.work)


def nothing_sent(num_ranks: int) -> IntArray:
    """Returns `[source, destination]` zeros: the bytes of a baseline that sends nothing."""
    return np.zeros((num_ranks, num_ranks), dtype=np.int64)


@dataclass(frozen=True)
class Figures:
    """Balance and bytes of all micro-steps of an optimizer step together.

    Attributes:
        tokens_min, tokens_max: tokens of the emptiest and the fullest rank in any micro-step.
        imbalance: max/mean work, 1.0 is perfect. For several micro-steps it is the sum of the heaviest ranks over the
            sum of the means.
        bytes_total: bytes between ranks in the forward pass of one layer.
        bytes_max_rank: the most of these bytes that one rank sends or receives; summed over micro-steps.
        bytes_internode_max: the same for bytes between nodes.
    """

    tokens_min: int
    tokens_max: int
    imbalance: float
    bytes_total: int
    bytes_max_rank: int
    bytes_internode_max: int


def figures_of(micro_steps: Sequence[Baseline], topology: Topology) -> Figures:
    """Returns the figures of the micro-steps of one optimizer step."""
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
    """Returns the most bytes that any rank sends or receives."""
    return int(max(bytes_between.sum(axis=1).max(), bytes_between.sum(axis=0).max()))


def fill_groups(document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Fills groups in order with equal tokens, and returns the lengths of each group's documents.

    Groups attend separately: a document cut at the border of two groups continues as a new document. That is less
    attention work than uncut documents have, to the advantage of baselines with groups.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens)
    ends = np.cumsum(lengths)
    total_tokens = int(ends[-1]) if len(ends) else 0
    borders = np.array([total_tokens * group // num_groups for group in range(num_groups + 1)], dtype=np.int64)
    cuts = np.union1d(borders, ends)  # a piece of a document lies between each two of them
    pieces = np.diff(cuts)
    first = np.searchsorted(cuts, borders)
    return [pieces[first[group] : first[group + 1]] for group in range(num_groups)]


def groups_of_ranks(document_tokens: IntArray, num_ranks: int, group_ranks: int) -> Iterator[tuple[slice, IntArray]]:
    """Yields the ranks of each group of neighbours, and the lengths of its documents.

    The last group may have fewer ranks.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    first_ranks = range(0, num_ranks, group_ranks)
    for first, documents in zip(first_ranks, fill_groups(document_tokens, len(first_ranks)), strict=True):
        yield slice(first, min(first + group_ranks, num_ranks)), documents
