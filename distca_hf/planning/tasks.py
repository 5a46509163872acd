"""Task: (document, query range, heads) computed by one server rank. Its keys end with the range, and begin where the
mask says: with the document, for the causal mask.

Heads are divided into groups: KV heads with the query heads that share them. A task is of all heads or of one group.
Tasks of one document are all of the one kind, or all of the other.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, run_starts
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


# `head` of a task of all heads: below every group's number, so that it sorts before them.
ALL_HEADS = -1


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks as five int64 arrays of one length, sorted by (server, needs a prefix, document, head, start).

    A task whose queries attend no keys before its own tokens needs no prefix. These tasks come first on every server.

    Attributes:
        document, start, stop: query range.
        server: rank that computes it.
        head: head group, or `ALL_HEADS`.
        head_groups: groups that the heads are divided into; 1 if every task is of all heads.
        mask: keys that queries attend.
    """

    document: IntArray
    start: IntArray
    stop: IntArray
    server: IntArray
    head: IntArray
    head_groups: int = 1
    mask: Mask = CAUSAL_MASK

    @classmethod
    def sort(
        cls,
        document: IntArray,
        start: IntArray,
        stop: IntArray,
        server: IntArray,
        head: IntArray | None = None,
        head_groups: int = 1,
        mask: Mask = CAUSAL_MASK,
    ) -> "Tasks":
        """Sorts tasks, so that equal sets of tasks are equal arrays. They are of all heads unless `head` is given."""
        if head is None or head_groups == 1:  # the only group is all heads
            head = np.full(len(document), ALL_HEADS)
        head_groups = head_groups if np.any(head != ALL_HEADS) else 1
        order = np.lexsort((start, head, document, mask.first_key(start) < start, server))
        return cls(document[order], start[order], stop[order], server[order], head[order], head_groups, mask)

    def __len__(self) -> int:
        return len(self.document)

    @property
    def first_key(self) -> IntArray:
        """`[tasks]` first token of each task's document whose key its queries attend."""
        return self.mask.first_key(self.start)

    @property
    def pairs(self) -> IntArray:
        """`[tasks]` attended pairs of each task, in each of its head groups."""
        return self.mask.pairs_of(self.start, self.stop)

    @property
    def work(self) -> IntArray:
        """`[tasks]` attended pairs x groups of heads."""
        return self.pairs * np.where(self.head == ALL_HEADS, self.head_groups, 1)

    def work_of(self, num_ranks: int) -> IntArray:
        """Sums attended pairs x head groups of each server: `[ranks]`."""
        work = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(work, self.server, self.work)
        return work

    def validate(self, layout: Layout) -> None:
        """Checks that exactly one task, on a server that exists, computes each query row of each head group.

        Raises:
            PlanError: names the first document or server that is wrong.
        """
        # 1. Servers, documents and head groups exist.
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

        # 2. Tasks of a document are of all heads, or all of single groups.
        split = np.zeros(layout.num_documents, dtype=bool)
        split[self.document[self.head != ALL_HEADS]] = True
        both = np.flatnonzero(split[self.document] & (self.head == ALL_HEADS))
        if len(both):
            raise PlanError(f"document {self.document[both[0]]} has tasks of all heads and of single groups")

        # 3. Each task begins where the one before it ends.
        order = np.lexsort((self.start, self.head, self.document))
        document, start, stop = self.document[order], self.start[order], self.stop[order]
        expected = np.concatenate([[0], stop[:-1]])[: len(stop)]
        expected[run_starts(document, self.head[order])] = 0
        wrong = np.flatnonzero((start != expected) | (stop <= start))
        if len(wrong):
            at = wrong[0]
            raise PlanError(f"document {document[at]}: task [{start[at]}, {stop[at]}) where {expected[at]} is next")

        # 4. The last task of each group ends with the document.
        covered = np.zeros((layout.num_documents, self.head_groups), dtype=np.int64)
        group = self.head[order]
        np.maximum.at(covered, (document, np.maximum(group, 0)), stop)
        covered[~split] = covered[~split, :1]
        short = np.flatnonzero((covered != layout.document_tokens[:, None]).any(axis=1))
        if len(short):
            at, tokens = short[0], layout.document_tokens[short[0]]
            raise PlanError(f"document {at} has {tokens} tokens, its tasks cover {covered[at].min()}")
