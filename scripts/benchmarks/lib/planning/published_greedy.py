"""Published greedy: the communication-aware scheduler of DistCA (arXiv 2510.18121, section 4.2 and appendix B).

It follows the published code (`Planner.plan_items`). Ranks are first filled in order (`fill_head_and_tail`). Then
every rank with less than the mean work takes some, the neediest rank first, until it is within a tolerance of the
mean. Each time the item with the fewest bytes per moved work gives, of any rank above the mean. It gives all of its
work, or as much as the taker needs and its rank can spare. An item is the part of a document's queries that one rank
computes: a head and a tail. The work that it gives comes from the middle, where head and tail meet:

    item     | head ----------> middle <---------- tail |      every pair of queries, one of the head and
    gives                   | moved |                          one of the tail, attends length + 1 keys

The tolerance applies to takers only. A giver may keep any surplus, and does once all other ranks are within the
tolerance. With a tolerance of 0 all ranks end at the mean.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray, run_starts, run_stops
from distca_hf.cost import TokenBytes, causal_pairs, causal_pairs_of
from distca_hf.layout import Layout, check_document_tokens
from distca_hf.planning.pieces import Tasks
from distca_hf.planning.plan import Plan


PAPER_TOLERANCE = 0.05  # share of the mean work that a rank may lack in the paper's figures; 0.1 in the code


def plan_published_greedy(
    document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes, tolerance: float
) -> Plan:
    """Returns the plan of the published planner for documents filled in order. It weighs queries and keys by the bytes
    of a token; a rank may lack a share of the mean work."""
    # 1. Items, and the surplus of every rank over the mean.
    layout = fill_head_and_tail(document_tokens, num_ranks)
    items = _Items.of(layout)
    work = layout.rank_work.copy()
    mean = int(work.sum()) // num_ranks
    surplus = work - mean
    giving = np.flatnonzero(surplus[items.rank] > 0)
    # 2. Takers, the neediest first, each from the cheapest items; a move is (document, two ranges, taker).
    moved: list[tuple[int, int, int, int, int, int]] = []
    for taker in np.argsort(surplus, kind="stable").tolist():
        needed = -int(surplus[taker])
        # Items of ranks without a surplus never become givers again: takers stay at or below the mean.
        giving = giving[(surplus[items.rank[giving]] > 0) & (items.work[giving] > 0)]
        while needed > tolerance * mean and len(giving):
            most = np.minimum(np.minimum(surplus[items.rank[giving]], needed), items.work[giving])
            item, most_work = _cheapest(items, giving, most, token_bytes)
            if item < 0:
                break
            given, ranges = items.give(item, most_work)
            if given == 0:
                break
            moved.append((int(items.document[item]), *ranges, taker))
            surplus[items.rank[item]] -= given
            surplus[taker] += given
            needed -= given
    return Plan(layout, _tasks(items, moved))


def _cheapest(items: "_Items", giving: IntArray, most: IntArray, token_bytes: TokenBytes) -> tuple[int, int]:
    """Returns the item with the fewest bytes per work and the work it can give; -1 if none can give any.

    Bytes are counted as the published planner does it: keys of the whole document, and one query for every pair of
    queries that moves.
    """
    whole = items.tokens[giving] + 1
    with np.errstate(divide="ignore"):
        bytes_per_work = token_bytes.query / whole + token_bytes.key_value * whole / np.maximum(most, 0)
    best = int(np.argmin(bytes_per_work))
    return (int(giving[best]), int(most[best])) if most[best] > 0 else (-1, 0)


@dataclass(eq=False)
class _Items:
    """Items of all ranks: head [head_start, head_stop) and tail [tail_start, tail_stop) of a document of `tokens`."""

    document: IntArray
    tokens: IntArray
    rank: IntArray
    head_start: IntArray
    head_stop: IntArray
    tail_start: IntArray
    tail_stop: IntArray
    work: IntArray

    @classmethod
    def of(cls, layout: Layout) -> "_Items":
        """Returns one item for each document and rank, in the order of documents. A single segment is a head and a
        tail that meet in its middle."""
        order = np.lexsort((layout.segment_start, layout.segment_rank, layout.segment_document))
        document, rank = layout.segment_document[order], layout.segment_rank[order]
        start, stop = layout.segment_start[order], layout.segment_stop[order]
        first = np.flatnonzero(run_starts(document, rank))
        last = np.append(first[1:], len(order))[: len(first)] - 1
        middle = (start[first] + stop[first] + 1) // 2
        alone = first == last
        head_stop = np.where(alone, middle, stop[first])
        tail_start = np.where(alone, middle, start[last])
        work = causal_pairs_of(start[first], head_stop) + causal_pairs_of(tail_start, stop[last])
        tokens = layout.document_tokens[document[first]]
        return cls(document[first], tokens, rank[first], start[first], head_stop, tail_start, stop[last], work)

    def give(self, item: int, most_work: int) -> tuple[int, tuple[int, int, int, int]]:
        """Takes about `most_work` out of an item; returns the work and the two ranges of queries that it gave."""
        head_start, head_stop = int(self.head_start[item]), int(self.head_stop[item])
        tail_start, tail_stop = int(self.tail_start[item]), int(self.tail_stop[item])
        if most_work >= self.work[item]:
            from_head, from_tail = head_stop - head_start, tail_stop - tail_start
        else:
            pairs_of_queries = most_work // (int(self.tokens[item]) + 1)
            from_head = from_tail = min(pairs_of_queries, head_stop - head_start, tail_stop - tail_start)
        ranges = (head_stop - from_head, head_stop, tail_start, tail_start + from_tail)
        given = causal_pairs(ranges[0], ranges[1]) + causal_pairs(ranges[2], ranges[3])
        self.head_stop[item] -= from_head
        self.tail_start[item] += from_tail
        self.work[item] -= given
        return given, ranges


def _tasks(items: _Items, moved: list[tuple[int, int, int, int, int, int]]) -> Tasks:
    """Returns tasks of all heads and tails, moved or not; neighbours on one server become one task."""
    there = np.array(moved, dtype=np.int64).reshape(-1, 6)
    document = np.concatenate([items.document, items.document, there[:, 0], there[:, 0]])
    start = np.concatenate([items.head_start, items.tail_start, there[:, 1], there[:, 3]])
    stop = np.concatenate([items.head_stop, items.tail_stop, there[:, 2], there[:, 4]])
    server = np.concatenate([items.rank, items.rank, there[:, 5], there[:, 5]])
    some = np.flatnonzero(stop > start)
    order = some[np.lexsort((start[some], document[some]))]
    document, start, stop, server = document[order], start[order], stop[order], server[order]
    opens = run_starts(document, server)
    closes = run_stops(opens)
    return Tasks.sort(document[opens], start[opens], stop[closes], server[opens])


def fill_head_and_tail(document_tokens: IntArray, num_ranks: int) -> Layout:
    """Fills ranks in order with tokens that are equal to within one.

    A document that spans ranks is laid out head and tail (`batch_to_items_general` of the published planner.py). Every
    rank takes tokens from its beginning and as many from its end, so that all have its mean cost per token.

        document 0 .......................................... L
                 |  a  |   b   | c | c |   b   |  a  |           ranks a, b, c
    """
    lengths = check_document_tokens(document_tokens).tolist()
    total_tokens = sum(lengths)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    rank, filled = 0, 0
    for document, tokens in enumerate(lengths):
        head, tail = 0, tokens
        while head < tail:
            while (room := total_tokens * (rank + 1) // num_ranks - filled) == 0:
                rank += 1
            take = min(tail - head, room)
            if take == tokens:
                segments[rank].append((document, 0, tokens))
            else:
                segments[rank].extend(_head_and_tail(document, head, tail, take))
            head, tail = head + take // 2, tail - (take - take // 2)
            filled += take
    return Layout.from_segments(lengths, segments)


def _head_and_tail(document: int, head: int, tail: int, take: int) -> list[tuple[int, int, int]]:
    """Returns segments of the outer `take` tokens of [head, tail), half of them from either end; one segment if these
    are all tokens."""
    if take == tail - head:
        return [(document, head, tail)]
    from_head = take // 2
    ranges = [(document, head, head + from_head), (document, tail - (take - from_head), tail)]
    return [segment for segment in ranges if segment[1] < segment[2]]
