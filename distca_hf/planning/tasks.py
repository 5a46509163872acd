"""Task: (document, query range, heads) computed by one server rank; its keys are the causal prefix of the range.

Heads are divided in groups: KV heads with the query heads that share them. A task is of all heads or of one group; one
document's tasks are either all of the one kind or all of the other.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray, causal_pairs_of
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


# `head` of a task of all heads.
ALL_HEADS = -1


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks as five int64 arrays of one length, sorted by (server, needs a prefix, document, head, start).

    A task that begins its document needs no keys but those of its own tokens; these come first on every server.

    Attributes:
        document, start, stop: query range.
        server: rank that computes it.
        head: group of heads, or `ALL_HEADS`.
        head_groups: groups that the heads are divided in; 1 if every task is of all heads.
    """

    document: IntArray
    start: IntArray
    stop: IntArray
    server: IntArray
    head: IntArray
    head_groups: int = 1

    @classmethod
    def sort(
        cls,
        document: IntArray,
        start: IntArray,
        stop: IntArray,
        server: IntArray,
        head: IntArray | None = None,
        head_groups: int = 1,
    ) -> "Tasks":
        """Tasks in their one order, so that equal sets of tasks are equal arrays; of all heads unless `head` is
        given."""
        if head is None or head_groups == 1:  # the only group is all heads
            head = np.full(len(document), ALL_HEADS)
        head_groups = head_groups if np.any(head != ALL_HEADS) else 1
        order = np.lexsort((start, head, document, start > 0, server))
        return cls(document[order], start[order], stop[order], server[order], head[order], head_groups)

    def __len__(self) -> int:
        return len(self.document)

    @property
    def pairs(self) -> IntArray:
        """Attended pairs of each task, in each of its groups of heads."""
        return causal_pairs_of(self.start, self.stop)

    @property
    def work(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        return self.pairs * np.where(self.head == ALL_HEADS, self.head_groups, 1)

    def work_of(self, num_ranks: int) -> IntArray:
        """`[ranks]` attended pairs x groups of heads computed by each server."""
        work = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(work, self.server, self.work)
        return work

    def validate(self, layout: Layout) -> None:
        """Checks that every query row of every document is in exactly one task, of all heads or of each group, on a
        server that exists.

        Raises:
            PlanError: names the first document or server that is wrong.
        """
        if len(self) and not (0 <= self.server.min() and self.server.max() < layout.num_ranks):
            raise PlanError(
                f"tasks on servers {self.server.min()} to {self.server.max()}, ranks are 0 to {layout.num_ranks - 1}"
            )
        outside = np.flatnonzero((self.document < 0) | (self.document >= layout.num_documents))
        if len(outside):
            name = self.document[outside[0]]
            raise PlanError(f"task {outside[0]} is of document {name}; there are {layout.num_documents}")
        if np.any((self.head < ALL_HEADS) | (self.head >= self.head_groups)):
            raise PlanError(
                f"tasks of head groups {self.head.min()} to {self.head.max()}; there are {self.head_groups}"
            )
        split = np.zeros(layout.num_documents, dtype=bool)
        split[self.document[self.head != ALL_HEADS]] = True
        both = np.flatnonzero(split[self.document] & (self.head == ALL_HEADS))
        if len(both):
            raise PlanError(f"document {self.document[both[0]]} has tasks of all heads and of single groups")
        order = np.lexsort((self.start, self.head, self.document))
        document, start, stop = self.document[order], self.start[order], self.stop[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (document[1:] != document[:-1]) | (self.head[order][1:] != self.head[order][:-1])
        expected = np.zeros(len(order), dtype=np.int64)
        expected[1:] = stop[:-1]
        expected[first] = 0
        wrong = np.flatnonzero((start != expected) | (stop <= start))
        if len(wrong):
            at = wrong[0]
            raise PlanError(f"document {document[at]}: task [{start[at]}, {stop[at]}) where {expected[at]} is next")
        covered = np.zeros((layout.num_documents, self.head_groups), dtype=np.int64)
        group = self.head[order]
        np.maximum.at(covered, (document, np.maximum(group, 0)), stop)
        covered[~split] = covered[~split, :1]
        short = np.flatnonzero((covered != layout.document_tokens[:, None]).any(axis=1))
        if len(short):
            at, tokens = short[0], layout.document_tokens[short[0]]
            raise PlanError(f"document {at} has {tokens} tokens, its tasks cover {covered[at].min()}")
