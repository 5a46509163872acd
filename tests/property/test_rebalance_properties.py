"""Plans that move tasks: complete, balanced, exactly counted, and never without need."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.layout import TILE_TOKENS, Layout, Topology
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.rebalance.donors import STRATEGIES
from distca_hf.planning.rebalance.planner import NEGLIGIBLE_SHARE, TILE_SHARE, TOLERANCE, Candidates
from distca_hf.planning.transfers import bytes_between
from support.layouts import packed_layout, random_layout


SEEDS = st.integers(0, 2**32 - 1)
RANKS = st.integers(1, 17)
HEAD_GROUPS = st.sampled_from([1, 2, 8])

POWERS = [2**power + offset for power in range(1, 15) for offset in (-1, 0, 1)]
ADVERSARIAL = {
    "fewer documents than ranks": Layout.from_packs([[], [9000], [], [], [40], [], []]),
    "documents of one token": Layout.from_packs([[1] * 5, [1], [], [1] * 400]),
    "thousands of tiny ones": Layout.from_packs([[3] * 3000, [], [1], [7] * 100]),
    "one giant": Layout.from_packs([[100_000], [20] * 50, [30] * 50, [], [5]]),
    "powers of two": Layout.from_packs([POWERS[::3], POWERS[1::3], [1], POWERS[2::3], [2]]),
    "a prime number of ranks": Layout.from_packs([[50_000 // (rank + 1)] for rank in range(13)]),
    "a document on all ranks": fill_in_order([70_000], 7),
    "cut wherever a rank ends": fill_in_order([30_000, 500, 44_000, 44_000, 100, 1, 80_000, 3], 6),
    "nothing": Layout.from_packs([[], [], []]),
}


def slack_of(layout: Layout, mean: float) -> float:
    """What may be above a limit: a tile of the longest document (of every head, if one cut is of all), or what is not
    worth a task."""
    longest, tile = layout.longest_document_tokens, TILE_TOKENS
    while tile > 1 and tile * longest > TILE_SHARE * mean:
        tile //= 2
    return tile * longest + NEGLIGIBLE_SHARE * mean + 1


def check_balance(plan: Plan, head_groups: int) -> None:
    """No rank has more than its share; single queries of all heads may not fit anywhere."""
    mean = plan.layout.rank_work.sum() * head_groups / plan.layout.num_ranks
    work = plan.work * (head_groups // plan.tasks.head_groups)
    assert work.sum() == plan.layout.rank_work.sum() * head_groups
    query = plan.layout.longest_document_tokens * head_groups
    assert work.max(initial=0) <= (1 + TOLERANCE) * mean + slack_of(plan.layout, mean) + 2 * query


@given(SEEDS, RANKS, HEAD_GROUPS, st.booleans())
def test_every_query_is_computed_once_and_ranks_end_near_the_mean(
    seed: int, num_ranks: int, head_groups: int, spanning: bool
) -> None:
    draw = random_layout if spanning else packed_layout
    layout = draw(random.Random(seed), num_ranks, longest_tokens=3000)
    plan = plan_by_moving(layout, head_groups)
    plan.validate()
    check_balance(plan, head_groups)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_packs_on_nodes_that_are_not_full(name: str) -> None:
    layout = ADVERSARIAL[name]
    for ranks_per_node in (1, 2, 3, 8):
        plan = plan_by_moving(layout, 8, topology=Topology(layout.num_ranks, ranks_per_node))
        plan.validate()
        check_balance(plan, 8)


@given(SEEDS, RANKS, HEAD_GROUPS, st.booleans(), st.booleans())
def test_bytes_are_counted_as_routing_counts_them(
    seed: int, num_ranks: int, head_groups: int, spanning: bool, node_aware: bool
) -> None:
    draw = random_layout if spanning else packed_layout
    layout = draw(random.Random(seed), num_ranks, longest_tokens=2000)
    topology, token_bytes = Topology(num_ranks, 3), TokenBytes(query=4096, output=1024, key_value=512)
    candidates = Candidates(layout, head_groups, topology, token_bytes, None)
    attempt = candidates.move(STRATEGIES[seed % len(STRATEGIES)], TOLERANCE)
    if node_aware:
        attempt = candidates.move_by_nodes(attempt, TOLERANCE)
    between = bytes_between(candidates.plan(attempt), token_bytes)
    other_node = topology.node_of[:, None] != topology.node_of[None, :]

    np.testing.assert_array_equal(attempt.moved.sent, between.sum(axis=1))
    np.testing.assert_array_equal(attempt.moved.received, between.sum(axis=0))
    np.testing.assert_array_equal(attempt.moved.sent_between_nodes, (between * other_node).sum(axis=1))
    np.testing.assert_array_equal(attempt.moved.received_between_nodes, (between * other_node).sum(axis=0))
    assert attempt.moved.sent.sum() == attempt.moved.received.sum()


@given(SEEDS, RANKS, HEAD_GROUPS)
def test_without_documents_that_span_ranks_nobody_gives_and_takes(seed: int, num_ranks: int, head_groups: int) -> None:
    layout = packed_layout(random.Random(seed), num_ranks)
    plan = plan_by_moving(layout, head_groups)
    moved = plan.pieces.select(plan.pieces.moved)
    mean = layout.rank_work.sum() / num_ranks

    assert not set(moved.owner) & set(moved.computing_rank)
    assert np.all(layout.rank_work[moved.owner] > (1 + TOLERANCE) * mean)
    assert np.all(layout.rank_work[moved.computing_rank] < (1 + TOLERANCE) * mean)


@given(SEEDS, RANKS, HEAD_GROUPS, st.booleans())
def test_plan_depends_on_content_alone(seed: int, num_ranks: int, head_groups: int, spanning: bool) -> None:
    """Not on how documents are numbered, nor on the order of a rank's rows."""
    draw = random_layout if spanning else packed_layout
    layout = draw(random.Random(seed), num_ranks, longest_tokens=2000)
    again = draw(random.Random(seed), num_ranks, longest_tokens=2000)
    shuffled = renumbered(layout, random.Random(seed + 1))
    plan = plan_by_moving(layout, head_groups)
    other = plan_by_moving(shuffled, head_groups)

    assert plan.fingerprint == plan_by_moving(again, head_groups).fingerprint
    np.testing.assert_array_equal(plan.work, other.work)
    assert described(plan) == described(other)


def renumbered(layout: Layout, rng: random.Random) -> Layout:
    """The same segments on the same ranks; other numbers of documents, other order of rows."""
    numbers = list(range(layout.num_documents))
    rng.shuffle(numbers)
    lengths = np.zeros(layout.num_documents, dtype=np.int64)
    lengths[numbers] = layout.document_tokens
    segments = []
    for rank in range(layout.num_ranks):
        held = layout.segments_of(rank)
        columns = (layout.segment_document[held], layout.segment_start[held], layout.segment_stop[held])
        rows = [(numbers[document], start, stop) for document, start, stop in zip(*columns, strict=True)]
        rng.shuffle(rows)
        segments.append(rows)
    return Layout.from_segments(lengths, segments, layout.rank_rows)


def described(plan: Plan) -> list[tuple[object, ...]]:
    """Tasks without the numbers of their documents: who holds the document, and what is computed where."""
    layout, tasks = plan.layout, plan.tasks
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.num_documents)]
    columns = (layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank)
    for document, *segment in zip(*(column.tolist() for column in columns), strict=True):
        held[document].append(tuple(segment))
    computed: list[list[tuple[int, int, int, int]]] = [[] for _ in range(layout.num_documents)]
    columns = (tasks.document, tasks.head, tasks.start, tasks.stop, tasks.rank)
    for document, *task in zip(*(column.tolist() for column in columns), strict=True):
        computed[document].append(tuple(task))
    return sorted((sorted(home), sorted(work)) for home, work in zip(held, computed, strict=True))


@settings(max_examples=30)
@given(SEEDS, st.integers(2, 9), HEAD_GROUPS, st.booleans())
def test_ranks_compute_by_speed(seed: int, num_ranks: int, head_groups: int, spanning: bool) -> None:
    rng = random.Random(seed)
    draw = random_layout if spanning else packed_layout
    layout = draw(rng, num_ranks, longest_tokens=2000)
    speeds = [rng.choice([0, 1, 1, 2.5]) for _ in range(num_ranks - 1)] + [1]
    plan = plan_by_moving(layout, head_groups, speeds=speeds)
    plan.validate()
    work = plan.work * (head_groups // plan.tasks.head_groups)
    total = layout.rank_work.sum() * head_groups
    share = total * np.array(speeds) / sum(speeds)

    assert np.all(work[np.array(speeds) == 0] == 0)
    mean = total / num_ranks
    query = layout.longest_document_tokens * head_groups
    assert np.all(work <= (1 + TOLERANCE) * share + num_ranks * (slack_of(layout, mean) + query))


@settings(max_examples=30)
@given(SEEDS, st.integers(2, 9), HEAD_GROUPS)
def test_bytes_stay_within_a_limit(seed: int, num_ranks: int, head_groups: int) -> None:
    layout = packed_layout(random.Random(seed), num_ranks)
    free = bytes_between(plan_by_moving(layout, head_groups), TokenBytes())
    most = int(max(free.sum(axis=0).max(), free.sum(axis=1).max()))
    for limit in (0, most // 3, most):
        plan = plan_by_moving(layout, head_groups, bytes_limit=limit)
        plan.validate()
        moved = bytes_between(plan, TokenBytes())
        assert max(moved.sum(axis=0).max(), moved.sum(axis=1).max()) <= limit
        assert plan.imbalance <= plan_in_place(layout).imbalance


def test_long_documents_leave_by_their_ends() -> None:
    plan = plan_by_moving(Layout.from_packs([[1000], [10] * 100, [10] * 100]))
    moved = plan.pieces.select(plan.pieces.moved)

    assert set(moved.owner) == {0}
    assert set(moved.computing_rank) == {1, 2}
    assert moved.stop.max() == 1000
    assert plan.imbalance < 1.03


def test_balanced_packs_are_left_alone() -> None:
    layout = Layout.from_packs([[100, 50], [50, 100], [100, 50]])

    assert not plan_by_moving(layout, 8).moves_queries
    assert plan_by_moving(layout, 8).fingerprint == plan_in_place(layout).fingerprint


def test_ranks_without_tokens_compute_for_others() -> None:
    plan = plan_by_moving(Layout.from_packs([[4000], [], [], []]))

    assert plan.imbalance < 1.03
    assert plan.work.min() > 0


def test_documents_that_stay_keep_their_heads_together() -> None:
    plan = plan_by_moving(Layout.from_packs([[40_000, 300], [200] * 5, [100] * 9]), 8)
    divided = plan.tasks.document[plan.tasks.head != ALL_HEADS]

    assert set(divided.tolist()) == {0}


def test_an_exhausted_head_does_not_hide_the_others() -> None:
    """One document that must be taken apart entirely: every head of it runs out at some rank before the end."""
    layout = Layout.from_packs([[30_000], *([1000] for _ in range(23))])
    plan = plan_by_moving(layout, 4)

    assert plan.imbalance < 1.03
