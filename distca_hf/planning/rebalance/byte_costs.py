"""Bytes that a plan in the making moves, exactly: queries and outputs away from home, keys once for each server."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np

from distca_hf.cost import IntArray, TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.pieces import POSITION_BITS
from distca_hf.planning.rebalance.head_stacks import Stack


@dataclass(frozen=True, eq=False)
class MovedBytes:
    """`[ranks]` forward bytes of one layer that each rank sends and receives, and those of them between nodes."""

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
        """Bytes of what the stacks hold and gave. All other documents are computed where all of their tokens are.

        Args:
            segments: who holds what.
            stacks: all stacks of the documents concerned.
            head_groups: groups that heads are divided in.
            token_bytes: bytes of one token.
            node_of: `[ranks]` node of each rank.
        """
        parts = [stack.parts() for stack in stacks]
        numbers = np.fromiter(chain.from_iterable(chain.from_iterable(parts)), dtype=np.int64).reshape(-1, 4)
        head, start, stop, server = numbers.T
        documents = np.array([stack.document for stack in stacks], dtype=np.int64)
        document = np.repeat(documents, np.array([len(of_stack) for of_stack in parts], dtype=np.int64))
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
            _sum_by_rank(rank[chosen], moved[chosen], len(node_of)) // head_groups
            for chosen in (travels, between)
            for rank in (source, destination)
        ]
        return cls(*sums)


def _sum_by_rank(rank: IntArray, sizes: IntArray, num_ranks: int) -> IntArray:
    """`[ranks]` sums; exact, since they are far below 2 ** 53."""
    return np.bincount(rank, sizes, num_ranks).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a layout, sorted by (document, start): once for all plans that are tried."""

    key: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray

    @classmethod
    def of(cls, layout: Layout) -> Self:
        key = (layout.segment_document << POSITION_BITS) + layout.segment_start
        order = np.argsort(key, kind="stable")  # which takes little time where they are in order
        return cls(key[order], layout.segment_start[order], layout.segment_stop[order], layout.segment_rank[order])

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


# No byte is free, also where nothing moves.
LOWEST_PRICE = 0.1


@dataclass(frozen=True, slots=True)
class Prices:
    """`[ranks]` prices of sending and of receiving a byte."""

    send: list[float]
    receive: list[float]

    @classmethod
    def opening(cls, gives: Iterable[bool], quiet: float) -> Self:
        """Prices before anything is known: what ranks with too much work send costs 1, all other bytes `quiet`."""
        send = [1.0 if giver else quiet for giver in gives]
        return cls(send, [quiet] * len(send))

    def of_queries(self, home: int, server: int, token_bytes: TokenBytes) -> float:
        """Price of computing one query elsewhere: the query goes, its output comes back."""
        there = token_bytes.query * (self.send[home] + self.receive[server])
        return there + token_bytes.output * (self.send[server] + self.receive[home])

    def of_keys(self, home: int, server: int, token_bytes: TokenBytes) -> float:
        """Price of the key and value of one token."""
        return token_bytes.key_value * (self.send[home] + self.receive[server])

    def copy(self) -> "Prices":
        return Prices(list(self.send), list(self.receive))

    def follow(self, sent: list[int], received: list[int]) -> "Prices":
        """Prices for the next plan, from the bytes that this one moves: the busier a rank, the more it asks for."""
        most = max(*sent, *received, 1)
        return Prices(_follow(self.send, sent, most), _follow(self.receive, received, most))


def _follow(prices: list[float], moved: list[int], most: int) -> list[float]:
    """Geometric mean of old prices and those that the bytes ask for: without old ones two plans would alternate."""
    return [(price * (LOWEST_PRICE + (share / most) ** 2)) ** 0.5 for price, share in zip(prices, moved, strict=True)]
