"""Task: (document, query range) computed by one server rank; its keys are the causal prefix of the range."""

from dataclasses import dataclass

import numpy as np

from distca_hf.cost import IntArray, causal_pairs_of
from distca_hf.errors import PlanError
from distca_hf.layout import Layout


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks as four int64 arrays of one length, sorted by (server, needs a prefix, document, start).

    A task that begins its document needs no keys but those of its own tokens; these come first on every server.
    """

    document: IntArray
    start: IntArray
    stop: IntArray
    server: IntArray

    @classmethod
    def sort(cls, document: IntArray, start: IntArray, stop: IntArray, server: IntArray) -> "Tasks":
        """Tasks in their one order, so that equal sets of tasks are equal arrays."""
        order = np.lexsort((start, document, start > 0, server))
        return cls(document[order], start[order], stop[order], server[order])

    def __len__(self) -> int:
        return len(self.document)

    @property
    def pairs(self) -> IntArray:
        """Attended pairs of each task."""
        return causal_pairs_of(self.start, self.stop)

    def work_of(self, num_ranks: int) -> IntArray:
        """`[ranks]` attended pairs computed by each server."""
        work = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(work, self.server, self.pairs)
        return work

    def validate(self, layout: Layout) -> None:
        """Checks that every query row of every document is in exactly one task, on a server that exists.

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
        order = np.lexsort((self.start, self.document))
        document, start, stop = self.document[order], self.start[order], self.stop[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = document[1:] != document[:-1]
        expected = np.zeros(len(order), dtype=np.int64)
        expected[1:] = stop[:-1]
        expected[first] = 0
        wrong = np.flatnonzero((start != expected) | (stop <= start))
        if len(wrong):
            at = wrong[0]
            raise PlanError(f"document {document[at]}: task [{start[at]}, {stop[at]}) where {expected[at]} is next")
        covered = np.zeros(layout.num_documents, dtype=np.int64)
        np.maximum.at(covered, document, stop)
        short = np.flatnonzero(covered != layout.document_tokens)
        if len(short):
            at = short[0]
            raise PlanError(f"document {at} has {layout.document_tokens[at]} tokens, its tasks cover {covered[at]}")
