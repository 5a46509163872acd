"""Exports: ranks with too much work hand queries to those with room, the largest surplus first."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from math import sqrt

from distca_hf.cost import TokenBytes
from distca_hf.planning.rebalance.byte_costs import Prices
from distca_hf.planning.rebalance.cuts import (
    Column,
    Cut,
    Terms,
    cheapest_cut,
    columns_for_relative,
    columns_for_stranger,
    common_level,
)
from distca_hf.planning.rebalance.donors import Supply
from distca_hf.planning.rebalance.head_stacks import Stack, tokens_held


# A rank that receives so many times what the busiest rank moves asks for 1 more per byte. It will rarely come to that;
# what matters is that ranks which receive more than others become a little dearer, so that what is left over by many
# does not all go to the same one.
CALM = 6.0
# In each step a rank's longest stacks are looked at, until they have more than enough work to give,
LONGEST_STACKS = 3
ENOUGH = 1.6
# and ranks with most room, as well as ranks that have part of the document.
STRANGERS = 8
RELATIVES = 6
# A document with less than one in so many parts of the work that is to move goes along with the one before it.
SHORT = 10


Amounts = dict[int, float]  # rank -> work
Offer = tuple[float, int, list[Column]]  # room, rank, what each head costs it


class Exports:
    """A plan in the making: which queries moved so far, and who has keys of which documents.

    Args:
        supply: stacks of each rank.
        prices: what a byte costs on every rank.
        tile_tokens: cuts are multiples of this, where they can be.
        negligible_work: less is not worth a task.
        busy_bytes: about what the busiest rank moves.
        spare_room: see `Strategy`.
    """

    def __init__(
        self,
        supply: Supply,
        prices: Prices,
        token_bytes: TokenBytes,
        tile_tokens: int,
        negligible_work: float,
        busy_bytes: float,
        spare_room: bool,
    ) -> None:
        self.supply = supply
        self.steps = 0
        self._prices = prices.copy()
        self._token_bytes = token_bytes
        self._tile_tokens = tile_tokens
        self._negligible = negligible_work
        self._calm_bytes = CALM * busy_bytes
        self._spare_room = spare_room
        self._prefixes: dict[int, dict[int, list[int]]] = {}
        for stack in supply.spanning:
            keys = [top if top > stack.start else 0 for top in stack.tops]
            self._prefixes.setdefault(stack.document, {})[stack.server] = keys

    def level(self, surplus: Amounts, room: Amounts) -> None:
        """Moves work until there is no surplus or no room left.

        Args:
            surplus: work that ranks are to give.
            room: work that other ranks may take.
        """
        givers = [(-amount, rank) for rank, amount in surplus.items() if amount > self._negligible]
        takers = sorted((amount, rank) for rank, amount in room.items() if amount > self._negligible)
        heapq.heapify(givers)
        while givers and takers:
            amount, giver = heapq.heappop(givers)
            found = self._cheapest(giver, -amount, takers, room, self._tile_tokens)
            found = found or self._cheapest(giver, -amount, takers, room, 1)
            if found is None:
                continue
            self.steps += 1
            stack, cut, taker = found
            del takers[bisect_left(takers, (room[taker], taker))]
            moved = self._move(stack, cut, taker)
            if not stack.has_queries:
                moved += self._hand_over(giver, taker, min(-amount, room[taker]) - moved)
            room[taker] -= moved
            if room[taker] > self._negligible:
                insort(takers, (room[taker], taker))
            if -amount - moved > self._negligible:
                heapq.heappush(givers, (amount + moved, giver))

    def evict(self, rank: int, room: Amounts) -> None:
        """Moves everything that is left on a rank to the rank with most room."""
        while stacks := self.supply.longest(rank, LONGEST_STACKS):
            for stack in stacks:
                taker = max(room, key=lambda other: (room[other], -other))
                room[taker] -= self._move_all(stack, taker)

    def _hand_over(self, giver: int, taker: int, most: float) -> int:
        """Moves the next documents of a rank to where the last one went, as long as they are short in comparison with
        what may move: there is nothing to choose."""
        handed = 0
        while stacks := self.supply.longest(giver, 1):
            if SHORT * stacks[0].pairs_left() > most - handed:
                break
            handed += self._move_all(stacks[0], taker)
        return handed

    def _move_all(self, stack: Stack, taker: int) -> int:
        """Moves what is left of a stack; returns its work."""
        heads = [head for head, top in enumerate(stack.tops) if top > stack.start]
        rows = sum(stack.tops[head] - stack.start for head in heads)
        return self._move(stack, Cut(0.0, heads, stack.start, rows, rows), taker)

    def _cheapest(
        self, giver: int, surplus: float, takers: list[tuple[float, int]], room: Amounts, tile_tokens: int
    ) -> tuple[Stack, Cut, int] | None:
        """The move with the lowest price for its work: stack, cut and server."""
        stacks = self.supply.longest(giver, LONGEST_STACKS)
        level = common_level(stacks, surplus)
        strangers = takers[-STRANGERS:]
        best: tuple[Stack, Cut, int] | None = None
        price_limit = float("inf")
        offered = 0
        for stack in stacks:
            found = self._cheapest_of(stack, surplus, level, strangers, room, tile_tokens, price_limit)
            if found is not None:
                best = stack, *found
                price_limit = found[0].price_per_work
            offered += stack.pairs_left()
            if offered >= ENOUGH * surplus:
                break
        return best

    def _cheapest_of(
        self,
        stack: Stack,
        surplus: float,
        level: float,
        strangers: list[tuple[float, int]],
        room: Amounts,
        tile_tokens: int,
        price_limit: float,
    ) -> tuple[Cut, int] | None:
        """The cut of a stack with the lowest price for its work, and the rank that takes it; none if no price is below
        the limit."""
        home, prices, token_bytes, spare_room = stack.server, self._prices, self._token_bytes, self._spare_room
        source, whole_head = home, 0.0
        if stack.start:
            source = next(iter(stack.holders))  # most keys come from the document's beginning
            keys = stack.start - tokens_held(stack.holders, home, 0, stack.start)
            whole_head = keys * prices.of_keys(source, home, token_bytes)
        best: tuple[Cut, int] | None = None
        for amount, rank, columns in self._offers(stack, strangers, room):
            query, key = prices.of_queries(home, rank, token_bytes), prices.of_keys(source, rank, token_bytes)
            terms = Terms(min(surplus, amount), surplus < amount, query, key, whole_head)
            cut = cheapest_cut(columns, stack, terms, tile_tokens, level, spare_room, price_limit)
            if cut is not None:
                best, price_limit = (cut, rank), cut.price_per_work
        return best

    def _offers(self, stack: Stack, strangers: list[tuple[float, int]], room: Amounts) -> Iterator[Offer]:
        """Ranks that might take part of a stack: those with most room, and those with keys of the document."""
        prefixes = self._prefixes.get(stack.document, {})
        known = {rank: None for rank in (*prefixes, *stack.holders) if room.get(rank, 0) > self._negligible}
        columns = columns_for_stranger(stack)
        for amount, rank in strangers:
            if rank not in known:
                yield amount, rank, columns
        nothing = [0] * len(stack.tops)
        for _, rank in sorted((-room[rank], rank) for rank in known if rank != stack.server)[:RELATIVES]:
            yield room[rank], rank, columns_for_relative(stack, rank, prefixes.get(rank, nothing))

    def _move(self, stack: Stack, cut: Cut, taker: int) -> int:
        """Carries out a move; returns its work."""
        received = self._prefixes.setdefault(stack.document, {}).setdefault(taker, [0] * len(stack.tops))
        for head in cut.heads:
            received[head] = max(received[head], stack.tops[head])
        row_bytes = cut.queries * self._token_bytes.query + cut.keys * self._token_bytes.key_value
        self._prices.receive[taker] += row_bytes / len(stack.tops) / self._calm_bytes
        moved = stack.give(cut.heads, cut.position, taker)
        self.supply.work[stack.server] -= moved
        self.supply.work[taker] += moved
        return moved


def busiest_bytes(supply: Supply, surplus: Amounts, token_bytes: TokenBytes) -> float:
    """About the bytes that the rank which gives most has to send, if it may cut where it likes."""
    busiest = 1.0
    for rank, work in surplus.items():
        tops = [top for stack in supply.longest(rank, LONGEST_STACKS) for top in stack.tops if top > stack.start]
        busiest = max(busiest, _fewest_bytes(tops, work, token_bytes) / supply.head_groups)
    return busiest


def _fewest_bytes(tops: list[int], work: float, token_bytes: TokenBytes) -> float:
    """Bytes of as many heads as is cheapest, cut at one position."""
    fewest = float("inf")
    squares = total = 0
    for count, top in enumerate(sorted(tops, reverse=True), 1):
        squares += top * top
        total += top
        left = (squares - 2 * work) / count
        if left >= 0:
            level = sqrt(left)
            if level >= top:
                break
            fewest = min(fewest, (total - count * level) * token_bytes.query + total * token_bytes.key_value)
    return 0.0 if fewest == float("inf") else fewest
