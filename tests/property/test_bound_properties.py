"""The bound of bytes: below every plan there is, whoever made it, and not far below good ones."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.errors import PlanError
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.transfers import bytes_between
from lib.planning.bounds import bytes_bound
from lib.planning.relaxation import keys_worth, slopes
from support.layouts import packed_layout, random_layout, random_plan
from support.study_lengths import study_layout


pytest.importorskip("scipy")

SEEDS = st.integers(0, 2**32 - 1)


def check_bound(plan: Plan, head_groups: int, token_bytes: TokenBytes) -> None:
    """The bound for the plan's own largest work, and for what each of its ranks computes."""
    between = bytes_between(plan, token_bytes)
    largest = max(between.sum(axis=0).max(), between.sum(axis=1).max())
    work = plan.work * (head_groups // plan.tasks.head_groups)
    for limits in (np.full(len(work), work.max()), work):
        bound = bytes_bound(plan.layout, limits, head_groups, token_bytes)
        assert bound.largest_rank <= largest
        assert bound.total <= between.sum()


@settings(max_examples=100)
@given(SEEDS, st.integers(1, 7), st.sampled_from([1, 2, 8]), st.booleans(), st.sampled_from([40, 3000]))
def test_bound_is_below_every_plan(
    seed: int, num_ranks: int, head_groups: int, spanning: bool, longest_tokens: int
) -> None:
    rng = random.Random(seed)
    layout = (random_layout if spanning else packed_layout)(rng, num_ranks, longest_tokens)
    query, output, keys = rng.choice([(8, 8, 8), (64, 64, 8), (8, 64, 16), (8, 8, 64)])
    token_bytes = TokenBytes(query=query, output=output, key_value=keys)
    plans = [plan_in_place(layout), plan_by_moving(layout, head_groups, token_bytes=token_bytes)]
    if layout.num_documents:
        plans.append(random_plan(rng, layout, head_groups))
    for plan in plans:
        check_bound(plan, head_groups, token_bytes)


@settings(max_examples=100)
@given(SEEDS)
def test_lines_are_above_the_curve(seed: int) -> None:
    rng = random.Random(seed)
    start = rng.choice([0, rng.randint(1, 500)])
    stop = start + rng.randint(1, 500)
    most_pairs = rng.choice([10.0, 1000.0, 1e6])
    for slope in slopes(stop, 7).tolist():
        worth = keys_worth(slope, start, stop, most_pairs)
        for keys in {1, (stop - start) // 2 or 1, stop - start, rng.randint(1, stop - start)}:
            queries = np.arange(1, keys + 1)
            last = start + keys
            pairs = queries * last - queries * (queries - 1) / 2
            possible = pairs <= most_pairs
            assert np.all((pairs <= slope * queries + worth * keys + 1e-6)[possible])


def test_one_long_document_has_the_bound_of_its_best_cut() -> None:
    """Rank 0 keeps half of one document: a closed form. All heads down to the same position, keys once per head."""
    layout = Layout.from_packs([[100_000], []])
    work = layout.rank_work.sum() * 8
    bound = bytes_bound(layout, np.full(2, work / 2), 8, TokenBytes())
    cheapest = min(
        heads / 8 * (8192 * (1 - cut) + 4096)
        for heads in np.linspace(4, 8, 4001)
        if (cut := np.sqrt(max(0.0, 1 - 4 / heads))) < 1
    )

    assert bound.largest_rank == pytest.approx(100_000 * cheapest, rel=0.01)


def test_nothing_need_move_where_work_is_balanced() -> None:
    layout = Layout.from_packs([[100, 50], [50, 100]])
    bound = bytes_bound(layout, layout.rank_work)

    assert (bound.largest_rank, bound.total) == (0, 0)


def test_limits_below_the_work_are_an_error() -> None:
    layout = Layout.from_packs([[100], [50]])
    with pytest.raises(PlanError, match="add up to 10"):
        bytes_bound(layout, np.array([5, 5]))


@pytest.mark.parametrize(("mix", "num_ranks"), [("pretrain", 8), ("prolong", 16)])
def test_planner_is_close_to_the_bound(mix: str, num_ranks: int) -> None:
    ratios = []
    for seed in range(100, 104):
        layout = study_layout(mix, num_ranks, seed)
        plan = plan_by_moving(layout, 8)
        between = bytes_between(plan, TokenBytes())
        limits = np.full(num_ranks, plan.work.max())
        largest = max(between.sum(axis=0).max(), between.sum(axis=1).max())
        ratios.append(largest / bytes_bound(layout, limits, 8).largest_rank)

    assert np.mean(ratios) <= 1.2
