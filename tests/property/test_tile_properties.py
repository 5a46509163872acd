"""Tiles of a plan: their sums are the plan's, for any plan, and no rank is routed for them."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.analysis.simulate.costs import Tiles
from distca_hf.cost import Mask
from distca_hf.layout import Layout
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from support.layouts import random_layout, random_plan, striped_layout


def drawn(seed: int, num_ranks: int, head_groups: int) -> list[Plan]:
    rng = random.Random(seed)
    layout = random_layout(rng, num_ranks, rng.choice([40, 3000]))
    plans = [plan_in_place(layout, head_groups), plan_by_moving(layout, head_groups)]
    if num_ranks > 1:  # heads of a stripe are divided in full layers only
        plans.append(plan_in_place(striped_layout(rng, num_ranks), head_groups))
    return [*plans, random_plan(rng, layout, head_groups)] if layout.num_documents else plans


def work_of(tiles: Tiles, num_ranks: int, head_groups: int) -> list[int]:
    """`[ranks]` attended pairs x head groups."""
    work = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(work, tiles.rank, tiles.pairs * np.where(tiles.one_group, 1, head_groups))
    return list(work.tolist())


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from([1, 2, 8]))
def test_pairs_of_tiles_are_the_work_of_a_plan(seed: int, num_ranks: int, head_groups: int) -> None:
    for plan in drawn(seed, num_ranks, head_groups):
        tiles = Tiles.of(plan)
        mask = Mask(1 + seed % 50, chunked=seed % 3 == 0)

        assert work_of(tiles, num_ranks, plan.tasks.head_groups) == plan.work.tolist()
        assert work_of(Tiles.of(plan, mask), num_ranks, 1) == plan.layout.rank_work_of(mask).tolist()


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from([1, 2, 8]))
def test_what_does_not_wait_is_work_on_rows_of_the_rank(seed: int, num_ranks: int, head_groups: int) -> None:
    """Squares of tasks whose rank holds all their queries; task by task, against owners token by token."""
    for plan in drawn(seed, num_ranks, head_groups):
        tasks, tiles = plan.tasks, Tiles.of(plan)
        owner = {
            (document, token): rank for rank in range(num_ranks) for document, start, stop in plan.layout.held_by(rank)
            for token in range(start, stop)
        }  # fmt: skip
        local = np.zeros(num_ranks, dtype=np.int64)
        for document, start, stop, rank, head in zip(
            *(x.tolist() for x in (tasks.document, tasks.start, tasks.stop, tasks.rank, tasks.head)), strict=True
        ):
            if all(owner[document, token] == rank for token in range(start, stop)):
                tokens = stop - start
                local[rank] += tokens * (tokens + 1) // 2 * (tasks.head_groups if head == ALL_HEADS else 1)
        groups = np.where(tiles.one_group, 1, tasks.head_groups)
        stays = np.bincount(tiles.rank, tiles.pairs * groups * ~tiles.waits, num_ranks)

        assert stays.astype(np.int64).tolist() == local.tolist()


def test_tiles_of_a_cut_document_by_hand() -> None:
    """Rank 0 holds tokens 0 to 6, rank 1 tokens 6 to 10 of one document."""
    layout = Layout.from_segments([10], [[(0, 0, 6)], [(0, 6, 10)]])
    full, window = Tiles.of(plan_in_place(layout)), Tiles.of(plan_in_place(layout), Mask(3))

    columns = [(x.rank.tolist(), x.queries.tolist(), x.keys.tolist(), x.pairs.tolist()) for x in (full, window)]
    assert columns[0] == ([0, 1, 1], [6, 4, 4], [0, 0, 6], [21, 10, 24])
    # A query attends itself and the two tokens before: the first two queries of rank 1 attend keys of rank 0.
    assert columns[1] == ([0, 1, 1], [6, 4, 4], [0, 0, 2], [15, 9, 3])
    assert full.waits.tolist() == window.waits.tolist() == [False, False, True]
