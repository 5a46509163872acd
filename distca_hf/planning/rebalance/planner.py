"""Rebalancing: a plan for a layout that must stay as it is, because its batches were packed before.

Tokens stay where they are. Ranks with more than their share of the work give queries to others: the latest of some
heads of their longest documents (`head_stacks`), which have most work for the same bytes. `cuts` finds the heads and
the position of one move, `greedy` makes one move after another. A greedy pass is fast and cannot look ahead. So
several candidates are made, by different `strategies`. Their bytes are counted exactly, and the best is kept.
"""

from collections.abc import Sequence

from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance.candidates import Candidate, Candidates
from distca_hf.planning.rebalance.strategies import MANY_DOCUMENTS, STRATEGIES, Effort
from distca_hf.topology import Topology


# Maximum work of a rank above its share, as a fraction of the share. The last two percent cost bytes and no longer
# show in the time of a step.
TOLERANCE = 0.023
# Maximum ratio of the largest rank's bytes of a node-aware candidate to those of the best candidate.
NEARLY_AS_GOOD = 1.05
# Factor between tolerances that are tried where bytes are limited; it ends at the one that moves nothing.
TOLERANCE_GROWS = 2
# Halvings between the last tolerance that did not fit and the first that did: the result is within 1/64 of their gap.
HALVINGS = 6
# Number of strategies that are tried for each of these tolerances: time is short, and later ones win little.
STRATEGIES_IN_NEED = 2


def plan_by_moving(
    layout: Layout,
    head_groups: int = 1,
    *,
    topology: Topology | None = None,
    token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    capacities: Sequence[float] | None = None,
    bytes_limit: int | None = None,
    mask: Mask = CAUSAL_MASK,
) -> Plan:
    """Plans a layout so that no rank computes more than 1.025 times its share, plus a tile of the longest document.

    Among such plans it seeks the one whose largest rank sends or receives fewest bytes.

    Args:
        layout: ranks, and the tokens that each of them holds.
        head_groups: groups that heads may be divided into; 1 keeps heads together.
        topology: ranks that share a node. Of candidates that are nearly as good, the one with fewest bytes between
            nodes is taken.
        token_bytes: bytes of one token in one layer.
        capacities: `[ranks]` relative speeds; a rank of capacity 0 computes nothing.
        bytes_limit: most bytes that a rank may send, and most that it may receive, in one layer forward. Under a tight
            limit, work is balanced as well as it permits.
        mask: keys that queries attend.

    Raises:
        ConfigError: head groups below 1, capacities that are no speeds, a topology of other ranks.
        PlanError: no plan meets the limit.
    """
    if head_groups < 1:
        raise ConfigError(f"head_groups={head_groups} must be at least 1")
    if topology is not None and topology.num_ranks != layout.num_ranks:
        raise ConfigError(f"the topology has {topology.num_ranks} ranks, the layout {layout.num_ranks}")
    candidates = Candidates(layout, head_groups, topology, token_bytes, capacities, mask)
    best = _best(candidates, layout.num_ranks, topology, TOLERANCE)
    if bytes_limit is not None and best.moved.largest_rank > bytes_limit:
        best = _within(candidates, bytes_limit, best)
    return candidates.plan(best) if best.moves else plan_in_place(layout, mask=mask)


def _best(candidates: Candidates, num_ranks: int, topology: Topology | None, tolerance: float) -> Candidate:
    """Returns the best candidate within the effort for this number of ranks."""
    best = candidates.stay(tolerance)
    if best.overload == 0 and best.moved.largest_rank == 0:
        return best
    effort = Effort.for_ranks(num_ranks)
    steps = 0
    for strategy in STRATEGIES[: effort.strategies]:
        tried = candidates.move(strategy, tolerance)
        best, steps = _better(best, tried), steps + tried.steps
        if _suffices(best, effort) or steps > effort.steps:
            break
    last = best
    for _ in range(effort.rounds):
        if _suffices(best, effort) or steps > effort.steps:
            break
        last = candidates.move_again(last, best.strategy, tolerance)
        best, steps = _better(best, last), steps + last.steps
    if topology is None or topology.num_nodes == 1:
        return best
    return _for_nodes(candidates, best, tolerance)


def _for_nodes(candidates: Candidates, best: Candidate, tolerance: float) -> Candidate:
    """Prefers a node-aware candidate that is nearly as good for the largest rank and moves less between nodes."""
    allowed = NEARLY_AS_GOOD * best.moved.largest_rank
    aware = candidates.move_by_nodes(best, best.strategy, tolerance)
    if aware.overload > best.overload or aware.moved.largest_rank > allowed:
        return best
    return min(best, aware, key=lambda candidate: candidate.moved.largest_between_nodes)


def _better(one: Candidate, other: Candidate) -> Candidate:
    """Returns the candidate with the smaller overload. Of equal ones bytes decide: the largest rank's, then all."""
    if one.overload != other.overload:
        return min(one, other, key=lambda candidate: candidate.overload)
    return min(one, other, key=lambda candidate: (candidate.moved.largest_rank, int(candidate.moved.sent.sum())))


def _suffices(candidate: Candidate, effort: Effort) -> bool:
    """Checks whether further candidates would win next to nothing, or would take too long."""
    if len(candidate.stacks) > MANY_DOCUMENTS:
        return True
    return candidate.overload == 0 and candidate.moved.largest_rank <= effort.good_enough * candidate.busy_bytes


def _within(candidates: Candidates, bytes_limit: int, least: Candidate) -> Candidate:
    """Finds the candidate with the smallest tolerance whose bytes stay within the limit.

    Raises:
        PlanError: no tolerance has one.
    """

    def candidate(tolerance: float) -> Candidate:
        found = [candidates.move(strategy, tolerance) for strategy in STRATEGIES[:STRATEGIES_IN_NEED]]
        return min(found, key=lambda one: one.moved.largest_rank)

    # 1. Growing tolerances, until the bytes of one fit.
    too_tight, tolerance = TOLERANCE, TOLERANCE
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
        least = min(least, stays, key=lambda one: one.moved.largest_rank)
        if candidates.may_stay and stays.moved.largest_rank <= bytes_limit:
            return stays
        raise PlanError(_over_the_limit(least, bytes_limit))

    # 2. Bisection between it and the one before.
    for _ in range(HALVINGS):
        middle = (too_tight + tolerance) / 2
        found = candidate(middle)
        if found.moved.largest_rank <= bytes_limit:
            fits, tolerance = found, middle
        else:
            too_tight = middle
    return fits


def _over_the_limit(least: Candidate, bytes_limit: int) -> str:
    sent, received = least.moved.sent, least.moved.received
    sends = int(sent.max()) >= int(received.max())
    rank = int((sent if sends else received).argmax())
    return (
        f"rank {rank} has to {'send' if sends else 'receive'} {least.moved.largest_rank} bytes per layer, but "
        f"bytes_limit={bytes_limit}; no plan for these packs was found that moves less. Set bytes_limit to at least "
        f"{least.moved.largest_rank}, or pack documents so that fewer of them span ranks"
    )
