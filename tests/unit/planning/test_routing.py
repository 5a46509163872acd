"""Routing of small layouts worked out by hand, exact counts, and queries that move."""

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IndexRanges
from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout, Stripe
from distca_hf.placement.place import place
from distca_hf.planning.kernel_calls import CallKind, KernelCall, Span, adding_calls
from distca_hf.planning.pieces import ALL_HEADS, Tasks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import key_transfers, received_bytes
from support.layouts import random_layout, random_plan


Rows = tuple[int, int]  # the first one, and the one behind the last
Task = tuple[int, ...]  # document, start, stop, rank, and the group of heads if not all


def routings(layout: Layout) -> list[Routing]:
    return routings_of(plan_in_place(layout))


def routings_of(plan: Plan) -> list[Routing]:
    return [route(plan, rank) for rank in range(plan.layout.num_ranks)]


def own(rows: Rows, offsets: list[int], heads: tuple[int, int] = (0, 1)) -> tuple[Any, ...]:
    """What `told` says of an local call: squares of the same rows."""
    return rows, rows, offsets, offsets, heads, CallKind.LOCAL


def far(
    queries: Rows, keys: Rows, query_offsets: list[int], key_offsets: list[int], heads: tuple[int, int] = (0, 1)
) -> tuple[Any, ...]:
    """What `told` says of a far call: no mask."""
    return queries, keys, query_offsets, key_offsets, heads, CallKind.PREFIX


def remote_queries(
    queries: Rows, keys: Rows, query_offsets: list[int], key_offsets: list[int], rows_per_token: int = 1
) -> tuple[Any, ...]:
    """What `told` says of a call with queries of other ranks."""
    return queries, keys, query_offsets, key_offsets, (0, rows_per_token), CallKind.REMOTE_QUERIES


def told(calls: tuple[KernelCall, ...]) -> list[tuple[Any, ...]]:
    return [
        (
            (call.query_start, call.query_stop),
            (call.key_start, call.key_stop),
            call.cu_seqlens_q.tolist(),
            call.cu_seqlens_k.tolist(),
            call.heads,
            call.kind,
        )
        for call in calls
    ]


def all_calls(routing: Routing) -> list[tuple[Any, ...]]:
    return told((*routing.local, *routing.prefix, *routing.remote_queries))


def numbers(*runs: IndexRanges) -> list[list[int]]:
    return [part.numbers.tolist() for part in runs]


def foreign_plan(layout: Layout, tasks: list[Task], head_groups: int = 1) -> Plan:
    """A plan that computes queries elsewhere than they are held; complete all the same."""
    columns = np.array([(*task, ALL_HEADS)[:5] for task in tasks], dtype=np.int64).T.copy()
    plan = Plan(layout, Tasks.sort(*columns, head_groups=head_groups))
    plan.validate()
    return plan


# --- by hand


def test_two_ranks_that_share_one_document() -> None:
    """Rank 0 holds d1 and the beginning of d0, rank 1 holds d2 and the rest of d0, and one row of padding."""
    left, right = routings(Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [5, 8]))

    assert told(left.local) == [own((0, 5), [0, 3, 5])]  # d1 before d0, as the layout has them
    assert left.prefix == left.remote_queries == ()
    assert numbers(left.send_rows, left.local_rows, left.local_to_remote_kv, left.received_to_remote_kv) == [
        [3, 4],
        [],
        [],
        [],
    ]
    assert (left.send_counts.tolist(), left.receive_counts.tolist()) == ([[0, 2]], [[0, 0]])
    assert numbers(left.shared_rows, left.send_in_shared, left.local_in_shared) == [[3, 4], [0, 1], []]
    assert (left.num_rows, left.num_tokens, left.remote_kv_rows) == (5, 5, 0)

    assert told(right.local) == [own((0, 7), [0, 1, 7])]  # the square of d0[2:8] among them
    assert told(right.prefix) == [far((1, 7), (0, 2), [0, 6], [0, 2])]  # its prefix
    assert right.remote_queries == ()
    assert numbers(right.send_rows, right.local_rows, right.local_to_remote_kv) == [
        [],
        [],
        [],
    ]  # local keys stay where they are
    assert (right.send_counts.tolist(), right.receive_counts.tolist()) == ([[0, 0]], [[2, 0]])
    assert numbers(right.received_to_remote_kv) == [[0, 1]]
    assert right.come_in_order
    assert numbers(right.shared_rows, right.send_in_shared, right.local_in_shared) == [[], [], []]
    assert (right.num_rows, right.num_tokens, right.remote_kv_rows) == (8, 7, 2)
    assert left.exchanges
    assert right.exchanges
    assert left.queries is right.queries is None


def test_only_the_needed_part_of_a_prefix_travels() -> None:
    """The end of the document is held elsewhere and nobody who holds the middle needs it."""
    plan = plan_in_place(Layout.from_segments([9], [[(0, 0, 2)], [(0, 2, 5)], [(0, 5, 9)]]))
    transfers = key_transfers(plan)

    assert transfers.rows_between(3).tolist() == [[0, 2, 2], [0, 0, 3], [0, 0, 0]]
    assert len(transfers) == 3
    assert transfers.tokens.tolist() == [2, 2, 3]
    chosen = transfers.select(transfers.destination == 2)
    assert (chosen.source.tolist(), chosen.start.tolist(), chosen.stop.tolist()) == ([0, 1], [0, 2], [2, 5])
    assert [routing.remote_kv_rows for routing in routings_of(plan)] == [0, 2, 5]


def test_exchange_of_two_ranks_is_announced_to_a_third_that_has_no_part_in_it() -> None:
    layout = Layout.from_segments([4, 2], [[(0, 0, 1)], [(0, 1, 4)], [(1, 0, 2)], []])

    assert [routing.exchanges for routing in routings(layout)] == [True] * 4
    assert [len(routing.send_rows.numbers) for routing in routings(layout)] == [1, 0, 0, 0]


@pytest.mark.parametrize("head_groups", [1, 3])
def test_all_index_arrays_are_int64(head_groups: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        layout = random_layout(rng, 3)
        for routing in (*routings(layout), *routings_of(random_plan(rng, layout, head_groups))):
            runs = [value for value in vars(routing).values() if isinstance(value, IndexRanges)]
            arrays = [routing.send_counts, routing.receive_counts, routing.held]
            if routing.queries is not None:
                runs += [value for value in vars(routing.queries).values() if isinstance(value, IndexRanges)]
                arrays += [routing.queries.send_counts, routing.queries.receive_counts]
            for call in (*routing.local, *routing.prefix, *routing.remote_queries):
                arrays += [call.cu_seqlens_q, call.cu_seqlens_k]
            assert len(runs) == 8 + 4 * (routing.queries is not None)
            arrays += [part.numbers for part in runs]
            assert {array.dtype for array in arrays} == {np.dtype(np.int64)}


# --- pairs


@pytest.mark.parametrize(
    ("queries", "keys", "pairs"),
    [
        ([1], [1], 1),
        ([4], [4], 10),
        ([1], [9], 9),
        ([3], [5], 3 + 4 + 5),
        ([2, 0, 3], [2, 0, 5], 3 + 12),
        ([2**20], [2**20], 2**19 * (2**20 + 1)),
        ([2**31 - 1], [2**31 - 1], 2**30 * (2**31 - 1)),
    ],
)
def test_pairs_of_a_causal_call(queries: list[int], keys: list[int], pairs: int) -> None:
    call = KernelCall(CallKind.LOCAL, 0, 0, 0, 0, np.cumsum([0, *queries]), np.cumsum([0, *keys]), (2, 3))

    assert call.pairs == pairs


@pytest.mark.parametrize(
    ("queries", "keys", "pairs"),
    [([1], [1], 1), ([4], [4], 16), ([7], [2], 14), ([3, 1], [5, 8], 15 + 8), ([2**20], [2**20], 2**40)],
)
def test_pairs_of_a_call_without_a_mask(queries: list[int], keys: list[int], pairs: int) -> None:
    call = KernelCall(CallKind.PREFIX, 0, 0, 0, 0, np.cumsum([0, *queries]), np.cumsum([0, *keys]), (0, 1))

    assert call.pairs == pairs


@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        ((0, 4), 4),
        ((1, 3), 2),
    ],
    ids=["all heads", "some"],
)
def test_pairs_count_every_group_of_heads(heads: tuple[int, int], groups: int) -> None:
    call = KernelCall(CallKind.LOCAL, 0, 0, 0, 0, np.array([0, 2, 5]), np.array([0, 2, 5]), heads)

    assert call.groups == groups
    assert call.pairs_of_tasks.tolist() == [3 * groups, 6 * groups]
    assert call.pairs == 9 * groups


# --- queries that move


def test_guest_task_with_queries_of_two_ranks() -> None:
    """Rank 1 computes d0[2:6], of which it holds [4:6), and d1; rank 0 keeps d0[0:2], and d2 behind what left."""
    layout = Layout.from_segments([6, 2, 2], [[(0, 0, 4), (2, 0, 2)], [(1, 0, 2), (0, 4, 6)]])
    left, right = routings_of(foreign_plan(layout, [(0, 0, 2, 0), (0, 2, 6, 1), (1, 0, 2, 1), (2, 0, 2, 0)]))

    assert all_calls(left) == [own((0, 2), [0, 2]), own((4, 6), [0, 2])]
    assert numbers(left.send_rows, left.shared_rows, left.local_rows) == [[0, 1, 2, 3], [0, 1, 2, 3], []]
    assert left.queries is not None
    assert left.queries.num_rows == 0
    assert numbers(left.queries.send_rows, left.queries.local_rows) == [[2, 3], []]
    assert (left.queries.send_counts.tolist(), left.queries.receive_counts.tolist()) == ([[0, 2]], [[0, 0]])

    assert all_calls(right) == [own((0, 2), [0, 2]), remote_queries((0, 4), (0, 6), [0, 4], [0, 6])]
    assert right.remote_kv_rows == 6
    assert numbers(right.local_rows, right.local_to_remote_kv, right.received_to_remote_kv) == [
        [2, 3],
        [4, 5],
        [0, 1, 2, 3],
    ]
    assert right.queries is not None
    assert right.queries.num_rows == 4
    assert numbers(right.queries.received_to_queries, right.queries.local_rows, right.queries.local_to_queries) == [
        [0, 1],
        [2, 3],
        [2, 3],
    ]
    assert not right.queries.come_in_order


def test_heads_of_a_stripe_are_divided() -> None:
    """Each of two ranks holds half of a document and computes one of two groups of heads; rows are token x group."""
    layout = Layout.from_segments([4], [[(0, 0, 2)], [(0, 2, 4)]], None, [Stripe(0, 0, 4, 0, 2)])
    left, right = routings_of(plan_in_place(layout, head_groups=2))

    for routing in (left, right):
        assert routing.rows_per_token == 2
        assert all_calls(routing) == [remote_queries((0, 4), (0, 4), [0, 4], [0, 4])]
        assert routing.queries is not None
        assert routing.queries.num_rows == 4
    assert numbers(left.send_rows, left.local_rows) == [[1, 3], [0, 2]]
    assert numbers(left.local_to_remote_kv, left.received_to_remote_kv) == [[0, 1], [2, 3]]
    assert numbers(right.send_rows, right.local_rows) == [[0, 2], [1, 3]]
    assert numbers(right.local_to_remote_kv, right.received_to_remote_kv) == [[2, 3], [0, 1]]
    assert numbers(left.shared_rows, left.send_in_shared, left.local_in_shared) == [[0, 2, 1, 3], [2, 3], [0, 1]]
    assert left.queries is not None
    assert numbers(left.queries.send_rows, left.queries.local_rows, left.queries.local_to_queries) == [
        [1, 3],
        [0, 2],
        [0, 1],
    ]


def test_received_bytes_of_many_ranks_take_no_memory_for_pairs_of_ranks() -> None:
    """One document over all of 2,048 ranks: the last one holds the first keys and the last ones, all others come."""
    ranks, tokens = 2048, 2048 * 16
    plan = plan_in_place(place([tokens], ranks))
    size = TokenBytes(query=1, output=1, key_value=1)
    received_bytes(plan, size)  # pieces are cut
    tracemalloc.start()
    received = received_bytes(plan, size)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_bytes < ranks**2
    assert tokens - 2 * 16 <= received.max() < tokens


# --- calls that add to what larger ones write


@pytest.mark.parametrize(
    ("spans", "adding"),
    [
        ([], []),
        ([(0, 4), (4, 9)], []),
        ([(0, 4), (0, 9)], [0]),
        ([(0, 9), (3, 6)], [1]),
        ([(0, 9), (0, 9)], [1]),
        ([(10, 12), (0, 9), (0, 2), (10, 20), (5, 6)], [0, 2, 4]),
        ([(0, 2), (0, 5), (0, 9)], None),
        ([(0, 5), (3, 9)], None),
        ([(0, 5), (5, 9), (4, 6)], None),
    ],
    ids=str,
)
def test_smaller_of_two_calls_adds(spans: list[Span], adding: list[int] | None) -> None:
    assert adding_calls(spans) == (None if adding is None else set(adding))


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda span: (span[0], span[0] + span[1])), max_size=8
    )
)
def test_every_row_is_written_before_something_is_added(spans: list[Span]) -> None:
    adding = adding_calls(spans)
    readers = [[index for index, span in enumerate(spans) if row in range(*span)] for row in range(42)]
    if adding is None:
        others = [(one, other) for one in spans for other in spans if one != other]
        crossing = any(a[0] < b[0] < a[1] < b[1] for a, b in others)
        assert crossing or max(len(of_row) for of_row in readers) > 2
        return
    for of_row in readers:
        writers = [index for index in of_row if index not in adding]
        assert len(writers) == min(1, len(of_row))
        assert len(of_row) <= 2
        assert all(
            spans[index][1] - spans[index][0] <= spans[writers[0]][1] - spans[writers[0]][0] for index in of_row
        )
