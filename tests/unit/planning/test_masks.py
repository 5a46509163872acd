"""Plans for other masks than the causal one: work is counted and divided as the mask has it, routing refuses them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import Cost, Mask, imbalance
from distca_hf.errors import PlanError
from distca_hf.layout import Layout, Stripe
from distca_hf.placement.place import place
from distca_hf.planning.plan import divide_stripe, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.routing import rank_plan


MASKS = st.builds(Mask, st.none() | st.integers(1, 600))


def pairs_one_by_one(mask: Mask, start: int, stop: int) -> int:
    window_tokens = stop if mask.window_tokens is None else mask.window_tokens
    return sum(min(position + 1, window_tokens) for position in range(start, stop))


@given(
    mask=MASKS,
    ranks=st.integers(1, 5),
    groups=st.integers(1, 4),
    start=st.integers(0, 300),
    tokens=st.integers(1, 400),
)
def test_a_stripe_is_divided_by_the_pairs_of_its_mask(
    mask: Mask, ranks: int, groups: int, start: int, tokens: int
) -> None:
    stripe = Stripe(0, start, start + tokens, 0, ranks)
    tasks = divide_stripe(stripe, groups, mask)
    work = [0] * ranks
    covered = []
    for _, first, stop, rank, group in tasks:
        work[rank] += pairs_one_by_one(mask, first, stop)
        covered += [(group, query) for query in range(first, stop)]

    assert sorted(covered) == [(group, query) for group in range(groups) for query in range(start, start + tokens)]
    longest_query = pairs_one_by_one(mask, start + tokens - 1, start + tokens)
    mean = groups * pairs_one_by_one(mask, start, start + tokens) / ranks
    assert max(abs(of_rank - mean) for of_rank in work) <= 2 * longest_query


@pytest.mark.parametrize("mask", [Mask(), Mask(64), Mask(3000)])
def test_placed_and_moved_plans_are_balanced_for_their_mask(mask: Mask) -> None:
    lengths = [30_000, 9000, 9000, *[500] * 120, 7, 1]
    placed = plan_in_place(place(lengths, 4, cost=Cost(((mask, 1),))), mask=mask)
    moved = plan_by_moving(Layout.from_packs([[30_000], [9000, 9000], [500] * 120, [7, 1]]), 8, mask=mask)

    for plan in (placed, moved):
        plan.validate()
        tasks = plan.tasks
        ranges = zip(tasks.start.tolist(), tasks.stop.tolist(), strict=True)
        assert tasks.pairs.tolist() == [pairs_one_by_one(mask, start, stop) for start, stop in ranges]
        assert plan.work.sum() == tasks.head_groups * sum(pairs_one_by_one(mask, 0, tokens) for tokens in lengths)
        assert imbalance(plan.work) < 1.04


def test_a_task_reads_others_if_its_mask_reaches_before_it() -> None:
    layout = Layout.from_segments([10], [[(0, 0, 6)], [(0, 6, 10)]])

    assert plan_in_place(layout, mask=Mask(1)).reads_others.tolist() == [False, False]
    assert plan_in_place(layout, mask=Mask(2)).reads_others.tolist() == [False, True]
    assert plan_in_place(layout, mask=Mask(2)).tasks.first_key.tolist() == [0, 5]
    assert plan_in_place(layout).tasks.first_key.tolist() == [0, 0]


def test_routing_refuses_a_window_by_name() -> None:
    layout = Layout.from_packs([[10], [4, 4]])
    plan = plan_in_place(layout, mask=Mask(4))

    assert plan.fingerprint not in (plan_in_place(layout).fingerprint, plan_in_place(layout, mask=Mask(5)).fingerprint)
    with pytest.raises(PlanError, match=r"Mask\(window_tokens=4\) cannot be routed on rank 1"):
        rank_plan(plan, 1)
    assert np.array_equal(rank_plan(plan_in_place(layout, mask=Mask()), 1).facts.work, [55, 20])
