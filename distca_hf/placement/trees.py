"""Trees: documents that share prefixes are placed together, so that keys of prefixes go to few ranks.

    documents    d0 | prompt | a0 |    d1 | a1 |    d2 | a2 |      d1 and d2 continue the prompt of d0
    their tree   | prompt | a0 | a1 | a2 |
    on ranks     | prompt | a0 | a |   | 1 | a2 |                  the second rank needs keys of the prompt and of a1

Documents of a tree are laid end to end, and the tree is placed like one document. A part of it that begins within a
document needs only keys of that document, prefixes included: later documents of the part continue the same ones.

Unlike in a document, a token may cost less than the token before it: the first one of the next document. So
`accordion` promises no even work for trees, and `place` checks the work of ranks.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, offsets, ranges, run_starts, sum_by
from distca_hf.cost import DocumentCost, Work
from distca_hf.placement.piece_pool import Piece, PiecePool, joined, piece_of
from distca_hf.prefixes import SharedPrefixes


@dataclass(frozen=True, eq=False)
class Trees:
    """Trees in the order of their tokens; a document that shares no prefix is a tree, too.

    Attributes:
        lengths: `[documents]` tokens, as the caller numbers documents.
        cost: cost of queries of these documents.
        documents: `[documents]` the caller's number of each document, tree after tree.
        first_own: `[documents]` first token that each of these documents holds.
        first_row: `[documents + 1]` tokens that are held by all documents before.
        trees: `[trees + 1]` tree t has `documents[trees[t]]` to `documents[trees[t + 1]]`.
    """

    lengths: IntArray
    cost: DocumentCost
    documents: IntArray
    first_own: IntArray
    first_row: IntArray
    trees: IntArray

    @classmethod
    def of(cls, lengths: IntArray, shared: SharedPrefixes, cost: DocumentCost) -> Self:
        """Lays documents end to end. Arguments: see `place`."""
        root, held = shared.root, lengths - shared.first_own
        tree_tokens, order = sum_by(root, held, len(lengths))[root], shared.order
        documents = order[np.lexsort((root[order], tree_tokens[order]))]
        trees = np.append(np.flatnonzero(run_starts(root[documents])), len(documents))
        return cls(lengths, cost, documents, shared.first_own[documents], offsets(held[documents]), trees)

    @cached_property
    def pool(self) -> PiecePool:
        """A piece for each tree."""
        tokens, work = np.diff(self.first_row[self.trees]).tolist(), self._work
        return PiecePool([piece_of(tree, 0, stop, work(tree, 0, stop)) for tree, stop in enumerate(tokens)], work)

    @cached_property
    def _work(self) -> Work:
        """Work of a range of a tree, `work(tree, start, stop)`."""
        first_row, first_own, documents = (x.tolist() for x in (self.first_row, self.first_own, self.documents))
        of_document, tree_row = self.cost.of_documents(self.lengths.tolist()), self.first_row[self.trees].tolist()
        whole = map(of_document, documents, first_own, self.lengths[self.documents].tolist())
        before = list(accumulate(whole, initial=0))

        def until(row: int) -> int:
            at = bisect_right(first_row, row) - 1
            begun = row - first_row[at]
            own = first_own[at] if begun else 0
            return before[at] + (of_document(documents[at], own, own + begun) if begun else 0)

        return lambda tree, start, stop: until(tree_row[tree] + stop) - until(tree_row[tree] + start)

    def key_tokens(self, shares: Iterable[list[Piece]]) -> int:
        """Counts tokens whose keys shares lack: those before each piece, in the document that it begins in."""
        pieces = [piece for of_share in shares for piece in joined(of_share)]
        tree, start = np.array([piece[1:3] for piece in pieces], dtype=np.int64).reshape(-1, 2).T
        row = self.first_row[self.trees[tree]] + start
        at = np.searchsorted(self.first_row, row, side="right") - 1
        return int((self.first_own[at] + row - self.first_row[at]).sum())

    def of_documents(
        self, tree: IntArray, start: IntArray, stop: IntArray, rank: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Cuts ranges of trees at the borders of documents.

        Args:
            tree, start, stop, rank: int64 `[ranges]` tokens [start, stop) of a tree, and their rank.

        Returns:
            Document, start, stop and rank of each range of a document, in the same order. Documents are numbered as by
            the caller of `of`.
        """
        begin, end = (self.first_row[self.trees[tree]] + x for x in (start, stop))
        first = np.searchsorted(self.first_row, begin, side="right") - 1
        counts = np.searchsorted(self.first_row, end, side="left") - first
        index, at = np.repeat(np.arange(len(tree)), counts), ranges(first, counts)
        before = self.first_own[at] - self.first_row[at]
        start = np.maximum(begin[index], self.first_row[at]) + before
        stop = np.minimum(end[index], self.first_row[at + 1]) + before
        return self.documents[at], start, stop, rank[index]
