"""Random plans of every kind for three ranks, by seed."""

import random

from distca_hf.planning.plan import Plan, plan_in_place
from support.layouts import random_layout, random_plan, striped_layout


NUM_RANKS = 3


def placed(seed: int) -> Plan:
    """Queries stay."""
    return plan_in_place(random_layout(random.Random(seed), NUM_RANKS))


def striped(seed: int) -> Plan:
    """Queries of stripes move among the ranks that divide their heads."""
    return plan_in_place(striped_layout(random.Random(seed), NUM_RANKS), head_groups=2)


def anywhere(seed: int) -> Plan:
    """Any query is computed anywhere."""
    rng = random.Random(seed)
    return random_plan(rng, random_layout(rng, NUM_RANKS))


def divided(seed: int) -> Plan:
    """Tasks of one group of heads among others."""
    rng = random.Random(seed)
    return random_plan(rng, random_layout(rng, NUM_RANKS), head_groups=2)
