"""Cuts: which heads of a stack go to a server, and down to which position."""

from math import sqrt
from typing import NamedTuple

from distca_hf.planning.rebalance.head_stacks import Stack, tokens_held


Column = tuple[int, int, int, int]  # keys that the server lacks, top, end of queries that travel, head group


class Cut(NamedTuple):
    """Queries [position, top) of some heads.

    Attributes:
        price_per_work: bytes x price, divided by the work that goes along.
        heads: groups of heads.
        position: where they are cut.
        queries, keys: rows that the server receives.
    """

    price_per_work: float
    heads: list[int]
    position: int
    queries: int
    keys: int


class Terms(NamedTuple):  # made for every rank that might take queries: a data class would take three times as long
    """What a rank asks for taking queries.

    Attributes:
        work: pairs x groups of heads to move; less if there is not as much.
        round_down: whether to move rather a tile too much than too little.
        query, key: price of one row.
        whole_head: price saved for each head that leaves down to the stack's start: its server needs no keys from
            elsewhere any more.
    """

    work: float
    round_down: bool
    query: float
    key: float
    whole_head: float


def columns_for_stranger(stack: Stack) -> list[Column]:
    """One column for each head that has queries left, highest first, as they cost a rank that has nothing of the
    document. Queries that were merged into the stack travel anyway, and so do their keys."""
    columns = []
    for head, top in enumerate(stack.tops):
        if top > stack.start:
            travels = min(top, stack.own_stop)
            columns.append((travels, top, travels, head))
    if min(stack.tops) < max(stack.tops):
        columns.sort(key=lambda column: (-column[1], column[3]))
    return columns


def columns_for_relative(stack: Stack, rank: int, prefixes: list[int]) -> list[Column]:
    """The same for a rank that holds or received part of the document; heads of which it lacks least come first.

    Args:
        stack: whose queries are to move.
        rank: where to.
        prefixes: `[head_groups]` keys of the document's beginning that the rank has received, of each head.
    """
    columns = []
    same: dict[tuple[int, int], tuple[int, int]] = {}  # most heads have been treated alike
    for head, alike in enumerate(zip(stack.tops, prefixes, strict=True)):
        top, known = alike
        if top > stack.start:
            if alike not in same:
                merged = max(0, top - stack.own_stop)
                lacks = top - known - tokens_held(stack.holders, rank, known, top) if top > known else 0
                travels = top - merged - tokens_held(stack.holders, rank, stack.own_stop, top)
                same[alike] = max(0, lacks - merged), travels
            lacks, travels = same[alike]
            columns.append((lacks, top, travels, head))
    if len(same) > 1:
        columns.sort(key=lambda column: (column[0], -column[1], column[3]))
    return columns


def cheapest_cut(
    columns: list[Column],
    stack: Stack,
    terms: Terms,
    tile_tokens: int,
    level: float,
    spare_room: bool,
    price_limit: float,
) -> Cut | None:
    """The cut with the lowest price for its work, among those that take the first heads of a list down to one
    position. Equal positions are best: there the next query of every head costs the same for its work.

    A cut above `level` leaves queries that will have to leave, too, later, with their keys once more: its price
    includes their share of these keys.

    Args:
        columns: heads in the order they are taken.
        stack: whose queries move.
        terms: how much, and what for.
        tile_tokens: cuts are multiples of this.
        level: position down to which all heads would be cut, if they shared what is to leave equally.
        spare_room: whether to consider cuts at the level that move less than asked for.
        price_limit: a cut of this price for its work, or a dearer one, is none.
    """
    work, round_down, query_price, key_price, whole_head = terms
    start, below, spare_position = stack.start, stack.start * (stack.start + 1), int(level)
    squares = lacks = travels = 0
    lowest, level_square = columns[0][1], level * level
    best: tuple[float, int, int, int, int] | None = None
    for count, (lack, top, travel, _) in enumerate(columns, 1):
        squares += top * (top + 1)
        lacks += lack
        travels += travel
        if top < lowest:
            lowest = top
        left = (squares - 2 * work) / count
        deepest = int(sqrt(left)) if left > below else start
        if lowest <= deepest:
            break  # more heads would be cut still higher
        for wanted in (deepest, spare_position) if spare_room and deepest < level else (deepest,):
            position = start
            if wanted > start:
                position = wanted - wanted % tile_tokens
                if position < wanted and not round_down:
                    position += tile_tokens
                if position < start:
                    position = start
            if position >= lowest:
                continue
            queries = travels - count * position
            price = key_price * lacks + (query_price * queries if queries > 0 else 0.0)
            if position == start:
                price -= count * whole_head
            elif position > level:
                price += count * key_price * (position - level_square / position)
            moved = (squares - count * position * (position + 1)) / 2
            if best is None or price < best[0] * moved:
                best = (price / moved, count, position, queries, lacks)
        if best is not None and count > best[1] + 1:
            break  # two more heads made it dearer
    if best is None or best[0] >= price_limit:
        return None
    price_per_work, count, position, queries, lacks = best
    return Cut(price_per_work, [head for _, _, _, head in columns[:count]], position, max(0, queries), lacks)


def common_level(stacks: list[Stack], work: float) -> float:
    """Position down to which all heads of some stacks would be cut to move this much work."""
    tops = sorted([top for stack in stacks for top in stack.tops if top > stack.start], reverse=True)
    square, squares = 0.0, 0
    for count, top in enumerate(tops, 1):
        if square >= top * top:
            break
        squares += top * top
        square = max(0.0, (squares - 2 * work) / count)
    return sqrt(square)
