"""Plan speed: how much longer an epoch takes where ranks wait for the one with most attention."""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.plan_epoch import EpochPlans, InOrder
from distca_hf.flops import StepCost


@dataclass(frozen=True)
class Speed:
    """Estimated ratios of step times, over an epoch.

    Attributes:
        attention_share: attention's part of a step in which all ranks have the same work.
        over_plain: time of documents in order over time as planned.
        over_sorted: the same for packs that are sorted by work within every optimizer step.
    """

    attention_share: float
    over_plain: float
    over_sorted: float


def estimate_speed(plans: EpochPlans, cost: StepCost) -> Speed:
    """Adds up the slowest rank of every micro-batch; of micro-batches that were not planned it is the mean rank times
    the mean imbalance of those that were.

    Args:
        plans: of an epoch.
        cost: of a token and a pair, for the model.
    """
    plain = _seconds(plans.in_order, plans.in_order.work.max(axis=1), cost)
    as_planned = _seconds(plans.in_order, plans.in_order.work.mean(axis=1) * plans.imbalance.mean(), cost)
    looked_at = InOrder(plans.in_order.tokens[plans.looked_at], plans.in_order.work[plans.looked_at])
    sorted_packs = plans.sorted_tokens * cost.token_seconds + plans.sorted_work * cost.pair_seconds
    return Speed(
        attention_share=attention_share(plans.in_order, cost),
        over_plain=plain / as_planned,
        over_sorted=float(sorted_packs.max(axis=1).sum()) / _seconds(looked_at, plans.work.max(axis=1), cost),
    )


def attention_share(in_order: InOrder, cost: StepCost) -> float:
    """Returns attention's part of steps in which all ranks have the same work."""
    return cost.attention_share(
        float(in_order.rank_tokens(slice(None)).sum()), float(in_order.work.mean(axis=1).sum())
    )


def speed_over_plain(in_order: InOrder, cost: StepCost) -> float:
    """Returns time of documents in order over time of perfectly equal work."""
    plain = _seconds(in_order, in_order.work.max(axis=1), cost)
    return plain / _seconds(in_order, in_order.work.mean(axis=1), cost)


def _seconds(in_order: InOrder, busiest_pairs: np.ndarray, cost: StepCost) -> float:
    """Returns seconds of all micro-batches, tokens being equal, from the pairs of the busiest rank of each."""
    tokens = in_order.rank_tokens(slice(None))
    return float((tokens * cost.token_seconds + busiest_pairs * cost.pair_seconds).sum())
