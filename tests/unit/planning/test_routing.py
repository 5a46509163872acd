"""Routing of small layouts worked out by hand, exact counts, and queries that move."""

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from distca_hf.arrays import IndexRanges
from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout, Stripe
from distca_hf.placement.place import place
from distca_hf.planning.kernel_calls import CallKind, KernelCall
from distca_hf.planning.pieces import ALL_HEADS, Tasks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import key_transfers, received_bytes
from support.layouts import SCATTERED, random_layout, random_plan
from support.simulation import Simulation, check_attention, check_keys


Rows = tuple[int, int]  # the first one, and the one behind the last
Task = tuple[int, ...]  # document, start, stop, server, and the group of heads if not all


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
    assert (left.send_counts.tolist(), left.receive_counts.tolist()) == ([0, 2], [0, 0])
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
    assert (right.send_counts.tolist(), right.receive_counts.tolist()) == ([0, 0], [2, 0])
    assert numbers(right.received_to_remote_kv) == [[0, 1]]
    assert right.come_in_order
    assert numbers(right.shared_rows, right.send_in_shared, right.local_in_shared) == [[], [], []]
    assert (right.num_rows, right.num_tokens, right.remote_kv_rows) == (8, 7, 2)
    assert left.exchanges
    assert right.exchanges
    assert left.queries is right.queries is None


def test_several_parts_of_one_document_read_one_stored_prefix() -> None:
    """The earlier one has a far call of its own, on the beginning of the prefix; the last one shares its call."""
    first, second = routings(SCATTERED)

    assert told(first.local) == [own((0, 6), [0, 2, 4, 6])]
    assert told(first.prefix) == [
        far((0, 2), (0, 2), [0, 2], [0, 2]),
        far((2, 6), (0, 7 + 3), [0, 2, 4], [0, 7, 10]),
    ]
    assert first.remote_kv_rows == 7 + 3
    assert first.receive_counts.tolist() == [0, 2 + 3 + 3]
    assert numbers(first.local_rows, first.local_to_remote_kv) == [
        [0, 1],
        [2, 3],
    ]  # local keys between those of the other rank
    assert numbers(first.received_to_remote_kv) == [[0, 1, 4, 5, 6, 7, 8, 9]]
    assert not first.come_in_order
    assert numbers(first.send_rows, first.shared_rows) == [[0, 1], [0, 1]]  # d0[2:4], which rank 1 needs for d0[4:7]
    assert numbers(first.send_in_shared, first.local_in_shared) == [[0, 1], [0, 1]]

    assert told(second.local) == [own((0, 8), [0, 2, 5, 8])]
    assert told(second.prefix) == [far((2, 5), (0, 4), [0, 3], [0, 4])]
    assert numbers(second.local_rows, second.local_to_remote_kv, second.received_to_remote_kv) == [
        [0, 1],
        [0, 1],
        [2, 3],
    ]
    assert numbers(second.send_rows, second.shared_rows) == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert numbers(second.send_in_shared, second.local_in_shared) == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1]]


def test_parts_that_lie_apart_have_far_calls_of_their_own() -> None:
    """d2 lies between the ends of d0 and d1: keys follow each other in the remote KV, queries do not."""
    (_, routing) = routings(
        Layout.from_segments([4, 5, 3], [[(0, 0, 2), (1, 0, 4)], [(0, 2, 4), (2, 0, 3), (1, 4, 5)]])
    )

    assert told(routing.local) == [own((0, 6), [0, 2, 5, 6])]
    assert told(routing.prefix) == [far((0, 2), (0, 2), [0, 2], [0, 2]), far((5, 6), (2, 6), [0, 1], [0, 4])]


def test_neighbouring_segments_of_a_document_are_one_square() -> None:
    (_, routing) = routings(Layout.from_segments([9], [[(0, 0, 2)], [(0, 2, 5), (0, 5, 9)]]))

    assert told(routing.local) == [own((0, 7), [0, 7])]
    assert told(routing.prefix) == [far((0, 7), (0, 2), [0, 7], [0, 2])]


def test_pieces_of_a_document_in_the_wrong_order_meet_in_the_store() -> None:
    """The end lies before the beginning: what comes between is copied, and nobody exchanges anything."""
    (routing,) = routings(Layout.from_segments([5], [[(0, 3, 5), (0, 0, 3)]]))

    assert told(routing.local) == [own((0, 5), [0, 2, 5])]
    assert told(routing.prefix) == [far((0, 2), (0, 3), [0, 2], [0, 3])]
    assert numbers(routing.local_rows, routing.local_to_remote_kv, routing.shared_rows) == [
        [2, 3, 4],
        [0, 1, 2],
        [2, 3, 4],
    ]
    assert not routing.exchanges
    assert not routing.come_in_order


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


def test_documents_on_one_rank_each_need_no_exchange() -> None:
    for routing in routings(Layout.from_segments([4, 2, 3], [[(1, 0, 2), (2, 0, 1), (2, 1, 3)], [(0, 0, 4)]])):
        assert not routing.exchanges
        assert len(routing.send_rows.numbers) == routing.remote_kv_rows == len(routing.shared_rows.numbers) == 0
        assert len(routing.local) == 1
        assert routing.prefix == routing.remote_queries == ()


def test_exchange_of_two_ranks_is_announced_to_a_third_that_has_no_part_in_it() -> None:
    layout = Layout.from_segments([4, 2], [[(0, 0, 1)], [(0, 1, 4)], [(1, 0, 2)], []])

    assert [routing.exchanges for routing in routings(layout)] == [True] * 4
    assert [len(routing.send_rows.numbers) for routing in routings(layout)] == [1, 0, 0, 0]


def test_rank_without_tokens_has_padding_rows_and_nothing_else() -> None:
    empty = routings(Layout.from_segments([4], [[(0, 0, 4)], []], [4, 3]))[1]

    assert (empty.num_rows, empty.num_tokens) == (3, 0)
    assert empty.local == empty.prefix == empty.remote_queries == ()
    assert empty.late_share == 0
    assert empty.pairs == 0


def test_padding_rows_are_in_no_call() -> None:
    routing = routings(Layout.from_segments([4, 2], [[(1, 0, 2), (0, 0, 4)]], [9]))[0]

    assert (routing.num_rows, routing.num_tokens) == (9, 6)
    assert all_calls(routing) == [own((0, 6), [0, 2, 6])]


def test_transfers_given_are_the_same_as_transfers_derived() -> None:
    plan = plan_in_place(random_layout(random.Random(4), 4))
    transfers = key_transfers(plan)

    for rank in range(4):
        given, derived = route(plan, rank, transfers), route(plan, rank)
        assert all_calls(given) == all_calls(derived)
        assert given.send_rows.numbers.tolist() == derived.send_rows.numbers.tolist()
        assert given.received_to_remote_kv.numbers.tolist() == derived.received_to_remote_kv.numbers.tolist()


@pytest.mark.parametrize("head_groups", [1, 3])
def test_all_index_arrays_are_int64(head_groups: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        layout = random_layout(rng, 3)
        for routing in (*routings(layout), *routings_of(random_plan(rng, layout, head_groups))):
            runs = [value for value in vars(routing).values() if isinstance(value, IndexRanges)]
            arrays = [routing.chunk_send_counts, routing.chunk_receive_counts, routing.held]
            if routing.queries is not None:
                runs += [value for value in vars(routing.queries).values() if isinstance(value, IndexRanges)]
                arrays += [routing.queries.chunk_send_counts, routing.queries.chunk_receive_counts]
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


@pytest.mark.parametrize(
    ("lengths", "num_ranks"), [([2**20, 2**20, 77], 4), ([300_000, 5, 8000, 8000, 41_000], 7), ([9000] * 6, 4)]
)
def test_calls_of_all_ranks_attend_every_pair_once(lengths: list[int], num_ranks: int) -> None:
    plan = plan_in_place(place(lengths, num_ranks))
    pairs = [routing.pairs for routing in routings_of(plan)]

    assert pairs == plan.work.tolist()
    assert sum(pairs) == sum(tokens * (tokens + 1) // 2 for tokens in lengths)


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
    assert (left.queries.send_counts.tolist(), left.queries.receive_counts.tolist()) == ([0, 2], [0, 0])

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


def test_guests_and_own_queries_read_one_stored_prefix() -> None:
    """Rank 1 holds the end of d0 and keeps it; the middle comes as a remote query. Both read the beginning."""
    layout = Layout.from_segments([7], [[(0, 0, 5)], [(0, 5, 7)]])
    _, right = routings_of(foreign_plan(layout, [(0, 0, 3, 0), (0, 3, 5, 1), (0, 5, 7, 1)]))

    assert right.remote_kv_rows == 5
    assert all_calls(right) == [
        own((0, 2), [0, 2]),
        far((0, 2), (0, 5), [0, 2], [0, 5]),
        remote_queries((0, 2), (0, 5), [0, 2], [0, 5]),
    ]
    assert right.queries is not None
    assert right.queries.come_in_order
    assert right.come_in_order


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


def test_groups_that_stay_together_are_one_own_call() -> None:
    """Two of three groups of d0 stay; d1, whose heads are not divided, has a call of its own."""
    layout = Layout.from_segments([3, 2], [[(0, 0, 3), (1, 0, 2)], []])
    left, right = routings_of(
        foreign_plan(layout, [(0, 0, 3, 0, 0), (0, 0, 3, 0, 1), (0, 0, 3, 1, 2), (1, 0, 2, 0)], head_groups=3)
    )

    assert all_calls(left) == [own((0, 3), [0, 3], (0, 2)), own((3, 5), [0, 2], (0, 3))]
    assert numbers(left.send_rows, left.shared_rows) == [[2, 5, 8], [2, 5, 8]]
    assert all_calls(right) == [remote_queries((0, 3), (0, 3), [0, 3], [0, 3])]


def test_far_calls_of_all_heads_and_of_single_groups() -> None:
    """The ends of d0, with its heads together, and of d1, whose groups are tasks of their own, stay on rank 1."""
    layout = Layout.from_segments([3, 4], [[(0, 0, 1), (1, 0, 2)], [(0, 1, 3), (1, 2, 4)]])
    divided = [(1, start, start + 2, start // 2, group) for start in (0, 2) for group in (0, 1)]
    _, routing = routings_of(foreign_plan(layout, [(0, 0, 1, 0), (0, 1, 3, 1), *divided], head_groups=2))

    assert all_calls(routing) == [
        own((0, 4), [0, 2, 4], (0, 2)),
        far((0, 2), (0, 2), [0, 2], [0, 1], (0, 2)),
        far((2, 4), (2, 4), [0, 2], [0, 2], (0, 1)),
        far((2, 4), (4, 6), [0, 2], [0, 2], (1, 2)),
    ]
    assert routing.remote_kv_rows == 2 + 4
    assert numbers(routing.received_to_remote_kv) == [[0, 1, 2, 3, 4, 5]]
    assert routing.come_in_order


@pytest.mark.parametrize(
    ("layout", "tasks"),
    [
        ([[(0, 0, 4)], [(1, 0, 2)]], [(0, 0, 4, 1), (1, 0, 2, 0)]),
        ([[(0, 0, 4)], [(1, 0, 2)]], [(0, 0, 4, 1), (1, 0, 2, 1)]),
        ([[(0, 0, 4), (1, 0, 2)], []], [(0, 0, 4, 0), (1, 0, 2, 1)]),
        ([[(0, 0, 2), (1, 0, 2)], [(0, 2, 4)]], [(0, 0, 4, 0), (1, 0, 2, 1)]),
        ([[(0, 0, 1), (0, 3, 4)], [(0, 1, 3), (1, 0, 2)]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 2, 1)]),
        ([[(0, 2, 4)], [(0, 0, 2), (1, 0, 2)]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 2, 1)]),
    ],
    ids=[
        "other document of other length",
        "all on one rank",
        "some elsewhere",
        "rest of a document",
        "as many tokens, others of the document",
        "as many tokens, the wrong half",
    ],
)
def test_queries_computed_elsewhere_are_sent_received_and_attend_all_pairs(layout: Any, tasks: list[Task]) -> None:
    simulation = Simulation(foreign_plan(Layout.from_segments([4, 2], layout), tasks))

    check_keys(simulation)
    check_attention(simulation)
    for rank, routing in enumerate(simulation.routings):
        assert routing.queries is not None
        own_tokens = [row for call in routing.local for row in range(call.query_start, call.query_stop)]
        leaving_or_guests = [*routing.queries.send_rows.numbers, *routing.queries.local_rows.numbers]
        assert sorted([*own_tokens, *leaving_or_guests]) == list(range(len(simulation.held(rank))))
        assert routing.queries.send_counts.sum() == routing.queries.send_rows.total
        assert routing.queries.receive_counts.sum() == routing.queries.received_to_queries.total


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
