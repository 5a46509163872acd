"""Routing of small layouts worked out by hand, exact counts, and plans that are refused."""

import random
from typing import Any

import numpy as np
import pytest

from distca_hf.layout import Layout
from distca_hf.packing.placement import place
from distca_hf.planning.plan import Plan
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.routing import KernelCall, Routing, route
from distca_hf.planning.task import Tasks
from distca_hf.planning.transfers import key_transfers
from support.layouts import random_layout


Task = tuple[int, int, int, int]  # document, start, stop, server


def routings(layout: Layout) -> list[Routing]:
    plan = plan_in_place(layout)
    return [route(plan, rank) for rank in range(layout.num_ranks)]


def calls_of(routing: Routing) -> list[tuple[Any, ...]]:
    return [
        (
            (call.query_start, call.query_stop),
            (call.key_start, call.key_stop),
            call.from_store,
            call.cu_seqlens_q.tolist(),
            call.cu_seqlens_k.tolist(),
        )
        for call in routing.calls
    ]


def foreign_plan(layout: Layout, tasks: list[Task]) -> Plan:
    """A plan that computes queries elsewhere than they are held; complete all the same."""
    plan = Plan(layout, Tasks.sort(*np.array(tasks, dtype=np.int64).T.copy()))
    plan.validate()
    return plan


# --- by hand


def test_two_ranks_that_share_one_document() -> None:
    """Rank 0 holds d1 and the beginning of d0, rank 1 holds d2 and the rest of d0, and one row of padding."""
    left, right = routings(Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [5, 8]))

    assert left.row_order.numbers.tolist() == [3, 4, 0, 1, 2]  # d0 before d1
    assert left.send_rows.numbers.tolist() == [0, 1]
    assert (left.send_counts.tolist(), left.receive_counts.tolist()) == ([0, 2], [0, 0])
    assert left.store_rows == len(left.own_rows.numbers) == len(left.received_to_store.numbers) == 0
    assert calls_of(left) == [((0, 5), (0, 5), False, [0, 2, 5], [0, 2, 5])]
    assert left.shared_rows.numbers.tolist() == [0, 1]

    assert right.row_order is None
    assert right.num_rows == 8
    assert right.send_rows.numbers.tolist() == []
    assert (right.send_counts.tolist(), right.receive_counts.tolist()) == ([0, 0], [2, 0])
    assert right.received_to_store.numbers.tolist() == [0, 1]
    assert (right.own_rows.numbers.tolist(), right.own_to_store.numbers.tolist()) == (
        [1, 2, 3, 4, 5, 6],
        [2, 3, 4, 5, 6, 7],
    )
    assert right.store_rows == 8
    assert calls_of(right) == [
        ((0, 1), (0, 1), False, [0, 1], [0, 1]),
        ((1, 7), (0, 8), True, [0, 6], [0, 8]),
    ]
    assert right.shared_rows.numbers.tolist() == [1, 2, 3, 4, 5, 6]
    assert left.exchanges
    assert right.exchanges


def test_several_tasks_of_one_document_read_one_stored_prefix() -> None:
    """The earlier one has a call of its own, on the beginning of the prefix; the last one shares its call."""
    first, _ = routings(
        Layout.from_segments([9, 5], [[(0, 2, 4), (0, 7, 9), (1, 3, 5)], [(0, 0, 2), (0, 4, 7), (1, 0, 3)]])
    )

    assert first.store_rows == 9 + 5
    assert calls_of(first) == [
        ((0, 2), (0, 4), True, [0, 2], [0, 4]),
        ((2, 6), (0, 14), True, [0, 2, 4], [0, 9, 14]),
    ]
    assert first.receive_counts.tolist() == [0, 2 + 3 + 3]
    assert sorted(first.received_to_store.numbers.tolist() + first.own_to_store.numbers.tolist()) == list(range(14))


def test_only_the_needed_part_of_a_prefix_travels() -> None:
    """The end of the document is held elsewhere and nobody who holds the middle needs it."""
    plan = plan_in_place(Layout.from_segments([9], [[(0, 0, 2)], [(0, 2, 5)], [(0, 5, 9)]]))
    transfers = key_transfers(plan)

    assert transfers.rows_between(3).tolist() == [[0, 2, 2], [0, 0, 3], [0, 0, 0]]
    assert len(transfers) == 3
    assert transfers.tokens.tolist() == [2, 2, 3]
    chosen = transfers.select(transfers.destination == 2)
    assert (chosen.source.tolist(), chosen.start.tolist(), chosen.stop.tolist()) == ([0, 1], [0, 2], [2, 5])


def test_documents_on_one_rank_each_need_no_exchange() -> None:
    for routing in routings(Layout.from_segments([4, 2, 3], [[(1, 0, 2), (2, 0, 1), (2, 1, 3)], [(0, 0, 4)]])):
        assert not routing.exchanges
        assert len(routing.send_rows.numbers) == routing.store_rows == len(routing.shared_rows.numbers) == 0
        assert len(routing.calls) == 1
        assert not routing.calls[0].from_store


def test_exchange_of_two_ranks_is_announced_to_a_third_that_has_no_part_in_it() -> None:
    layout = Layout.from_segments([4, 2], [[(0, 0, 1)], [(0, 1, 4)], [(1, 0, 2)], []])

    assert [routing.exchanges for routing in routings(layout)] == [True] * 4
    assert [len(routing.send_rows.numbers) for routing in routings(layout)] == [1, 0, 0, 0]


def test_rank_without_tokens_has_padding_rows_and_nothing_else() -> None:
    empty = routings(Layout.from_segments([4], [[(0, 0, 4)], []], [4, 3]))[1]

    assert empty.num_rows == 3
    assert empty.calls == ()
    assert empty.row_order is None


def test_padding_rows_stay_behind_the_tasks() -> None:
    routing = routings(Layout.from_segments([4, 2], [[(1, 0, 2), (0, 0, 4)]], [9]))[0]

    assert routing.row_order.numbers.tolist() == [2, 3, 4, 5, 0, 1, 6, 7, 8]
    assert routing.calls[-1].query_stop == 6


def test_transfers_given_are_the_same_as_transfers_derived() -> None:
    plan = plan_in_place(random_layout(random.Random(4), 4))
    transfers = key_transfers(plan)

    for rank in range(4):
        given, derived = route(plan, rank, transfers), route(plan, rank)
        assert calls_of(given) == calls_of(derived)
        assert given.send_rows.numbers.tolist() == derived.send_rows.numbers.tolist()
        assert given.received_to_store.numbers.tolist() == derived.received_to_store.numbers.tolist()


def test_all_index_arrays_are_int64() -> None:
    for seed in range(20):
        for routing in routings(random_layout(random.Random(seed), 3)):
            arrays = [
                routing.send_rows.numbers,
                routing.send_counts,
                routing.receive_counts,
                routing.received_to_store.numbers,
                routing.own_rows.numbers,
                routing.own_to_store.numbers,
                routing.shared_rows.numbers,
                *(call.cu_seqlens_q for call in routing.calls),
                *(call.cu_seqlens_k for call in routing.calls),
            ]
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
def test_pairs_of_a_call(queries: list[int], keys: list[int], pairs: int) -> None:
    call = KernelCall(0, 0, 0, 0, True, np.cumsum([0, *queries]), np.cumsum([0, *keys]))

    assert call.pairs == pairs


@pytest.mark.parametrize(
    ("lengths", "num_ranks"), [([2**20, 2**20, 77], 4), ([300_000, 5, 8000, 8000, 41_000], 7), ([9000] * 6, 4)]
)
def test_calls_of_all_ranks_attend_every_pair_once(lengths: list[int], num_ranks: int) -> None:
    plan = plan_in_place(place(lengths, num_ranks))
    pairs = [sum(call.pairs for call in route(plan, rank).calls) for rank in range(num_ranks)]

    assert pairs == plan.work.tolist()
    assert sum(pairs) == sum(tokens * (tokens + 1) // 2 for tokens in lengths)


# --- queries that move


@pytest.mark.parametrize(
    ("layout", "tasks", "rank"),
    [
        ([[(0, 0, 4)], [(1, 0, 2)]], [(0, 0, 4, 1), (1, 0, 2, 0)], 0),
        ([[(0, 0, 4)], [(1, 0, 2)]], [(0, 0, 4, 1), (1, 0, 2, 1)], 0),
        ([[(0, 0, 4)], [(1, 0, 2)]], [(0, 0, 4, 1), (1, 0, 2, 1)], 1),
        ([[(0, 0, 4), (1, 0, 2)], []], [(0, 0, 4, 0), (1, 0, 2, 1)], 0),
        ([[(0, 0, 4), (1, 0, 2)], []], [(0, 0, 4, 0), (1, 0, 2, 1)], 1),
        ([[(0, 0, 2), (1, 0, 2)], [(0, 2, 4)]], [(0, 0, 4, 0), (1, 0, 2, 1)], 0),
        ([[(0, 0, 1), (0, 3, 4)], [(0, 1, 3), (1, 0, 2)]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 2, 1)], 0),
        ([[(0, 0, 1), (0, 3, 4)], [(0, 1, 3), (1, 0, 2)]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 2, 1)], 1),
        ([[(0, 2, 4)], [(0, 0, 2), (1, 0, 2)]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 2, 1)], 0),
    ],
    ids=[
        "other document of other length",
        "nothing here",
        "all here",
        "some elsewhere",
        "some of elsewhere",
        "rest of a document",
        "as many tokens, others of the document",
        "as many tokens, others of the document, other rank",
        "as many tokens, the wrong half",
    ],
)
def test_queries_computed_elsewhere_are_sent_received_and_attend_all_pairs(
    layout: Any, tasks: list[Task], rank: int
) -> None:
    plan = foreign_plan(Layout.from_segments([4, 2], layout), tasks)
    routing, held = route(plan, rank), plan.layout.rank_tokens[rank]
    queries = routing.queries

    assert queries is not None
    assert sum(call.pairs for call in routing.calls) == plan.work[rank]
    assert sorted([*queries.local_rows.numbers, *queries.send_rows.numbers]) == list(range(held))
    assert sorted([*queries.local_to_query.numbers, *queries.received_to_query.numbers]) == list(
        range(queries.num_rows)
    )
    assert (queries.send_counts.sum(), queries.receive_counts.sum()) == (
        len(queries.send_rows.numbers),
        len(queries.received_to_query.numbers),
    )
