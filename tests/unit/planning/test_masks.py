"""Plans for other masks than the causal one: work is counted and divided as the mask has it, and queries of windows
stay where they are held."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL_MASK, Cost, Mask, imbalance
from distca_hf.layout import Layout, Stripe
from distca_hf.placement.place import place
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import divide_stripe, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.transfers import keys_between
from support.layouts import random_plan, striped_layout


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


def test_a_mask_is_a_part_of_the_fingerprint() -> None:
    layout = Layout.from_packs([[10], [4, 4]])
    fingerprints = {plan_in_place(layout, mask=Mask(window)).fingerprint for window in (None, 4, 5)}

    assert len(fingerprints) == 3
    assert np.array_equal(rank_plan(plan_in_place(layout, mask=Mask()), 1).facts.work, [55, 20])
    assert np.array_equal(rank_plan(plan_in_place(layout, mask=Mask(4)), 1).facts.work, [34, 20])


def test_a_long_document_costs_a_halo_for_each_part() -> None:
    layout, mask = place([4000], 4), Mask(100)
    plan = plan_in_place(layout).of_window(mask)
    facts = rank_plan(plan, 0).facts
    parts = sum(1 for _, start, _ in (segment for rank in range(4) for segment in layout.held_by(rank)) if start)
    assert sum(facts.key_rows_received) == 99 * parts
    assert keys_between(plan).sum(axis=0).tolist() == list(facts.key_rows_received)
    assert facts.rows_per_token == 1
    assert facts.window_tokens == 100
    assert sum(facts.work) == mask.pairs(0, 4000) < CAUSAL_MASK.pairs(0, 4000)


def test_queries_of_windows_stay_whatever_the_plan_moves() -> None:
    rng, mask = random.Random(0), Mask(5)
    for layout in [striped_layout(rng, 3) for _ in range(20)]:
        for plan in (plan_in_place(layout, 4), random_plan(rng, layout, 2), random_plan(rng, layout)):
            windows = plan.of_window(mask)
            assert not windows.moves_queries
            assert windows.tasks.head_groups == 1
            assert windows.work.tolist() == layout.rank_work_of(mask).tolist()


def test_attention_servers_compute_nothing_in_windows() -> None:
    plan = replace(plan_in_place(place([300, 20], 2).with_extra_ranks(1)), speeds=(1.0, 1.0, 0.5))
    window = RoutedKinds.of(plan, 2, layer_masks=((Mask(7), 1),), num_extra=1).plans[Mask(7)]
    assert plan.of_window(Mask(7)).speeds == ()  # trainers are equally fast, and defer equal work
    assert window.forward.exchanges
    assert window.forward.pairs == window.forward.num_rows == window.forward.late_share == 0
    assert window.facts.speeds == (1.0, 1.0, 0.0)
    assert window.facts.imbalance == pytest.approx(max(window.facts.work[:2]) / np.mean(window.facts.work[:2]))
