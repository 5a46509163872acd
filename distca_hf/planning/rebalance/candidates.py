"""Attempts: plans of one layout, each by one strategy, with the bytes that it moves."""

from collections.abc import Sequence
from dataclasses import dataclass

from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance.byte_costs import MovedBytes, Prices, Segments
from distca_hf.planning.rebalance.donors import Documents, Supply
from distca_hf.planning.rebalance.greedy import Exports, busiest_bytes
from distca_hf.planning.rebalance.head_stacks import Stack, tasks_of
from distca_hf.planning.rebalance.strategies import Strategy
from distca_hf.planning.rebalance.work_limits import Level, work_limits
from distca_hf.topology import Topology


# Cuts fall on multiples of this many tokens, because kernels work in tiles,
TILE_TOKENS = 128
# or of fewer where a tile of the longest document would be more than this share of a rank's work.
TILE_SHARE = 0.005
# Less than this share of a rank's work is not worth a task.
NEGLIGIBLE_SHARE = 0.002


@dataclass(frozen=True, eq=False)
class Attempt:
    """What came out.

    Attributes:
        strategy, prices: how it was made.
        stacks: of all documents whose queries may have moved.
        overload: largest work of a rank above its limit, beyond what cuts of whole tiles explain.
        moved: bytes.
        busy_bytes: about the least that the rank which gives most has to send.
        steps: moves that were chosen.
    """

    strategy: Strategy
    prices: Prices
    stacks: list[Stack]
    overload: float
    moved: MovedBytes
    busy_bytes: float
    steps: int

    @property
    def moves(self) -> bool:
        """Whether any query is computed elsewhere than it is held."""
        return any(stack.moves or stack.own_stop < stack.stop for stack in self.stacks)


class Attempts:
    """Everything that attempts for one layout have in common. Arguments: see `plan_by_moving`."""

    def __init__(
        self,
        layout: Layout,
        head_groups: int,
        topology: Topology | None,
        token_bytes: TokenBytes,
        capacities: Sequence[float] | None,
    ) -> None:
        self._layout = layout
        self._head_groups = head_groups
        self._topology = topology or Topology(layout.num_ranks, layout.num_ranks)
        self._token_bytes = token_bytes
        self._capacities = capacities
        self._documents = Documents(layout)
        self._segments = Segments.of(layout)
        self._home_work = layout.rank_work
        self._total_work = int(self._home_work.sum()) * head_groups
        mean_work = self._total_work / layout.num_ranks
        self._tile_tokens = TILE_TOKENS
        while self._tile_tokens > 1 and self._tile_tokens * layout.longest_document_tokens > TILE_SHARE * mean_work:
            self._tile_tokens //= 2
        self._negligible = NEGLIGIBLE_SHARE * mean_work
        self._made: dict[tuple[object, ...], Attempt] = {}
        self._slack = self._negligible + self._tile_tokens * layout.longest_document_tokens

    @property
    def may_stay(self) -> bool:
        """Whether every rank that holds tokens may compute."""
        limits = self._limits(tolerance=0.0)
        return all(limit > 0 or work == 0 for work, limit in zip(self._home_work.tolist(), limits, strict=True))

    @property
    def most_tolerance(self) -> float:
        """With more than this no rank has to give anything, unless it must not compute at all."""
        limits = self._limits(tolerance=0.0)
        home = (self._home_work * self._head_groups).tolist()
        return max((work / limit for work, limit in zip(home, limits, strict=True) if limit > 0), default=0.0)

    def stay(self, tolerance: float) -> Attempt:
        """Every query is computed where it is held."""
        prices = Prices.opening([False] * self._layout.num_ranks, 1.0)
        strategy = Strategy(merge_below=0)
        supply, limits = self._supply(prices, strategy), self._limits(tolerance)
        return self._attempt(strategy, prices, supply, limits, busy_bytes=0.0, steps=0)

    def move(self, strategy: Strategy, tolerance: float) -> Attempt:
        """Ranks give what they have above their limit. Strategies that merge the same slivers and differ in nothing
        else are one attempt."""
        limits = self._limits(tolerance)
        home = (self._home_work * self._head_groups).tolist()
        gives = [work > limit for work, limit in zip(home, limits, strict=True)]
        prices = Prices.opening(gives, strategy.quiet_price)
        supply = self._supply(prices, strategy)
        merges = tuple((stack.document, stack.start, *stack.tops) for stack in supply.spanning)
        key = (tolerance, strategy.quiet_price, strategy.spare_room, merges)
        if key not in self._made:
            self._made[key] = self._level(strategy, prices, supply, limits, node_aware=False)
        return self._made[key]

    def move_again(self, last: Attempt, strategy: Strategy, tolerance: float) -> Attempt:
        """The same by prices that follow from the last attempt's bytes."""
        prices = last.prices.follow(last.moved.sent.tolist(), last.moved.received.tolist())
        supply = self._supply(prices, strategy)
        return self._level(strategy, prices, supply, self._limits(tolerance), node_aware=False)

    def move_by_nodes(self, like: Attempt, strategy: Strategy, tolerance: float) -> Attempt:
        """First nodes give to nodes, then ranks to ranks of their node, then whoever is left."""
        supply = self._supply(like.prices, strategy)
        return self._level(strategy, like.prices, supply, self._limits(tolerance), node_aware=True)

    def plan(self, attempt: Attempt) -> Plan:
        """What an attempt comes to."""
        return Plan(self._layout, tasks_of(self._layout, attempt.stacks, self._head_groups))

    def _limits(self, tolerance: float) -> list[float]:
        return work_limits(self._total_work, self._layout.num_ranks, self._capacities, tolerance)

    def _supply(self, prices: Prices, strategy: Strategy) -> Supply:
        return Supply(self._documents, self._home_work, self._head_groups, self._token_bytes, prices, strategy)

    def _attempt(
        self, strategy: Strategy, prices: Prices, supply: Supply, limits: list[float], busy_bytes: float, steps: int
    ) -> Attempt:
        """What was done to the supply."""
        moved = MovedBytes.count(
            self._segments, supply.stacks, self._head_groups, self._token_bytes, self._topology.node_of
        )
        return Attempt(strategy, prices, supply.stacks, self._overload(supply.work, limits), moved, busy_bytes, steps)

    def _overload(self, work: list[int], limits: list[float]) -> float:
        """Work of the rank that is furthest above its limit; ranks of no capacity have none to be above of."""
        above = [done - limit - (self._slack if limit else 0.0) for done, limit in zip(work, limits, strict=True)]
        return max(0.0, *above)

    def _level(
        self, strategy: Strategy, prices: Prices, supply: Supply, limits: list[float], node_aware: bool
    ) -> Attempt:
        """Moves work of a supply until all ranks are within their limits."""
        level = Level.of(supply.work, limits)
        busy_bytes = busiest_bytes(supply, level.surplus, self._token_bytes)
        exports = Exports(
            supply,
            prices,
            self._token_bytes,
            self._tile_tokens,
            self._negligible,
            busy_bytes,
            strategy.spare_room,
        )
        if node_aware:
            across = level.between_nodes(self._topology)
            exports.level(across.surplus, across.room)
            for inside in Level.of(supply.work, limits).within_nodes(self._topology):
                exports.level(inside.surplus, inside.room)
            level = Level.of(supply.work, limits)
        exports.level(level.surplus, level.room)
        for rank, limit in enumerate(limits):
            if limit == 0 and supply.work[rank]:
                room = {other: most - supply.work[other] for other, most in enumerate(limits) if most}
                exports.evict(rank, room)
        return self._attempt(strategy, prices, supply, limits, busy_bytes, exports.steps)
