"""Bytes that a plan in the making moves, exactly: queries and outputs away from home, keys once for each server."""

from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from distca_hf.cost import IntArray, TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.moving.stacks import Stack
from distca_hf.planning.ranges import POSITION_BITS


@dataclass(frozen=True, eq=False)
class MovedBytes:
    """`[ranks]` forward bytes of one layer that each rank sends and receives, and those of them between nodes."""

    sent: IntArray
    received: IntArray
    sent_between_nodes: IntArray
    received_between_nodes: IntArray

    @property
    def largest_rank(self) -> int:
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))

    @property
    def largest_between_nodes(self) -> int:
        return int(max(self.sent_between_nodes.max(initial=0), self.received_between_nodes.max(initial=0)))

    @classmethod
    def count(
        cls, layout: Layout, stacks: list[Stack], head_groups: int, token_bytes: TokenBytes, node_of: IntArray
    ) -> Self:
        """Bytes of what the stacks hold and gave. All other documents are computed where all of their tokens are.

        Args:
            layout: who holds what.
            stacks: all stacks of the documents concerned.
            head_groups: groups that heads are divided in.
            token_bytes: bytes of one token.
            node_of: `[ranks]` node of each rank.
        """
        rows = [(stack.document, *part) for stack in stacks for part in stack.parts()]
        numbers = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=5 * len(rows)).reshape(-1, 5)
        document, head, start, stop, server = numbers.T
        segments = _Segments.of(layout, document)
        home, computes, queries = segments.overlaps(document, start, stop, server)
        order = np.lexsort((server, head, document))
        document, head, stop, server = document[order], head[order], stop[order], server[order]
        opens = np.ones(len(order), dtype=bool)
        opens[1:] = (document[1:] != document[:-1]) | (head[1:] != head[:-1]) | (server[1:] != server[:-1])
        first = np.flatnonzero(opens)
        prefix = np.maximum.reduceat(stop, first) if len(first) else stop
        holds, needs, keys = segments.overlaps(document[first], np.zeros_like(prefix), prefix, server[first])
        source = np.concatenate([home, computes, holds])
        destination = np.concatenate([computes, home, needs])
        sizes = (queries * token_bytes.query, queries * token_bytes.output, keys * token_bytes.key_value)
        moved = np.concatenate(sizes)
        travels, between = source != destination, node_of[source] != node_of[destination]
        sums = [
            _sum_by_rank(rank[chosen], moved[chosen], layout.num_ranks) // head_groups
            for chosen in (travels, between)
            for rank in (source, destination)
        ]
        return cls(*sums)


def _sum_by_rank(rank: IntArray, sizes: IntArray, num_ranks: int) -> IntArray:
    """`[ranks]` sums; exact, since they are far below 2 ** 53."""
    return np.bincount(rank, sizes, num_ranks).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Segments:
    """Segments of some documents, sorted by (document, start)."""

    key: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray

    @classmethod
    def of(cls, layout: Layout, documents: IntArray) -> Self:
        chosen = np.zeros(layout.num_documents, dtype=bool)
        chosen[documents] = True
        segment = np.flatnonzero(chosen[layout.segment_document])
        key = (layout.segment_document[segment] << POSITION_BITS) + layout.segment_start[segment]
        order = np.argsort(key)
        segment = segment[order]
        return cls(
            key[order], layout.segment_start[segment], layout.segment_stop[segment], layout.segment_rank[segment]
        )

    def overlaps(
        self, document: IntArray, start: IntArray, stop: IntArray, server: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Every overlap of a range with a segment: rank that holds it, the range's server, tokens."""
        first = np.searchsorted(self.key, (document << POSITION_BITS) + start, side="right") - 1
        counts = np.searchsorted(self.key, (document << POSITION_BITS) + stop, side="left") - first
        part = np.repeat(np.arange(len(counts)), counts)
        segment = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts) + first[part]
        tokens = np.minimum(self.stop[segment], stop[part]) - np.maximum(self.start[segment], start[part])
        return self.rank[segment], server[part], tokens
