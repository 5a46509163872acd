"""Moving tasks: a plan for a layout that must stay as it is, because its batches were packed before.

Tokens stay where they are. Ranks with more than their share of the work hand queries to others: heads of their longest
documents, the latest queries first (`stacks`), since these take most work along for the same bytes. How deep and how
many heads is a matter of what remains to be given and of who takes it (`cuts`, `exports`). One pass is fast and cannot
look ahead; so several are made (`strategy`), their bytes are counted exactly, and the best one is kept.
"""

from collections.abc import Sequence

from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError, PlanError
from distca_hf.layout import Layout
from distca_hf.planning.in_place import plan_in_place
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance.candidates import Attempt, Attempts
from distca_hf.planning.rebalance.strategies import MANY_DOCUMENTS, STRATEGIES, Effort
from distca_hf.topology import Topology


# A rank may compute this share more than its own: the last two percent would cost bytes and win nothing.
TOLERANCE = 0.023
# A node-aware plan is preferred if its largest rank moves at most this much more.
NEARLY_AS_GOOD = 1.05
# Tolerances to try where bytes are limited, up to the one that moves nothing; then so many halvings in between.
TOLERANCE_GROWS = 2
HALVINGS = 6
STRATEGIES_IN_NEED = 2


def plan_by_moving(
    layout: Layout,
    head_groups: int = 1,
    *,
    topology: Topology | None = None,
    token_bytes: TokenBytes = TokenBytes(),  # noqa: B008 (immutable)
    capacities: Sequence[float] | None = None,
    bytes_limit: int | None = None,
) -> Plan:
    """A plan in which no rank computes more than 1.025 times its share, plus a tile of the longest document, and the
    rank that sends or receives most does so with few bytes.

    Args:
        layout: who holds what.
        head_groups: groups that heads may be divided in; 1 keeps heads together.
        topology: which ranks share a node; of plans that are nearly as good, the one with fewest bytes between nodes
            is taken.
        token_bytes: bytes of one token in one layer.
        capacities: `[ranks]` relative speeds; a rank of capacity 0 computes nothing.
        bytes_limit: most bytes that a rank may send, and most that it may receive, in one layer forward. Where it is
            tight work is balanced as well as it permits.

    Raises:
        ConfigError: head groups below 1, capacities that are no speeds, a topology of other ranks.
        PlanError: no plan meets the limit.
    """
    if head_groups < 1:
        raise ConfigError(f"head_groups={head_groups} must be at least 1")
    if topology is not None and topology.num_ranks != layout.num_ranks:
        raise ConfigError(f"the topology has {topology.num_ranks} ranks, the layout {layout.num_ranks}")
    attempts = Attempts(layout, head_groups, topology, token_bytes, capacities)
    best = _best(attempts, layout.num_ranks, topology, TOLERANCE)
    if bytes_limit is not None and best.moved.largest_rank > bytes_limit:
        best = _within(attempts, bytes_limit, best)
    return attempts.plan(best) if best.moves else plan_in_place(layout)


def _best(attempts: Attempts, num_ranks: int, topology: Topology | None, tolerance: float) -> Attempt:
    """The best of what there is time to try."""
    best = attempts.stay(tolerance)
    if best.overload == 0 and best.moved.largest_rank == 0:
        return best
    effort = Effort.for_ranks(num_ranks)
    steps = 0
    for strategy in STRATEGIES[: effort.strategies]:
        tried = attempts.move(strategy, tolerance)
        best, steps = min(best, tried, key=_quality), steps + tried.steps
        if _suffices(best, effort) or steps > effort.steps:
            break
    last = best
    for _ in range(effort.rounds):
        if _suffices(best, effort) or steps > effort.steps:
            break
        last = attempts.move_again(last, best.strategy, tolerance)
        best, steps = min(best, last, key=_quality), steps + last.steps
    if topology is None or topology.num_nodes == 1:
        return best
    return _for_nodes(attempts, best, tolerance)


def _for_nodes(attempts: Attempts, best: Attempt, tolerance: float) -> Attempt:
    """A node-aware plan, if it is nearly as good for the largest rank and moves fewer bytes between nodes."""
    allowed = NEARLY_AS_GOOD * best.moved.largest_rank
    aware = attempts.move_by_nodes(best, best.strategy, tolerance)
    if aware.overload > best.overload or aware.moved.largest_rank > allowed:
        return best
    return min(best, aware, key=lambda attempt: attempt.moved.largest_between_nodes)


def _quality(attempt: Attempt) -> tuple[float, int, int]:
    """The smaller, the better: overload, bytes of the largest rank, bytes of all."""
    return attempt.overload, attempt.moved.largest_rank, int(attempt.moved.sent.sum())


def _suffices(attempt: Attempt, effort: Effort) -> bool:
    """Whether other strategies have next to nothing to win, or too much to do."""
    if len(attempt.stacks) > MANY_DOCUMENTS:
        return True
    return attempt.overload == 0 and attempt.moved.largest_rank <= effort.good_enough * attempt.busy_bytes


def _within(attempts: Attempts, bytes_limit: int, least: Attempt) -> Attempt:
    """The plan with the smallest tolerance whose bytes stay within the limit.

    Raises:
        PlanError: there is none.
    """

    def attempt(tolerance: float) -> Attempt:
        found = [attempts.move(strategy, tolerance) for strategy in STRATEGIES[:STRATEGIES_IN_NEED]]
        return min(found, key=lambda one: one.moved.largest_rank)

    too_tight, tolerance = TOLERANCE, TOLERANCE
    fits: Attempt | None = None
    stays = attempts.stay(tolerance)
    while fits is None:
        too_tight, tolerance = tolerance, tolerance * TOLERANCE_GROWS
        found = attempt(tolerance)
        least = min(least, found, key=lambda one: one.moved.largest_rank)
        if found.moved.largest_rank <= bytes_limit:
            fits = found
        elif tolerance > attempts.most_tolerance:
            break
    if fits is None:
        least = min(least, stays, key=lambda one: one.moved.largest_rank)
        if attempts.may_stay and stays.moved.largest_rank <= bytes_limit:
            return stays
        raise PlanError(_over_the_limit(least, bytes_limit))
    for _ in range(HALVINGS):
        middle = (too_tight + tolerance) / 2
        found = attempt(middle)
        if found.moved.largest_rank <= bytes_limit:
            fits, tolerance = found, middle
        else:
            too_tight = middle
    return fits


def _over_the_limit(least: Attempt, bytes_limit: int) -> str:
    sent, received = least.moved.sent, least.moved.received
    sends = int(sent.max()) >= int(received.max())
    rank = int((sent if sends else received).argmax())
    return (
        f"rank {rank} has to {'send' if sends else 'receive'} {least.moved.largest_rank} bytes per layer, but "
        f"bytes_limit={bytes_limit}; no plan for these packs was found that moves less. Set bytes_limit to at least "
        f"{least.moved.largest_rank}, or pack documents so that fewer of them span ranks"
    )
