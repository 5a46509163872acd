"""Routing of random layouts whose queries stay where they are, against a simulation that moves tokens one by one."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.packing.placement import place
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.routing import LATE_SHARE
from distca_hf.planning.transfers import key_transfers
from support.layouts import random_layout
from support.simulation import (
    Simulation,
    check_attention,
    check_kept,
    check_keys,
    check_legs,
    check_orders,
    check_shared_rows,
)


WORLDS = {
    "seed": st.integers(0, 2**32 - 1),
    "num_ranks": st.sampled_from([1, 2, 3, 4, 5, 8]),
    "num_legs": st.sampled_from([1, 1, 2, 3, 7]),
}


def draw_world(seed: int, num_ranks: int, num_legs: int) -> Simulation:
    return Simulation(plan_in_place(random_layout(random.Random(seed), num_ranks)), num_legs)


@settings(max_examples=120)
@given(**WORLDS)
def test_every_missing_key_is_received_once_and_stored_in_order(seed: int, num_ranks: int, num_legs: int) -> None:
    check_keys(draw_world(seed, num_ranks, num_legs))


@settings(max_examples=120)
@given(**WORLDS)
def test_every_query_attends_to_its_causal_prefix_exactly_once(seed: int, num_ranks: int, num_legs: int) -> None:
    check_attention(draw_world(seed, num_ranks, num_legs))


@settings(max_examples=120)
@given(**WORLDS)
def test_shared_rows_and_orders(seed: int, num_ranks: int, num_legs: int) -> None:
    world = draw_world(seed, num_ranks, num_legs)

    check_shared_rows(world)
    check_orders(world)


@settings(max_examples=120)
@given(**WORLDS)
def test_all_own_rows_are_one_call(seed: int, num_ranks: int, num_legs: int) -> None:
    """In the order of the layout; its tasks are the longest ranges of consecutive tokens."""
    world = draw_world(seed, num_ranks, num_legs)

    for rank, routing in enumerate(world.routings):
        assert routing.num_rows == world.plan.layout.rank_rows[rank]
        assert routing.num_tokens == world.plan.layout.rank_tokens[rank]
        assert routing.rows_per_token == 1
        assert routing.guests == ()
        assert routing.queries is None
        assert [(call.query_start, call.query_stop) for call in routing.own] == [
            (0, routing.num_tokens) for _ in range(min(1, routing.num_tokens))
        ]
        squares = [queries for call in routing.own for queries, _ in world.tasks_of(rank, call)]
        for (*_, ((document, last, _),)), (((other, first, _),), *_) in pairwise(squares):
            assert (document, last + 1) != (other, first)


@settings(max_examples=120)
@given(**WORLDS)
def test_stored_keys_are_read_by_as_few_calls_as_can_be(seed: int, num_ranks: int, num_legs: int) -> None:
    """In a leg a new call begins only where queries do not follow each other, or keys of the store do not."""
    for routing in draw_world(seed, num_ranks, num_legs).routings:
        for far in routing.far_of_leg:
            for call, following in pairwise(far):
                assert (call.query_stop, call.key_stop) != (following.query_start, following.key_start)


@settings(max_examples=120)
@given(**WORLDS)
def test_calls_read_what_their_leg_brings_and_backward_what_all_did(seed: int, num_ranks: int, num_legs: int) -> None:
    world = draw_world(seed, num_ranks, num_legs)

    check_legs(world)
    check_kept(world)


@settings(max_examples=120)
@given(**WORLDS)
def test_key_transfers_are_what_the_routings_send(seed: int, num_ranks: int, num_legs: int) -> None:
    world = draw_world(seed, num_ranks, num_legs)
    transfers = key_transfers(world.plan, world.legs)
    by_leg = np.zeros((num_legs, num_ranks, num_ranks), dtype=np.int64)
    np.add.at(by_leg, (transfers.leg, transfers.source, transfers.destination), transfers.rows)

    assert transfers.rows_between(num_ranks).tolist() == [routing.send_counts.tolist() for routing in world.routings]
    assert by_leg.tolist() == np.stack([routing.leg_send_counts for routing in world.routings], axis=1).tolist()
    columns = (transfers.source, transfers.leg, transfers.destination, transfers.document, transfers.start)
    order = list(zip(*(column.tolist() for column in columns), strict=True))
    assert order == sorted(order)
    assert (transfers.tokens > 0).all()


@settings(max_examples=120)
@given(**WORLDS)
def test_late_work_is_the_same_on_all_ranks(seed: int, num_ranks: int, num_legs: int) -> None:
    """A share of what each has for itself, so that no rank waits for another one's results; not more than any has."""
    world = draw_world(seed, num_ranks, num_legs)
    tasks, work = world.plan.tasks, world.plan.work
    tokens, squares = tasks.stop - tasks.start, np.zeros(num_ranks)
    np.add.at(squares, tasks.server, tokens * (tokens + 1) / 2)
    late = [routing.late_share * square for routing, square in zip(world.routings, squares, strict=True)]

    working = [rank for rank in range(num_ranks) if work[rank]]
    expected = min(LATE_SHARE * sum(work) / len(working), min(squares[rank] for rank in working))
    for rank, routing in enumerate(world.routings):
        assert 0 <= routing.late_share <= 1
        assert late[rank] == pytest.approx(expected if rank in working else 0)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=12),
    num_ranks=st.sampled_from([1, 2, 3, 5, 8]),
    num_legs=st.sampled_from([1, 4]),
)
def test_placed_layouts_are_routed_as_exactly(lengths: list[int], num_ranks: int, num_legs: int) -> None:
    world = Simulation(plan_in_place(place(lengths, num_ranks)), num_legs)

    check_keys(world)
    check_orders(world)
