"""Donors: the stacks of each rank, longest first, that it may move to others; short tails of documents are merged.

packed        rank 0 | d1[0:200K]           |
              rank 1 | d1[200K:201K] | d2 ..        1K queries would need 200K keys
merged        the 1K queries are computed on rank 0, where the keys are, or those of some heads are

A `Strategy` says which tails are merged, and settles other choices that a greedy pass cannot make by looking ahead. So
several strategies are tried.
"""

from bisect import insort
from dataclasses import dataclass
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.rebalance.byte_costs import Prices
from distca_hf.planning.rebalance.head_stacks import Holders, Stack


@dataclass(frozen=True, slots=True)
class Strategy:
    """Settings of one greedy pass.

    Attributes:
        merge_below: maximum cost of moving the queries of a short tail, as a multiple of the cost of moving its keys.
            Below it the tail is merged with the part before it.
        spare_room: whether a rank may be left with room, where using it up would cut a document so deep that too
            many queries travel. It helps where many ranks have room.
        merge_heads: fraction of the heads that are merged; all of them where the document goes on behind the tail.
        quiet_price: price of bytes that no rank with a surplus sends, relative to bytes that one sends.
    """

    merge_below: float = 1.0
    spare_room: bool = False
    quiet_price: float = 0.3
    merge_heads: float = 1.0


@dataclass(frozen=True, slots=True)
class Effort:
    """Search budget of a plan.

    Attributes:
        strategies: strategies that are tried.
        rounds: repetitions of the best of them, each with prices that follow from the bytes of the one before.
        steps: greedy steps after which the search ends.
        good_enough: ratio of the largest rank's bytes to their estimated minimum at which it ends. The estimate
            depends on the tails that were merged, so it says little about other strategies.
    """

    strategies: int
    rounds: int
    steps: int
    good_enough: float

    @classmethod
    def for_ranks(cls, num_ranks: int) -> Self:
        """Returns the budget for a number of ranks. A candidate takes 0.4 ms at 4 ranks, 12 at 64 and 120 at 512."""
        strategies = 6 if num_ranks <= 4 else 3 if num_ranks <= SMALL_WORLD else 2
        return cls(strategies, 1, STEPS_PER_RANK * num_ranks, 0.0 if num_ranks <= SMALL_WORLD else GOOD_ENOUGH)


# Strategies in the order in which they are tried: each one wins most over the ones before it (measured).
STRATEGIES = (
    Strategy(spare_room=True),
    Strategy(merge_below=2, quiet_price=1),
    Strategy(merge_below=2, quiet_price=0.1, merge_heads=0.75),
    Strategy(spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=1, merge_heads=0.25),
    Strategy(merge_below=8, spare_room=True, quiet_price=0.1, merge_heads=0.75),
)
# Number of stacks in a candidate from which on no further one is tried: its documents are short, and strategies differ
# in long documents.
MANY_DOCUMENTS = 4096
# Maximum number of greedy steps of all candidates together, per rank: bounds the time of planning.
STEPS_PER_RANK = 8
# Ratio of the largest rank's bytes to their estimated minimum up to which no further candidate is tried.
GOOD_ENOUGH = 1.02
# Number of ranks up to which all candidates are tried, whatever their ratio: they take a few milliseconds.
SMALL_WORLD = 16


class DocumentsByRank:
    """Documents of a layout, sorted once for all candidates.

    Attributes:
        spanning: documents that span ranks, and (start, stop, rank) of their segments.
        whole_work: `[ranks]` attended pairs of all other documents.

    Args:
        layout: ranks, and the tokens that each of them holds.
        held_work: `[ranks]` attended pairs of these tokens.
        mask: keys that queries attend.
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
        self._whole, self._tokens = document[kept], tokens[kept]
        self._borders = np.searchsorted(layout.segment_rank[kept], np.arange(layout.num_ranks + 1))

    def whole_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """Returns the documents that lie wholly on a rank, longest first, and their lengths in tokens."""
        own = slice(self._borders[rank], self._borders[rank + 1])
        return self._whole[own], self._tokens[own]


class Donors:
    """Stacks of every rank. A stack of a whole document is made at its first use.

    Attributes:
        work: `[ranks]` pairs x head groups; merged tails count on the rank that computes them.
        head_groups: groups that heads are divided into.
        mask: keys that queries attend.
        spanning: stacks of documents that span ranks.
        opened: stacks of whole documents, made so far.

    Args:
        documents: documents of the layout.
        head_groups, token_bytes, prices, strategy, mask: see `merge_short_tails`.
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

    @property
    def stacks(self) -> list[Stack]:
        """All stacks so far. Documents without a stack are computed by their owner."""
        return self.spanning + self.opened

    def longest(self, rank: int, count: int) -> list[Stack]:
        """Returns up to `count` stacks of a rank that have queries left, longest first."""
        ready = [stack for stack in self._ready.get(rank, []) if stack.has_queries]
        documents, tokens = self._documents.whole_of(rank)
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
        head_groups: groups that heads are divided into.
        token_bytes: bytes of one token.
        prices: price of a byte on every rank.
        strategy: the length of tails that are merged, and the number of their heads.
        mask: keys that queries attend.
    """
    stacks: list[Stack] = []
    holders: Holders = {}
    some_heads = max(1, round(strategy.merge_heads * head_groups))
    for start, stop, rank in segments:
        holders.setdefault(rank, []).append((start, stop))
        before = stacks[-1] if stacks else None
        if before is not None and before.rank == rank and before.own_stop == before.stop:
            before.own_stop = before.stop = stop
        elif before is not None and _price_of_queries(stop - start, rank, before.rank, token_bytes, prices) < (
            strategy.merge_below * _price_of_keys(start, rank, before.rank, token_bytes, prices)
        ):
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


def _price_of_keys(before: int, owner: int, rank: int, token_bytes: TokenBytes, prices: Prices) -> float:
    """Returns the price of computing a tail on its owner: it receives all keys before it."""
    return before * prices.of_keys(rank, owner, token_bytes)


def _price_of_queries(tokens: int, owner: int, rank: int, token_bytes: TokenBytes, prices: Prices) -> float:
    """Returns the price of computing a tail where the keys before it are: its owner sends its queries and keys."""
    return tokens * (prices.of_queries(owner, rank, token_bytes) + prices.of_keys(owner, rank, token_bytes))
