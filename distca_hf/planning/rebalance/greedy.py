"""Greedy moves: the rank with the largest surplus of work makes its cheapest move, until no rank has a surplus.

A surplus is work above a rank's limit, the most that it may compute. Room is work below the limit.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distca_hf.cost import Mask, TokenBytes
from distca_hf.errors import ConfigError
from distca_hf.layout import Topology
from distca_hf.planning.rebalance.donors import Donors, Prices
from distca_hf.planning.rebalance.head_stacks import (
    Column,
    Cut,
    Stack,
    Terms,
    cheapest_cut,
    columns_with_keys,
    columns_without_keys,
    common_cut_of,
    tokens_held,
)


Amounts = dict[int, float]  # rank -> work
# Received bytes that raise a rank's price of receiving by 1.0, as a multiple of the bytes that the busiest rank sends.
# A tie-breaker: it spreads the leftovers of many ranks over several ranks.
RECEIVED_PER_PRICE = 6.0
# Maximum number of stacks to choose from in one step, longest first: more rarely change the choice, and cost time.
LONGEST_STACKS = 3
# Work of these stacks, as a multiple of the surplus, beyond which shorter ones are left out.
ENOUGH = 1.6
# Maximum number of ranks to choose from in one step: ranks with most room,
RANKS_WITH_ROOM = 8
# and ranks that hold or received keys of the document. More rarely change the choice, and cost time.
RANKS_WITH_KEYS = 6
# Minimum ratio of the work still to move to a whole document's work. Above it the document moves to the rank of the
# last move without a search, because its bytes hardly count.
SHORT = 10


Offer = tuple[float, int, list[Column]]  # room, rank, columns of the stack for this rank


def work_limits(total_work: int, num_ranks: int, speeds: Sequence[float] | None, tolerance: float) -> list[float]:
    """Returns `[ranks]` most work of each rank: its share of all work by speed, plus the tolerance.

    Every rank has the same tolerance, to bound the largest. With a tolerance only for receiving ranks, the giving rank
    would keep the work that all of them lack.

    Raises:
        ConfigError: speeds are not one per rank, negative, all 0, or too large to sum.
    """
    speeds = [1.0] * num_ranks if speeds is None else [float(speed) for speed in speeds]
    if len(speeds) != num_ranks:
        raise ConfigError(f"speeds has {len(speeds)} numbers for {num_ranks} ranks; give one for each rank")
    wrong = [rank for rank, speed in enumerate(speeds) if not 0 <= speed < float("inf")]
    if wrong:
        raise ConfigError(f"the speed of rank {wrong[0]} is {speeds[wrong[0]]}; it must be a number of at least 0")
    total_speed = sum(speeds)
    if total_speed == 0:
        raise ConfigError(f"the speeds of all {num_ranks} ranks are 0; one of them must compute")
    if total_speed == float("inf"):
        raise ConfigError(
            f"the speeds of {num_ranks} ranks add up to {total_speed}; only their ratios count, so divide them all"
        )
    share = (1 + tolerance) * total_work / total_speed
    return [share * speed for speed in speeds]


@dataclass(frozen=True, slots=True)
class WorkGaps:
    """Gaps between work and limits: `surplus` that ranks must give, `room` that others may take."""

    surplus: Amounts
    room: Amounts

    @classmethod
    def of(cls, work: list[int], limits: list[float]) -> "WorkGaps":
        """Compares every rank with its own limit."""
        amounts = list(enumerate(zip(work, limits, strict=True)))
        return cls(
            {rank: done - limit for rank, (done, limit) in amounts if done > limit},
            {rank: limit - done for rank, (done, limit) in amounts if done < limit},
        )

    def between_nodes(self, topology: Topology) -> "WorkGaps":
        """Returns the gaps of whole nodes, spread over their ranks with the largest gaps first."""
        surplus, room = _per_node(self.surplus, topology), _per_node(self.room, topology)
        gives: Amounts = {}
        takes: Amounts = {}
        for node in range(topology.num_nodes):
            too_much, too_little = sum(surplus[node].values()), sum(room[node].values())
            _spread(too_much - too_little, surplus[node], gives)
            _spread(too_little - too_much, room[node], takes)
        return WorkGaps(gives, takes)

    def within_nodes(self, topology: Topology) -> list["WorkGaps"]:
        """Returns the gaps of each node's ranks, to balance inside the node."""
        surplus, room = _per_node(self.surplus, topology), _per_node(self.room, topology)
        return [WorkGaps(surplus[node], room[node]) for node in range(topology.num_nodes)]


def _per_node(amounts: Amounts, topology: Topology) -> list[Amounts]:
    nodes: list[Amounts] = [{} for _ in range(topology.num_nodes)]
    for rank in sorted(amounts):
        nodes[topology.node_of[rank]][rank] = amounts[rank]
    return nodes


def _spread(total: float, amounts: Amounts, taken: Amounts) -> None:
    """Takes `total` from the largest amounts, and adds the parts to `taken`."""
    for rank in sorted(amounts, key=lambda rank: (-amounts[rank], rank)):
        if total <= 0:
            return
        taken[rank] = min(total, amounts[rank])
        total -= taken[rank]


class GreedyMoves:
    """A plan in the making: the queries that moved so far, and the keys that ranks have received.

    Args:
        tile_tokens: cuts are multiples of this if possible, otherwise of 1.
        negligible_work: surplus and room up to this are ignored.
        busy_bytes: estimate of the bytes that the busiest rank sends.
        spare_room: see `Strategy`.
    """

    def __init__(
        self,
        donors: Donors,
        prices: Prices,
        token_bytes: TokenBytes,
        tile_tokens: int,
        negligible_work: float,
        busy_bytes: float,
        spare_room: bool,
    ) -> None:
        self.donors = donors
        self.steps = 0
        self._prices = Prices([*prices.send], [*prices.receive])
        self._token_bytes = token_bytes
        self._tile_tokens = tile_tokens
        self._negligible = negligible_work
        self._bytes_per_price = RECEIVED_PER_PRICE * busy_bytes
        self._spare_room = spare_room
        self._prefixes: dict[int, dict[int, list[int]]] = {}
        for stack in donors.spanning:
            keys = [top if top > stack.start else 0 for top in stack.tops]
            self._prefixes.setdefault(stack.document, {})[stack.rank] = keys

    def balance(self, surplus: Amounts, room: Amounts) -> None:
        """Moves work until no rank has surplus to give, or no rank has room to take it."""
        # Givers are a heap, largest surplus first; takers are sorted, most room last. One move changes one of each.
        givers = [(-amount, rank) for rank, amount in surplus.items() if amount > self._negligible]
        takers = sorted((amount, rank) for rank, amount in room.items() if amount > self._negligible)
        heapq.heapify(givers)
        while givers and takers:
            amount, giver = heapq.heappop(givers)
            found = self._cheapest(giver, -amount, takers, room, self._tile_tokens)
            found = found or self._cheapest(giver, -amount, takers, room, 1)
            if found is None:  # it holds nothing that fits any room: it keeps its surplus
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
        """Moves everything left on a rank to the rank with most room."""
        while stacks := self.donors.longest(rank, LONGEST_STACKS):
            for stack in stacks:
                taker = max(room, key=lambda other: (room[other], -other))
                room[taker] -= self._move_all(stack, taker)

    def _hand_over(self, giver: int, taker: int, most: float) -> int:
        """Moves a rank's next documents to the same rank while they are short compared with the work to move; returns
        their work."""
        handed = 0
        while stacks := self.donors.longest(giver, 1):
            if SHORT * stacks[0].pairs_left() > most - handed:
                break
            handed += self._move_all(stacks[0], taker)
        return handed

    def _move_all(self, stack: Stack, taker: int) -> int:
        """Moves all remaining queries of a stack; returns their work."""
        heads = [head for head, top in enumerate(stack.tops) if top > stack.start]
        rows = sum(stack.tops[head] - stack.start for head in heads)
        return self._move(stack, Cut(0.0, heads, stack.start, rows, rows), taker)

    def _cheapest(
        self, giver: int, surplus: float, takers: list[tuple[float, int]], room: Amounts, tile_tokens: int
    ) -> tuple[Stack, Cut, int] | None:
        """Finds the move with the lowest price for its work: stack, cut and taker."""
        stacks = self.donors.longest(giver, LONGEST_STACKS)
        common_cut = common_cut_of(stacks, surplus, self.donors.mask)
        with_room = takers[-RANKS_WITH_ROOM:]
        prices, token_bytes, spare_room = self._prices, self._token_bytes, self._spare_room
        best: tuple[Stack, Cut, int] | None = None
        price_limit = float("inf")
        offered = 0
        for stack in stacks:
            source, whole_head = giver, 0.0
            if stack.start:
                source = next(iter(stack.holders))  # most keys come from the document's beginning
                keys = stack.start - tokens_held(stack.holders.get(giver, []), 0, stack.start)
                whole_head = keys * prices.of_keys(source, giver, token_bytes)
            before: tuple[Terms, list[Column]] | None = None
            for amount, rank, columns in self._offers(stack, with_room, room):
                query, key = prices.of_queries(giver, rank, token_bytes), prices.of_keys(source, rank, token_bytes)
                terms = Terms(min(surplus, amount), surplus < amount, query, key, whole_head)
                if (terms, columns) == before:  # the same cut for the same price
                    continue
                before = terms, columns
                cut = cheapest_cut(columns, stack, terms, tile_tokens, common_cut, spare_room, price_limit)
                if cut is not None:
                    best, price_limit = (stack, cut, rank), cut.price_per_work
            offered += stack.pairs_left()
            if offered >= ENOUGH * surplus:
                break
        return best

    def _offers(self, stack: Stack, with_room: list[tuple[float, int]], room: Amounts) -> Iterator[Offer]:
        """Yields takers for part of a stack: ranks with most room, and ranks with keys of the document."""
        prefixes = self._prefixes.get(stack.document, {})
        known = {rank: None for rank in (*prefixes, *stack.holders) if room.get(rank, 0) > self._negligible}
        columns = columns_without_keys(stack)
        for amount, rank in with_room:
            if rank not in known:
                yield amount, rank, columns
        nothing = [0] * len(stack.tops)
        for _, rank in sorted((-room[rank], rank) for rank in known if rank != stack.rank)[:RANKS_WITH_KEYS]:
            yield room[rank], rank, columns_with_keys(stack, rank, prefixes.get(rank, nothing))

    def _move(self, stack: Stack, cut: Cut, taker: int) -> int:
        """Carries out a move; returns its work."""
        received = self._prefixes.setdefault(stack.document, {}).setdefault(taker, [0] * len(stack.tops))
        for head in cut.heads:
            received[head] = max(received[head], stack.tops[head])
        row_bytes = cut.queries * self._token_bytes.query + cut.keys * self._token_bytes.key_value
        self._prices.receive[taker] += row_bytes / len(stack.tops) / self._bytes_per_price
        moved = stack.give(cut.heads, cut.position, taker)
        self.donors.work[stack.rank] -= moved
        self.donors.work[taker] += moved
        return moved


def busiest_bytes(donors: Donors, surplus: Amounts, token_bytes: TokenBytes) -> float:
    """Estimates the bytes that the busiest rank must send, if it may cut its longest stacks anywhere."""
    busiest = 1.0
    for rank, work in surplus.items():
        tops = [top for stack in donors.longest(rank, LONGEST_STACKS) for top in stack.tops if top > stack.start]
        busiest = max(busiest, _fewest_bytes(tops, work, token_bytes, donors.mask) / donors.head_groups)
    return busiest


def _fewest_bytes(tops: list[int], work: float, token_bytes: TokenBytes, mask: Mask) -> float:
    """Returns the fewest bytes that move this work, over all numbers of heads cut at one position."""
    fewest = float("inf")
    area, total = 0.0, 0
    for count, top in enumerate(sorted(tops, reverse=True), 1):
        area += mask.area(top)
        total += top
        left = (area - work) / count
        if left >= 0:
            position = mask.position(left)
            if position >= top:
                break
            fewest = min(fewest, (total - count * position) * token_bytes.query + total * token_bytes.key_value)
    return 0.0 if fewest == float("inf") else fewest
