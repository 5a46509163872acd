"""Donors: the stacks of each rank that it may move to others, longest first; short tails of documents are merged.

packed        rank 0 | d1[0:200K]           |
              rank 1 | d1[200K:201K] | d2 ..        1K queries would need 200K keys
merged        the 1K queries are computed on rank 0, where the keys are, or some heads are

A `Strategy` says which tails are merged, and settles other choices for which a greedy pass would have to look ahead.
So several strategies are tried. `MovedBytes` counts what each candidate moves, and the next one's `Prices` follow.
Queries that move cost their own bytes and their outputs' bytes. Keys cost theirs once for each rank that reads them.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, ranges, run_starts, sum_by
from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.pieces import POSITION_BITS
from distca_hf.planning.rebalance.head_stacks import Holders, Stack


@dataclass(frozen=True, slots=True)
class Strategy:
    """Settings of one greedy pass.

    Attributes:
        merge_below: maximum cost of moving the queries of a short tail, as a multiple of the cost of moving its keys.
            Below it the tail is merged with the part before it.
        spare_room: whether a rank may keep room if using it up would cut a document so deep that too many queries
            travel. This helps if many ranks have room.
        merge_heads: fraction of the heads that are merged; all of them if the document continues after the tail.
        quiet_price: price of bytes not sent by a rank with a surplus, relative to bytes sent by one.
    """

    merge_below: float = 1.0
    spare_room: bool = False
    quiet_price: float = 0.3
    merge_heads: float = 1.0


# Strategies in the order of trying: each gains most over the ones before it (measured).
STRATEGIES = (
    Strategy(spare_room=True),
    Strategy(merge_below=2, quiet_price=1),
    Strategy(merge_below=2, quiet_price=0.1, merge_heads=0.75),
    Strategy(spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=0.1, merge_heads=0.75),
)


# Price of a byte on a rank that moves none, relative to about 1 on the busiest rank: no byte is free.
LOWEST_PRICE = 0.1


@dataclass(frozen=True, slots=True)
class Prices:
    """`[ranks]` unitless prices of sending and of receiving a byte; relative to each other, about 1 at most."""

    send: list[float]
    receive: list[float]

    @classmethod
    def opening(cls, gives: Iterable[bool], quiet: float) -> Self:
        """Makes the first prices: bytes that ranks with too much work send cost 1, all other bytes `quiet`."""
        send = [1.0 if giver else quiet for giver in gives]
        return cls(send, [quiet] * len(send))

    def of_queries(self, owner: int, rank: int, token_bytes: TokenBytes) -> float:
        """Returns the price of computing one query on a rank: sending the query there, and its output back."""
        there = token_bytes.query * (self.send[owner] + self.receive[rank])
        return there + token_bytes.output * (self.send[rank] + self.receive[owner])

    def of_keys(self, owner: int, rank: int, token_bytes: TokenBytes) -> float:
        """Returns the price of sending the key and value of one token."""
        return token_bytes.key_value * (self.send[owner] + self.receive[rank])

    def follow(self, sent: list[int], received: list[int]) -> "Prices":
        """Returns prices for the next candidate: the more bytes a rank moves in this one, the higher its prices."""
        most = max(*sent, *received, 1)
        return Prices(_follow(self.send, sent, most), _follow(self.receive, received, most))


def _follow(prices: list[float], moved: list[int], most: int) -> list[float]:
    """Averages old prices and prices from bytes, geometrically: without the old ones two plans would alternate."""
    return [(price * (LOWEST_PRICE + (share / most) ** 2)) ** 0.5 for price, share in zip(prices, moved, strict=True)]


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
        order = np.argsort(key, kind="stable")  # fast if they are already in order
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
        """Counts the bytes of a plan, given as stacks of all documents whose queries may have moved. Other documents
        lie on one rank and move nothing.

        Args:
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


class DocumentsByRank:
    """Documents of a layout, sorted once for all candidates.

    Attributes:
        spanning: documents that span ranks, and (start, stop, rank) of their segments.
        whole, whole_tokens: all other documents and their lengths, by rank, longest first.
        borders: `[ranks + 1]` where each rank's documents begin among these.
        whole_work: `[ranks]` attended pairs of these documents.

    Args:
        held_work: `[ranks]` attended pairs of the tokens that ranks hold.
    """

    def __init__(self, layout: Layout, held_work: IntArray, mask: Mask) -> None:
        document, start, stop = layout.segment_document, layout.segment_start, layout.segment_stop
        tokens = layout.document_tokens[document]
        whole = stop - start == tokens
        cut = np.flatnonzero(~whole)
        cut = cut[np.lexsort((start[cut], document[cut]))]
        self.whole_work = held_work.copy()
        np.subtract.at(self.whole_work, layout.segment_rank[cut], mask.pairs_of(start[cut], stop[cut]))
        segments: dict[int, list[tuple[int, int, int]]] = {}
        columns = (document[cut], start[cut], stop[cut], layout.segment_rank[cut])
        for number, first, last, rank in zip(*(column.tolist() for column in columns), strict=True):
            segments.setdefault(number, []).append((first, last, rank))
        self.spanning = sorted(segments.items(), key=lambda item: (item[1], item[0]))
        kept = np.flatnonzero(whole)
        kept = kept[np.lexsort((document[kept], -tokens[kept], layout.segment_rank[kept]))]
        self.whole, self.whole_tokens = document[kept], tokens[kept]
        self.borders = np.searchsorted(layout.segment_rank[kept], np.arange(layout.num_ranks + 1))


class Donors:
    """Stacks of every rank. A stack of a whole document is made at its first use.

    Attributes:
        work: `[ranks]` pairs x head groups; merged tails count on the rank that computes them.
        spanning: stacks of documents that span ranks.
        opened: stacks of whole documents made so far.

    Args: see `merge_short_tails`.
    """

    def __init__(
        self,
        documents: DocumentsByRank,
        head_groups: int,
        token_bytes: TokenBytes,
        prices: Prices,
        strategy: Strategy,
        mask: Mask,
    ) -> None:
        self.work: list[int] = (documents.whole_work * head_groups).tolist()
        self.spanning: list[Stack] = []
        self.opened: list[Stack] = []
        self._documents = documents
        self.head_groups = head_groups
        self.mask = mask
        self._ready: dict[int, list[Stack]] = {}
        self._next: dict[int, int] = {}
        for place, (document, segments) in enumerate(documents.spanning):
            stacks = merge_short_tails(document, segments, head_groups, token_bytes, prices, strategy, mask)
            self.spanning += stacks
            for stack in stacks:
                stack.place = place
                self.work[stack.rank] += stack.pairs_left()
                insort(self._ready.setdefault(stack.rank, []), stack, key=_longest_first)

    def longest(self, rank: int, count: int) -> list[Stack]:
        """Returns up to `count` stacks of a rank that have queries left, longest first."""
        ready = [stack for stack in self._ready.get(rank, []) if stack.has_queries]
        own = slice(self._documents.borders[rank], self._documents.borders[rank + 1])
        documents, tokens = self._documents.whole[own], self._documents.whole_tokens[own]
        at = self._next.get(rank, 0)
        while at < len(documents) and (len(ready) < count or tokens[at] > ready[count - 1].stop):
            length = int(tokens[at])
            stack = Stack(int(documents[at]), rank, 0, length, length, {}, [length] * self.head_groups, self.mask)
            stack.place = len(self._documents.spanning) + at
            insort(ready, stack, key=_longest_first)
            self.opened.append(stack)
            at += 1
        self._next[rank] = at
        self._ready[rank] = ready
        return ready[:count]


def _longest_first(stack: Stack) -> tuple[int, int, int]:
    return -stack.stop, stack.start, stack.place


def merge_short_tails(
    document: int,
    segments: list[tuple[int, int, int]],
    head_groups: int,
    token_bytes: TokenBytes,
    prices: Prices,
    strategy: Strategy,
    mask: Mask = CAUSAL_MASK,
) -> list[Stack]:
    """Makes the stacks of a document that spans ranks, in order: one for each rank that computes part of it.

    Args:
        document: its number.
        segments: (start, stop, rank) of each segment, in order.
        head_groups: groups into which heads are divided.
        strategy: the length of tails that are merged, and the number of their heads.
    """
    stacks: list[Stack] = []
    holders: Holders = {}
    some_heads = max(1, round(strategy.merge_heads * head_groups))
    for start, stop, rank in segments:
        holders.setdefault(rank, []).append((start, stop))
        before = stacks[-1] if stacks else None
        if before is not None and before.rank == rank and before.own_stop == before.stop:
            before.own_stop = before.stop = stop
        elif before is not None and _is_merged(start, stop, rank, before.rank, token_bytes, prices, strategy):
            below, before.stop = before.stop, stop
            if some_heads < head_groups and stop == segments[-1][1]:  # no later segment reads its keys
                others = head_groups - some_heads
                before.tops = [stop] * some_heads + [below] * others
                tops = [start] * some_heads + [stop] * others
                stacks.append(Stack(document, rank, start, stop, stop, holders, tops, mask))
        else:
            stacks.append(Stack(document, rank, start, stop, stop, holders, [], mask))
    for stack in stacks:
        stack.tops = stack.tops or [stack.stop] * head_groups
    return stacks


def _is_merged(
    start: int, stop: int, owner: int, rank: int, token_bytes: TokenBytes, prices: Prices, strategy: Strategy
) -> bool:
    """Returns whether a tail [start, stop) is merged: instead of receiving all keys before it, its owner sends queries
    and keys to the rank that holds these."""
    queries = (stop - start) * (prices.of_queries(owner, rank, token_bytes) + prices.of_keys(owner, rank, token_bytes))
    return queries < strategy.merge_below * start * prices.of_keys(rank, owner, token_bytes)
