"""Byte costs: the bytes that a candidate plan moves, counted exactly, and the prices that ranks ask for a byte.

Queries that move cost their own bytes and those of their outputs. Keys cost theirs once for each rank that reads them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, ranges, run_starts, sum_by
from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.pieces import POSITION_BITS
from distca_hf.planning.rebalance.head_stacks import Stack


@dataclass(frozen=True, eq=False)
class MovedBytes:
    """`[ranks]` forward bytes of one layer that each rank sends and receives, in total and between nodes."""

    sent: IntArray
    received: IntArray
    sent_between_nodes: IntArray
    received_between_nodes: IntArray

    @cached_property
    def largest_rank(self) -> int:
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))

    @property
    def largest_between_nodes(self) -> int:
        return int(max(self.sent_between_nodes.max(initial=0), self.received_between_nodes.max(initial=0)))

    @classmethod
    def count(
        cls, segments: "Segments", stacks: list[Stack], head_groups: int, token_bytes: TokenBytes, node_of: IntArray
    ) -> Self:
        """Counts the bytes of a plan given as stacks. Other documents lie on one rank and move nothing.

        Args:
            segments: segments of the layout.
            stacks: all stacks of all documents whose queries may have moved.
            head_groups: groups that heads are divided into.
            token_bytes: bytes of one token.
            node_of: `[ranks]` node of each rank.
        """
        # 1. Queries: every part of a stack, where it overlaps the segments of its document.
        parts = [stack.parts() for stack in stacks]
        numbers = np.fromiter(chain.from_iterable(chain.from_iterable(parts)), dtype=np.int64).reshape(-1, 4)
        head, start, stop, rank = numbers.T
        documents = np.array([stack.document for stack in stacks], dtype=np.int64)
        document = np.repeat(documents, np.array([len(of_stack) for of_stack in parts], dtype=np.int64))
        owner, computes, queries = segments.overlaps(document, start, stop, rank)

        # 2. Keys: the longest prefix of each (document, head) that each rank reads.
        order = np.lexsort((rank, head, document))
        document, head, stop, rank = document[order], head[order], stop[order], rank[order]
        first = np.flatnonzero(run_starts(document, head, rank))
        prefix = np.maximum.reduceat(stop, first) if len(first) else stop
        holds, needs, keys = segments.overlaps(document[first], np.zeros_like(prefix), prefix, rank[first])

        # 3. Sums by rank. Outputs travel in the direction opposite to queries.
        source = np.concatenate([owner, computes, holds])
        destination = np.concatenate([computes, owner, needs])
        sizes = (queries * token_bytes.query, queries * token_bytes.output, keys * token_bytes.key_value)
        moved = np.concatenate(sizes)
        travels, between = source != destination, node_of[source] != node_of[destination]
        sums = [
            sum_by(end[chosen], moved[chosen], len(node_of)) // head_groups
            for chosen in (travels, between)
            for end in (source, destination)
        ]
        return cls(*sums)


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a layout, sorted by (document, start) once for all candidates.

    Attributes:
        key: `[segments]` ascending, document and start in one int64.
        start, stop, rank: `[segments]` tokens, and the rank that holds them.
    """

    key: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Sorts the segments of a layout."""
        key = (layout.segment_document << POSITION_BITS) + layout.segment_start
        order = np.argsort(key, kind="stable")  # which takes little time where they are in order
        return cls(key[order], layout.segment_start[order], layout.segment_stop[order], layout.segment_rank[order])

    def overlaps(
        self, document: IntArray, start: IntArray, stop: IntArray, rank: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Finds every overlap of a range with a segment: its owner, the range's rank, its tokens."""
        #     range            [3:9)
        #     segments    [0:5)  [5:7)  [7:13)     first: the one that `start` lies in; counts: 3
        #     overlaps    [3:5)  [5:7)  [7:9)
        first = np.searchsorted(self.key, (document << POSITION_BITS) + start, side="right") - 1
        counts = np.searchsorted(self.key, (document << POSITION_BITS) + stop, side="left") - first
        part = np.repeat(np.arange(len(counts)), counts)
        segment = ranges(first, counts)
        tokens = np.minimum(self.stop[segment], stop[part]) - np.maximum(self.start[segment], start[part])
        return self.rank[segment], rank[part], tokens


# Price of a byte on a rank that moves none, relative to about 1 on the busiest rank: no byte is free.
LOWEST_PRICE = 0.1


@dataclass(frozen=True, slots=True)
class Prices:
    """`[ranks]` prices of sending and of receiving a byte, without unit; relative to each other, about 1 at most."""

    send: list[float]
    receive: list[float]

    @classmethod
    def opening(cls, gives: Iterable[bool], quiet: float) -> Self:
        """Makes the first prices: bytes that ranks with too much work send cost 1, all other bytes `quiet`."""
        send = [1.0 if giver else quiet for giver in gives]
        return cls(send, [quiet] * len(send))

    def of_queries(self, owner: int, rank: int, token_bytes: TokenBytes) -> float:
        """Returns the price of computing one query on a rank: the query is sent there, its output is sent back."""
        there = token_bytes.query * (self.send[owner] + self.receive[rank])
        return there + token_bytes.output * (self.send[rank] + self.receive[owner])

    def of_keys(self, owner: int, rank: int, token_bytes: TokenBytes) -> float:
        """Returns the price of sending the key and value of one token."""
        return token_bytes.key_value * (self.send[owner] + self.receive[rank])

    def copy(self) -> "Prices":
        """Copies both lists."""
        return Prices(list(self.send), list(self.receive))

    def follow(self, sent: list[int], received: list[int]) -> "Prices":
        """Returns prices for the next candidate: the more bytes a rank moves in this one, the higher its prices."""
        most = max(*sent, *received, 1)
        return Prices(_follow(self.send, sent, most), _follow(self.receive, received, most))


def _follow(prices: list[float], moved: list[int], most: int) -> list[float]:
    """Averages old prices and prices from bytes, geometrically: without the old ones two plans would alternate."""
    return [(price * (LOWEST_PRICE + (share / most) ** 2)) ** 0.5 for price, share in zip(prices, moved, strict=True)]
