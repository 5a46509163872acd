"""Rebalancing: a plan for a layout that stays as it is, for models whose documents stay whole, or with extra ranks.

Tokens stay where they are. Ranks with more than their share of the work give queries to others. They give the latest
queries of some heads of their longest documents: these have most work for the same bytes. `head_stacks` finds the
heads and the position of one move, `greedy` makes one move after another. A greedy pass is fast but cannot look ahead.
So several strategies make candidates. Their bytes are counted exactly, and the best one is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import TILE_TOKENS, Layout, Topology
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance.donors import (
    STRATEGIES,
    DocumentsByRank,
    Donors,
    MovedBytes,
    Prices,
    Segments,
    Strategy,
)
from distca_hf.planning.rebalance.greedy import GreedyMoves, WorkGaps, busiest_bytes, work_limits
from distca_hf.planning.rebalance.head_stacks import Stack, tasks_of


# Maximum work of a rank above its share, as a fraction of the share. The last two percent cost bytes and no longer
# show in the time of a step.
TOLERANCE = 0.023
# Number of stacks in a candidate from which on no other is tried: its documents are short, and strategies differ only
# in long documents.
MANY_DOCUMENTS = 4096
# Maximum number of greedy steps of all candidates together, per rank: this bounds the time of planning.
STEPS_PER_RANK = 8
# Ratio of the largest rank's bytes to their estimated minimum up to which no other candidate is tried.
GOOD_ENOUGH = 1.02
# Number of ranks up to which all candidates are tried, whatever their ratio: they take a few milliseconds.
SMALL_WORLD = 16
# Maximum ratio of the largest rank's bytes of a node-aware candidate to the best candidate's.
NEARLY_AS_GOOD = 1.05
# Factor between the tolerances to try if bytes are limited; they end at the one that moves nothing.
TOLERANCE_GROWS = 2
# Halvings between the last tolerance that did not fit and the first that did: the result is within 1/64 of their gap.
HALVINGS = 6
# Number of strategies to try for each of these tolerances: time is short, and later ones gain little.
STRATEGIES_IN_NEED = 2
# Maximum work of one tile of the longest document, as a fraction of the mean work of the ranks. Cuts on coarser tiles
# would leave ranks unequal by more. Tiles are halved from `TILE_TOKENS` until they are below it.
TILE_SHARE = 0.005
# Minimum work of a task that moves, as a fraction of the mean work of the ranks: a smaller one costs a kernel call.
NEGLIGIBLE_SHARE = 0.002


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan, as stacks, and the numbers by which it is compared. Stacks and bytes are made when first read.

    Attributes:
        strategy, prices: used to make it.
        overload: largest work of a rank above its limit and above the error that cuts on whole tiles allow.
        busy_bytes: estimate of the fewest bytes that the rank with the largest surplus must send.
        steps: number of moves.
        make_stacks: makes `stacks`.
        count_bytes: counts `moved` from them.
    """

    strategy: Strategy
    prices: Prices
    overload: float
    busy_bytes: float
    steps: int
    make_stacks: Callable[[], list[Stack]]
    count_bytes: Callable[[list[Stack]], MovedBytes]

    @cached_property
    def stacks(self) -> list[Stack]:
        """Stacks of all documents whose queries may have moved."""
        return self.make_stacks()

    @cached_property
    def moved(self) -> MovedBytes:
        """Bytes that each rank sends and receives."""
        return self.count_bytes(self.stacks)


class Candidates:
    """Makes candidates for one layout. Arguments: see `plan_by_moving`."""

    def __init__(
        self,
        layout: Layout,
        head_groups: int,
        topology: Topology | None,
        token_bytes: TokenBytes,
        speeds: Sequence[float] | None,
        mask: Mask = CAUSAL_MASK,
    ) -> None:
        self._layout = layout
        self._head_groups = head_groups
        self._topology = topology or Topology(layout.num_ranks, layout.num_ranks)
        self._token_bytes = token_bytes
        self._speeds = speeds
        self._mask = mask
        self._held_work = layout.rank_work_of(mask)
        self._documents = DocumentsByRank(layout, self._held_work, mask)
        self._segments = Segments.of(layout)
        self._total_work = int(self._held_work.sum()) * head_groups
        mean_work = self._total_work / layout.num_ranks
        longest_tokens = layout.longest_document_tokens
        most_keys = mask.pairs(longest_tokens - 1, longest_tokens) if longest_tokens else 0  # of any query
        self._tile_tokens = TILE_TOKENS
        while self._tile_tokens > 1 and self._tile_tokens * most_keys > TILE_SHARE * mean_work:
            self._tile_tokens //= 2
        self._negligible = NEGLIGIBLE_SHARE * mean_work
        self._made: dict[tuple[object, ...], Candidate] = {}
        self._slack = self._negligible + self._tile_tokens * most_keys

    @property
    def may_stay(self) -> bool:
        """Whether all ranks that hold tokens may compute."""
        limits = self._limits(tolerance=0.0)
        return all(limit > 0 or work == 0 for work, limit in zip(self._held_work.tolist(), limits, strict=True))

    @property
    def most_tolerance(self) -> float:
        """Largest ratio of a rank's work to its share: above this tolerance no rank has a surplus."""
        limits = self._limits(tolerance=0.0)
        held = (self._held_work * self._head_groups).tolist()
        return max((work / limit for work, limit in zip(held, limits, strict=True) if limit > 0), default=0.0)

    def stay(self, tolerance: float) -> Candidate:
        """Makes the candidate in which every query is computed on its owner rank."""
        prices = Prices.opening([False] * self._layout.num_ranks, 1.0)
        strategy = Strategy(merge_below=0)
        overload = self._overload((self._held_work * self._head_groups).tolist(), self._limits(tolerance))
        return Candidate(
            strategy,
            prices,
            overload,
            busy_bytes=0.0,
            steps=0,
            make_stacks=lambda: self._donors(prices, strategy).spanning,
            count_bytes=self._count_bytes,
        )

    def move(self, strategy: Strategy, tolerance: float) -> Candidate:
        """Makes the candidate in which ranks give their surplus over their limit. Strategies that merge the same tails
        and are otherwise equal share one."""
        limits = self._limits(tolerance)
        held = (self._held_work * self._head_groups).tolist()
        gives = [work > limit for work, limit in zip(held, limits, strict=True)]
        prices = Prices.opening(gives, strategy.quiet_price)
        donors = self._donors(prices, strategy)
        merges = tuple((stack.document, stack.start, *stack.tops) for stack in donors.spanning)
        key = (tolerance, strategy.quiet_price, strategy.spare_room, merges)
        if key not in self._made:
            self._made[key] = self._balanced(strategy, prices, donors, limits, node_aware=False)
        return self._made[key]

    def move_again(self, last: Candidate, tolerance: float) -> Candidate:
        """Makes a candidate with prices that follow from the last candidate's bytes."""
        prices = last.prices.follow(last.moved.sent.tolist(), last.moved.received.tolist())
        donors = self._donors(prices, last.strategy)
        return self._balanced(last.strategy, prices, donors, self._limits(tolerance), node_aware=False)

    def move_by_nodes(self, like: Candidate, tolerance: float) -> Candidate:
        """Makes a candidate in three passes: nodes give to nodes, ranks inside each node, then all ranks."""
        donors = self._donors(like.prices, like.strategy)
        return self._balanced(like.strategy, like.prices, donors, self._limits(tolerance), node_aware=True)

    def plan(self, candidate: Candidate) -> Plan:
        """Turns a candidate into a plan."""
        return Plan(self._layout, tasks_of(self._layout, candidate.stacks, self._head_groups, self._mask))

    def _limits(self, tolerance: float) -> list[float]:
        return work_limits(self._total_work, self._layout.num_ranks, self._speeds, tolerance)

    def _donors(self, prices: Prices, strategy: Strategy) -> Donors:
        return Donors(self._documents, self._head_groups, self._token_bytes, prices, strategy, self._mask)

    def _count_bytes(self, stacks: list[Stack]) -> MovedBytes:
        return MovedBytes.count(self._segments, stacks, self._head_groups, self._token_bytes, self._topology.node_of)

    def _overload(self, work: list[int], limits: list[float]) -> float:
        """Returns the largest work above a limit, less the slack of tiles; ranks of speed 0 have no slack."""
        above = [done - limit - (self._slack if limit else 0.0) for done, limit in zip(work, limits, strict=True)]
        return max(0.0, *above)

    def _balanced(
        self, strategy: Strategy, prices: Prices, donors: Donors, limits: list[float], node_aware: bool
    ) -> Candidate:
        """Moves work until all ranks are within their limits."""
        # 1. Largest surplus first; with `node_aware` between nodes, then inside each.
        gaps = WorkGaps.of(donors.work, limits)
        busy_bytes = busiest_bytes(donors, gaps.surplus, self._token_bytes)
        moves = GreedyMoves(
            donors,
            prices,
            self._token_bytes,
            self._tile_tokens,
            self._negligible,
            busy_bytes,
            strategy.spare_room,
        )
        if node_aware:
            across = gaps.between_nodes(self._topology)
            moves.balance(across.surplus, across.room)
            for inside in WorkGaps.of(donors.work, limits).within_nodes(self._topology):
                moves.balance(inside.surplus, inside.room)
            gaps = WorkGaps.of(donors.work, limits)
        moves.balance(gaps.surplus, gaps.room)

        # 2. Ranks of speed 0 give everything that is left.
        for rank, limit in enumerate(limits):
            if limit == 0 and donors.work[rank]:
                room = {other: most - donors.work[other] for other, most in enumerate(limits) if most}
                moves.evict(rank, room)
        return Candidate(
            strategy,
            prices,
            self._overload(donors.work, limits),
            busy_bytes,
            moves.steps,
            make_stacks=lambda: donors.spanning + donors.opened,
            count_bytes=self._count_bytes,
        )


def plan_by_moving(
    layout: Layout,
    head_groups: int = 1,
    *,
    topology: Topology | None = None,
    token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    speeds: Sequence[float] | None = None,
    bytes_limit: int | None = None,
    mask: Mask = CAUSAL_MASK,
    tolerance: float = TOLERANCE,
) -> Plan:
    """Plans a layout: no rank computes more than its share plus the tolerance and a tile of the longest document.

    Among these plans it seeks the one whose largest rank sends or receives fewest bytes.

    Args:
        layout: ranks, and the tokens that each of them holds.
        head_groups: groups into which heads may be divided; 1 keeps heads together.
        topology: ranks that share a node. Among nearly equal candidates, the one with fewest bytes between nodes is
            chosen.
        token_bytes: bytes of one token in one layer.
        speeds: `[ranks]` relative speeds; a rank of speed 0 computes nothing. By default all are equal.
        bytes_limit: most bytes that a rank may send, and most that it may receive, in one layer forward. Under a tight
            limit, work is balanced as well as it permits.
        mask: keys to which queries attend.
        tolerance: most work of a rank above its share, as a fraction of the share.

    Raises:
        ConfigError: head groups below 1, speeds below 0 or all 0, a topology of other ranks.
        PlanError: no plan meets the limit.
    """
    if head_groups < 1:
        raise ConfigError(f"head_groups={head_groups} must be at least 1")
    if topology is not None and topology.num_ranks != layout.num_ranks:
        raise ConfigError(f"the topology has {topology.num_ranks} ranks, the layout {layout.num_ranks}")
    candidates = Candidates(layout, head_groups, topology, token_bytes, speeds, mask)
    best = _best(candidates, layout.num_ranks, topology, tolerance)
    if bytes_limit is not None and best.moved.largest_rank > bytes_limit:
        best = _within(candidates, bytes_limit, best, tolerance)
    moves = any(stack.moves or stack.own_stop < stack.stop for stack in best.stacks)
    return candidates.plan(best) if moves else plan_in_place(layout, mask=mask)


def _best(candidates: Candidates, num_ranks: int, topology: Topology | None, tolerance: float) -> Candidate:
    """Returns the best candidate within the effort for this number of ranks."""
    best = candidates.stay(tolerance)
    if best.overload == 0 and best.moved.largest_rank == 0:
        return best
    # A candidate takes 0.4 ms at 4 ranks, 12 at 64 and 120 at 512.
    strategies = STRATEGIES[: 6 if num_ranks <= 4 else 3 if num_ranks <= SMALL_WORLD else 2]
    good_enough, most_steps, steps = 0.0 if num_ranks <= SMALL_WORLD else GOOD_ENOUGH, STEPS_PER_RANK * num_ranks, 0
    for strategy in strategies:
        tried = candidates.move(strategy, tolerance)
        best, steps = _better(best, tried), steps + tried.steps
        if steps > most_steps or len(best.stacks) > MANY_DOCUMENTS:
            break
        if best.overload == 0 and best.moved.largest_rank <= good_enough * best.busy_bytes:
            break
    else:  # again, with prices that follow from the bytes of the best
        best = _better(best, candidates.move_again(best, tolerance))
    if topology is None or topology.num_nodes == 1:
        return best
    # Prefer a node-aware candidate if it is nearly as good for the largest rank and moves less between nodes.
    aware = candidates.move_by_nodes(best, tolerance)
    if aware.overload > best.overload or aware.moved.largest_rank > NEARLY_AS_GOOD * best.moved.largest_rank:
        return best
    return min(best, aware, key=lambda candidate: candidate.moved.largest_between_nodes)


def _better(one: Candidate, other: Candidate) -> Candidate:
    """Returns the candidate with the smaller overload. If equal, bytes decide: the largest rank's, then all."""
    if one.overload != other.overload:
        return min(one, other, key=lambda candidate: candidate.overload)
    return min(one, other, key=lambda candidate: (candidate.moved.largest_rank, int(candidate.moved.sent.sum())))


def _within(candidates: Candidates, bytes_limit: int, least: Candidate, tolerance: float) -> Candidate:
    """Finds the candidate with the smallest tolerance, above this one, whose bytes stay within the limit."""

    def candidate(tolerance: float) -> Candidate:
        found = [candidates.move(strategy, tolerance) for strategy in STRATEGIES[:STRATEGIES_IN_NEED]]
        return min(found, key=lambda one: one.moved.largest_rank)

    # 1. Growing tolerances, until the bytes of one fit.
    too_tight = tolerance
    fits: Candidate | None = None
    stays = candidates.stay(tolerance)
    while fits is None:
        too_tight, tolerance = tolerance, tolerance * TOLERANCE_GROWS
        found = candidate(tolerance)
        least = min(least, found, key=lambda one: one.moved.largest_rank)
        if found.moved.largest_rank <= bytes_limit:
            fits = found
        elif tolerance > candidates.most_tolerance:
            break
    if fits is None:
        if candidates.may_stay:
            least = min(least, stays, key=lambda one: one.moved.largest_rank)
            if stays.moved.largest_rank <= bytes_limit:
                return stays
        sends = int(least.moved.sent.max()) >= int(least.moved.received.max())
        rank = int((least.moved.sent if sends else least.moved.received).argmax())
        raise PlanError(
            f"rank {rank} has to {'send' if sends else 'receive'} {least.moved.largest_rank} bytes per layer, but "
            f"bytes_limit={bytes_limit}; no plan for these packs was found that moves less. Set bytes_limit to at "
            f"least {least.moved.largest_rank}, or pack documents so that fewer of them span ranks"
        )

    # 2. Bisection between it and the one before.
    for _ in range(HALVINGS):
        middle = (too_tight + tolerance) / 2
        found = candidate(middle)
        if found.moved.largest_rank <= bytes_limit:
            fits, tolerance = found, middle
        else:
            too_tight = middle
    return fits
