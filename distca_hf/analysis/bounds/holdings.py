"""Holdings: what ranks hold, in few enough parts for a linear program."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca_hf.cost import IntArray, causal_pairs_of
from distca_hf.layout import Layout


# Whole documents of one rank whose lengths differ by less than this factor are one holding.
LENGTH_RATIO = 1.1


@dataclass(frozen=True, eq=False)
class Holdings:
    """Arrays of one length. A holding is one segment of a document that spans ranks, or several whole documents of
    about the same length on one rank, which are described by the longest.

    Attributes:
        rank: who holds it.
        document: number of a document that spans ranks, or -1.
        start, stop: segment; of whole documents 0 and the greatest length.
        pairs: attended pairs of its queries.
        tokens: tokens.
    """

    rank: IntArray
    document: IntArray
    start: IntArray
    stop: IntArray
    pairs: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, layout: Layout) -> "Holdings":
        """Holdings of a layout; segments of one document follow each other in order."""
        document, start, stop, rank = (
            layout.segment_document,
            layout.segment_start,
            layout.segment_stop,
            layout.segment_rank,
        )
        pairs = causal_pairs_of(start, stop)
        whole = stop - start == layout.document_tokens[document]
        cut = np.flatnonzero(~whole)
        cut = cut[np.lexsort((start[cut], document[cut]))]
        kept = np.flatnonzero(whole)
        size = np.floor(np.log(stop[kept]) / np.log(LENGTH_RATIO)).astype(np.int64)
        order = np.lexsort((size, rank[kept]))
        kept, size = kept[order], size[order]
        first = np.ones(len(kept), dtype=bool)
        first[1:] = (rank[kept][1:] != rank[kept][:-1]) | (size[1:] != size[:-1])
        first = np.flatnonzero(first)
        if len(first) == 0:
            return cls(rank[cut], document[cut], start[cut], stop[cut], pairs[cut], (stop - start)[cut])
        none = np.zeros(len(first), dtype=np.int64)
        return cls(
            rank=np.concatenate([rank[kept][first], rank[cut]]),
            document=np.concatenate([none - 1, document[cut]]),
            start=np.concatenate([none, start[cut]]),
            stop=np.concatenate([np.maximum.reduceat(stop[kept], first), stop[cut]]),
            pairs=np.concatenate([np.add.reduceat(pairs[kept], first), pairs[cut]]),
            tokens=np.concatenate([np.add.reduceat(stop[kept], first), (stop - start)[cut]]),
        )

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def of_document(self) -> dict[int, list[int]]:
        """Holdings of every document that spans ranks, in order."""
        parts: dict[int, list[int]] = {}
        for holding in np.flatnonzero(self.document >= 0).tolist():
            parts.setdefault(int(self.document[holding]), []).append(holding)
        return parts
