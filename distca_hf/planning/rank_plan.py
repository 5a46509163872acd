"""A plan as one rank needs it: its routing in forward and in backward, and facts of the micro-batch.

plan ── transfers ─┬─ facts                                    the same on all ranks
                   ├─ routing of forward     in several chunks   of this rank
                   └─ routing of backward    in one chunk        of this rank
"""

from dataclasses import dataclass

from distca_hf.cost import IntArray
from distca_hf.planning.chunks import ExchangeChunks
from distca_hf.planning.plan import Plan
from distca_hf.planning.plan_facts import PlanFacts
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import key_transfers


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Routings of one rank, and facts that all ranks share.

    Attributes:
        forward: rows may come in several chunks.
        backward: all that was kept is there at once; the same object as `forward` if that has one chunk.
    """

    forward: Routing
    backward: Routing
    facts: PlanFacts


def rank_plan(plan: Plan, rank: int, num_chunks: int = 1, work_before: IntArray | None = None) -> RankPlan:
    """Returns what one rank needs of a plan.

    Args:
        num_chunks: parts in which rows travel in forward.
        work_before: `[ranks]` attended pairs to compare the plan with, in facts; by default every rank attends with
            the queries that it holds.
    """
    transfers = key_transfers(plan)
    facts = PlanFacts.of(plan, transfers, plan.layout.rank_work if work_before is None else work_before)
    if num_chunks == 1:
        routing = route(plan, rank, transfers)
        return RankPlan(routing, routing, facts)
    chunks = ExchangeChunks.cut(plan, num_chunks)
    in_chunks = key_transfers(plan, chunks)
    return RankPlan(route(plan, rank, in_chunks, chunks), route(plan, rank, transfers, kept=in_chunks), facts)
