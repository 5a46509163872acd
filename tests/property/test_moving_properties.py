"""Plans that move tasks: complete, balanced, and never worse than what they begin with."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.layout import Layout
from distca_hf.planning.moving import SLIVER, plan_by_moving
from distca_hf.planning.planner import plan_in_place
from support.layouts import packed_layout


PACKS = {"seed": st.integers(0, 2**32 - 1), "num_ranks": st.integers(1, 16)}


@settings(max_examples=200)
@given(**PACKS)
def test_every_query_is_computed_once_and_ranks_end_near_the_mean(seed: int, num_ranks: int) -> None:
    layout = packed_layout(random.Random(seed), num_ranks)
    plan = plan_by_moving(layout)
    plan.validate()
    mean = layout.rank_work.sum() / num_ranks

    # A rank keeps what is too little to move, and no more than one query of it that does not fit anywhere.
    slack = SLIVER * mean * num_ranks + layout.longest_document_tokens + 1
    assert plan.work.max(initial=0) <= max(mean, 1) + slack
    assert plan.work.max(initial=0) <= plan_in_place(layout).work.max(initial=0)
    assert plan.work.sum() == layout.rank_work.sum()


@given(**PACKS)
def test_givers_do_not_take_and_takers_do_not_give(seed: int, num_ranks: int) -> None:
    layout = packed_layout(random.Random(seed), num_ranks)
    plan = plan_by_moving(layout)
    moved = plan.pieces.select(plan.pieces.moved)
    mean = layout.rank_work.sum() / num_ranks

    assert not set(moved.home) & set(moved.server)
    assert np.all(layout.rank_work[moved.home] > mean)
    assert np.all(layout.rank_work[moved.server] < mean)
    assert np.all(plan.work[moved.home] >= np.floor(mean))
    assert np.all(plan.work[moved.server] <= np.ceil(mean))


@given(**PACKS)
def test_plan_depends_on_lengths_alone(seed: int, num_ranks: int) -> None:
    left, right = (plan_by_moving(packed_layout(random.Random(seed), num_ranks)) for _ in range(2))

    assert left.fingerprint == right.fingerprint


def test_long_documents_leave_by_their_ends() -> None:
    plan = plan_by_moving(Layout.from_packs([[1000], [10] * 100, [10] * 100]))
    moved = plan.pieces.select(plan.pieces.moved)

    assert set(moved.home) == {0}
    assert set(moved.server) == {1, 2}
    assert moved.stop.max() == 1000
    assert plan.imbalance < 1.01


def test_balanced_packs_are_left_alone() -> None:
    layout = Layout.from_packs([[100, 50], [50, 100], [100, 50]])

    assert not plan_by_moving(layout).moves_queries
    assert plan_by_moving(layout).fingerprint == plan_in_place(layout).fingerprint


def test_ranks_without_tokens_compute_for_others() -> None:
    plan = plan_by_moving(Layout.from_packs([[4000], [], [], []]))

    assert plan.imbalance < 1.01
    assert plan.work.min() > 0
