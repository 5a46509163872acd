"""Cuts: the heads of a stack that move to a server, and the position down to which their queries move.

position   top ┬────┬────┬────┐
               │ ↗  │ ↗  │    │    two heads, cut at one position: the next query of each costs the same
           cut ├────┼────┤    │
         start └────┴────┴────┘
"""

from typing import NamedTuple

from distca_hf.cost import Mask
from distca_hf.planning.rebalance.head_stacks import Stack, tokens_held


# One head group of a stack: keys that the server lacks, top, end of the queries that travel, head group.
Column = tuple[int, int, int, int]


class Cut(NamedTuple):
    """Queries [position, top) of some heads.

    Attributes:
        price_per_work: bytes x price, divided by the work that moves.
        heads: head groups.
        position: first query that moves.
        queries, keys: rows that the server receives.
    """

    price_per_work: float
    heads: list[int]
    position: int
    queries: int
    keys: int


class Terms(NamedTuple):  # made for every rank that might take queries: a data class would take three times as long
    """Work and prices of a possible move to one rank.

    Attributes:
        work: pairs x head groups to move, or all there are if fewer.
        round_down: whether to round the position down to a tile, which moves too much, or up, which moves too little.
        query, key: price of one row.
        whole_head: price saved for each head that moves down to the stack's start: the old server then needs no keys
            of other ranks for it.
    """

    work: float
    round_down: bool
    query: float
    key: float
    whole_head: float


def columns_without_keys(stack: Stack) -> list[Column]:
    """Returns one column for each head with queries left, highest first, for a server without rows of the document.

    Queries that were merged into the stack travel in any case, and so do their keys: they cost nothing more here.
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
    """Returns the columns for a server that holds or received rows of the document, fewest lacking keys first.

    Args:
        stack: the stack to cut.
        rank: the server.
        prefixes: `[head_groups]` keys of the document's beginning that the server has received, of each head.
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
        """Estimates the keys that a cut higher than this one sends, and that the deeper cut to follow sends again."""
        mean_keys = mask.area(position) / position
        return position - self.area / mean_keys


def _on_tile(position: int, start: int, tile_tokens: int, round_down: bool) -> int:
    """Rounds a position to a multiple of the tile; one below the stack's start to the start."""
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
    is charged for keys that a later, deeper cut will send again.

    Args:
        columns: heads in the order in which they are taken.
        stack: the stack to cut.
        terms: work to move, and prices.
        tile_tokens: positions are multiples of this, or the stack's start.
        common_cut: cut by which the surplus would leave if all heads were cut alike.
        spare_room: whether to consider cuts at `common_cut`, which move less work than asked for.
        price_limit: upper bound, exclusive, of the price for its work.

    Returns:
        The cut, or None if no price is below the limit.
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
        # 1. The position at which so many heads, cut alike, move the work.
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
