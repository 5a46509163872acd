"""Stacks: the queries of one document on one rank, piled up from first to last for every head group, and cuts of them.

A query late in its document attends to the most keys for the same bytes, so queries leave from the top:

    position   stop ┬────┬────┬────┬────┐
                    │ r2 │ r2 │ r3 │    │   head groups 0 and 1 down to `cut` moved to rank 2, group 2 to rank 3;
               cut  ├────┼────┤    │    │   group 3 stays, and so do all queries below
                    │    │    ├────┤    │
              start └────┴────┴────┴────┘
               head    0    1    2    3

A cut is the heads of a stack that move to a rank, and the position down to which their queries move. Heads cut
together are cut at one position: there the next query of each costs the same.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.planning.pieces import ALL_HEADS, Tasks
from distca_hf.planning.plan import plan_in_place


Held = list[tuple[int, int]]  # ranges [start, stop) of a document that a rank holds
Holders = dict[int, Held]  # rank -> its ranges
Move = tuple[int, int, int, int]  # head group, start, stop, rank
# One head group of a stack: keys that the new rank lacks, top, end of the queries that travel, head group.
Column = tuple[int, int, int, int]


@dataclass(slots=True)
class Stack:
    """Queries [start, stop) of a document on `rank`, including those it gave to other ranks.

    Attributes:
        document, rank, start, stop: the queries, and the rank that computes all of them at first.
        own_stop: end of the tokens that the rank holds; later ones were merged (see `donors.merge_short_tails`).
        holders: ranks that hold tokens of the document; empty if `rank` holds all of them.
        tops: `[head_groups]` end of each head's remaining queries.
        mask: keys to which queries attend.
        place: order among equally long stacks. It depends on the layout, not on the numbers of documents.
        moves: queries that were given away.
        pairs_before_tops: `[head_groups]` attended pairs of the document's queries before each top; empty until
            `count_pairs` counts them.
    """

    document: int
    rank: int
    start: int
    own_stop: int
    stop: int
    holders: Holders
    tops: list[int]
    mask: Mask
    place: int = 0
    moves: list[Move] = field(default_factory=list)
    pairs_before_tops: list[int] = field(default_factory=list)
    pairs_before_start: int = 0

    def count_pairs(self) -> list[int]:
        """Counts pairs before the start and before each top, once; returns the latter."""
        if not self.pairs_before_tops:
            if self.tops.count(self.stop) == len(self.tops):  # like nearly every stack before its first move
                self.pairs_before_tops = [self.mask.pairs_before(self.stop)] * len(self.tops)
            else:
                self.pairs_before_tops = [self.mask.pairs_before(top) for top in self.tops]
            self.pairs_before_start = self.mask.pairs_before(self.start)
        return self.pairs_before_tops

    def pairs_left(self) -> int:
        """Counts attended pairs x head groups of the remaining queries."""
        return sum(self.count_pairs()) - len(self.tops) * self.pairs_before_start

    @property
    def has_queries(self) -> bool:
        return max(self.tops) > self.start

    def give(self, heads: list[int], cut: int, rank: int) -> int:
        """Gives queries [cut, top) of some heads to a rank; returns their pairs x head groups."""
        before_tops, before_cut = self.count_pairs(), self.mask.pairs_before(cut)
        pairs = 0
        for head in heads:
            pairs += before_tops[head] - before_cut
            self.moves.append((head, cut, self.tops[head], rank))
            self.tops[head], before_tops[head] = cut, before_cut
        return pairs

    def parts(self) -> list[Move]:
        """Lists all queries of the stack: ranges that moved, and remaining ranges."""
        start, rank = self.start, self.rank
        return self.moves + [(head, start, top, rank) for head, top in enumerate(self.tops) if top > start]


def tokens_held(held: Held, start: int, stop: int) -> int:
    """Counts tokens of [start, stop) in the ranges that a rank holds."""
    return sum([max(0, min(stop, last) - max(start, first)) for first, last in held])


Range = tuple[int, int, int]  # start, stop, rank


def tasks_of(layout: Layout, stacks: list[Stack], head_groups: int, mask: Mask) -> Tasks:
    """Makes the tasks of a layout. Stacks place their documents; all others stay on their owner ranks.

    A document gets tasks of single head groups only if its groups were cut or moved differently.
    """
    in_place = plan_in_place(layout, mask=mask).tasks

    # 1. Documents with stacks: ranges of each head, joined if neighbours have the same rank.
    by_document: dict[int, list[list[Range]]] = {}
    for stack in stacks:
        heads = by_document.setdefault(stack.document, [[] for _ in range(head_groups)])
        for head, start, stop, rank in stack.parts():
            heads[head].append((start, stop, rank))
    rows: list[tuple[int, int, int, int, int]] = []
    for document, heads in by_document.items():
        joined = [_join(parts) for parts in heads]
        if all(parts == joined[0] for parts in joined):
            rows += [(document, *part, ALL_HEADS) for part in joined[0]]
        else:
            rows += [(document, *part, head) for head, parts in enumerate(joined) for part in parts]

    # 2. All other documents, as they are in place.
    stays = np.ones(layout.num_documents, dtype=bool)
    stays[list(by_document)] = False
    kept = np.flatnonzero(stays[in_place.document])
    columns_in_place = (in_place.document, in_place.start, in_place.stop, in_place.rank, in_place.head)
    untouched = np.stack(columns_in_place, axis=1)[kept]
    columns = np.concatenate([untouched, np.array(rows, dtype=np.int64).reshape(-1, 5)]).T
    return Tasks.sort(columns[0], columns[1], columns[2], columns[3], columns[4], head_groups, mask)


def _join(parts: list[Range]) -> list[Range]:
    """Sorts ranges, and joins neighbours of one rank."""
    joined: list[Range] = []
    for start, stop, rank in sorted(parts):
        if joined and joined[-1][1:] == (start, rank):
            start = joined.pop()[0]
        joined.append((start, stop, rank))
    return joined


class Cut(NamedTuple):
    """Queries [position, top) of some heads.

    Attributes:
        price_per_work: bytes x price, divided by the work that moves.
        heads: head groups.
        position: first query that moves.
        queries, keys: rows that the taker receives.
    """

    price_per_work: float
    heads: list[int]
    position: int
    queries: int
    keys: int


class Terms(NamedTuple):  # made for every rank that might take queries: a data class would take three times as long
    """Work and prices of a possible move to one rank.

    Attributes:
        work: pairs x head groups to move; all of them if there are fewer.
        round_down: whether to round the position down to a tile and move too much, or up and move too little.
        query, key: price of one row.
        whole_head: price saved for each head that moves down to the stack's start: for this head the old rank then
            needs no keys of other ranks.
    """

    work: float
    round_down: bool
    query: float
    key: float
    whole_head: float


def columns_without_keys(stack: Stack) -> list[Column]:
    """Returns a column for each head with remaining queries, highest first, for a rank without rows of the document.

    Queries that were merged into the stack travel in any case, and so do their keys: they add no cost here.
    """
    columns = []
    for head, top in enumerate(stack.tops):
        if top > stack.start:
            travels = min(top, stack.own_stop)
            columns.append((travels, top, travels, head))
    if min(stack.tops) < max(stack.tops):
        columns.sort(key=lambda column: (-column[1], column[3]))
    return columns


def columns_with_keys(stack: Stack, rank: int, prefixes: list[int]) -> list[Column]:
    """Returns the columns for a rank that holds or received rows of the document, fewest lacking keys first.

    Args:
        prefixes: `[head_groups]` keys of the document's beginning that it has received for each head.
    """
    columns = []
    held = stack.holders.get(rank, [])
    same: dict[tuple[int, int], tuple[int, int]] = {}  # most heads have equal tops and prefixes
    for head, alike in enumerate(zip(stack.tops, prefixes, strict=True)):
        top, known = alike
        if top > stack.start:
            if alike not in same:
                merged = max(0, top - stack.own_stop)
                lacks = top - known if top > known else 0
                travels = top - merged
                if held:
                    lacks -= tokens_held(held, known, top) if top > known else 0
                    travels -= tokens_held(held, stack.own_stop, top)
                same[alike] = max(0, lacks - merged), travels
            lacks, travels = same[alike]
            columns.append((lacks, top, travels, head))
    if len(same) > 1:
        columns.sort(key=lambda column: (column[0], -column[1], column[3]))
    return columns


class CommonCut(NamedTuple):
    """Position down to which all heads of some stacks would be cut alike, and its `Mask.area`."""

    position: float
    area: float

    def keys_sent_again(self, position: int, mask: Mask) -> float:
        """Estimates the keys that a cut above this one sends, and that a later, deeper cut sends again."""
        mean_keys = mask.area(position) / position
        return position - self.area / mean_keys


def _on_tile(position: int, start: int, tile_tokens: int, round_down: bool) -> int:
    """Rounds a position to a multiple of the tile, but not below the stack's start."""
    if position <= start:
        return start
    rounded = position - position % tile_tokens
    if rounded < position and not round_down:
        rounded += tile_tokens
    return rounded if rounded > start else start


def cheapest_cut(
    columns: list[Column],
    stack: Stack,
    terms: Terms,
    tile_tokens: int,
    common_cut: CommonCut,
    spare_room: bool,
    price_limit: float,
) -> Cut | None:
    """Finds the cut with the lowest price for its work. A cut takes the first heads of a list down to one position.
    Equal positions are best: there the next query of every head costs the same for its work. A cut above `common_cut`
    also pays for keys that a later, deeper cut will send again.

    Args:
        columns: heads in the order in which they are taken.
        tile_tokens: positions are multiples of this, or the stack's start.
        common_cut: cut that would move the surplus if all heads were cut alike.
        spare_room: whether to consider cuts at `common_cut`, which move less work than requested.
        price_limit: exclusive upper bound of the price for its work; if no price is below it, returns None.
    """
    work, round_down, query_price, key_price, whole_head = terms
    start, common_position = stack.start, common_cut.position
    position_of, pairs_before = stack.mask.position, stack.mask.pairs_before  # looked up once: each head calls them
    pairs_before_tops, spare_position = stack.count_pairs(), int(common_position)
    pairs_before_start = stack.pairs_before_start
    pairs = lacks = travels = best_count = 0
    lowest, best_price = columns[0][1], float("inf")
    best: tuple[int, int, int] | None = None
    for count, (lack, top, travel, head) in enumerate(columns, 1):
        # 1. The position at which this many heads, cut alike, move the work.
        pairs += pairs_before_tops[head]
        lacks += lack
        travels += travel
        if top < lowest:
            lowest = top
        left = (pairs - work) / count
        deepest = int(position_of(left)) if left > pairs_before_start else start
        if lowest <= deepest:
            break  # more heads would be cut still higher
        for wanted in (deepest, spare_position) if spare_room and deepest < common_position else (deepest,):
            # 2. That position on a tile, and the price of its rows.
            position = _on_tile(wanted, start, tile_tokens, round_down)
            if position >= lowest:
                continue
            queries = travels - count * position
            price = key_price * lacks + (query_price * queries if queries > 0 else 0.0)
            if position == start:
                price -= count * whole_head
                moved = pairs - count * pairs_before_start
            else:
                moved = pairs - count * pairs_before(position)
                if position > common_position and price < best_price * moved:
                    price += count * key_price * common_cut.keys_sent_again(position, stack.mask)
            # 3. The lowest price for the work that moves.
            if price < best_price * moved:
                best_price, best_count, best = price / moved, count, (position, queries, lacks)
        if count > best_count + 1 and best is not None:
            break  # two more heads made it dearer
    if best is None or best_price >= price_limit:
        return None
    position, queries, lacks = best
    return Cut(best_price, [head for _, _, _, head in columns[:best_count]], position, max(0, queries), lacks)


def common_cut_of(stacks: list[Stack], work: float, mask: Mask) -> CommonCut:
    """Finds the position at which all heads of some stacks, cut alike, move this much work."""
    tops = sorted([top for stack in stacks for top in stack.tops if top > stack.start], reverse=True)
    left, total, before, area = 0.0, 0.0, -1, 0.0
    for count, top in enumerate(tops, 1):
        if top != before:  # most heads have equal tops
            before, area = top, mask.area(top)
        if left >= area:
            break
        total += area
        left = max(0.0, (total - work) / count)
    position = mask.position(left)
    return CommonCut(position, mask.area(position))
