"""Routing of plans that divide heads and move queries, against a simulation that moves row by row, by definition."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.planning.planner import divide_stripe, plan_in_place
from distca_hf.planning.task import ALL_HEADS
from distca_hf.planning.traffic import bytes_between
from support.layouts import random_layout, random_plan, striped_layout
from support.simulation import (
    Simulation,
    check_attention,
    check_kept,
    check_keys,
    check_legs,
    check_orders,
    check_shared_rows,
)


DRAWN = {
    "seed": st.integers(0, 2**32 - 1),
    "num_ranks": st.sampled_from([1, 2, 3, 5, 8]),
    "head_groups": st.sampled_from([1, 2, 3, 8]),
    "striped": st.booleans(),
    "num_legs": st.sampled_from([1, 1, 2, 3]),
}


def draw(seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int) -> Simulation:
    rng = random.Random(seed)
    if striped:
        return Simulation(plan_in_place(striped_layout(rng, num_ranks), head_groups), num_legs)
    layout = random_layout(rng, num_ranks)
    return Simulation(random_plan(rng, layout, head_groups), num_legs)


@settings(max_examples=120)
@given(**DRAWN)
def test_every_query_attends_to_its_causal_prefix_exactly_once(
    seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int
) -> None:
    check_attention(draw(seed, num_ranks, head_groups, striped, num_legs))


@settings(max_examples=120)
@given(**DRAWN)
def test_only_what_is_needed_elsewhere_travels_and_once(
    seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int
) -> None:
    simulation = draw(seed, num_ranks, head_groups, striped, num_legs)
    groups = simulation.groups
    tokens = TokenBytes(query=7 * groups, output=5 * groups, key_value=3 * groups)
    moved = np.zeros((num_ranks, num_ranks), dtype=np.int64)

    check_keys(simulation)
    for rank, routing in enumerate(simulation.routings):
        moved[rank] += 3 * routing.send_counts
        if routing.queries is not None:
            moved[rank] += 7 * routing.queries.send_counts + 5 * routing.queries.receive_counts
    assert moved.tolist() == bytes_between(simulation.plan, tokens).tolist()


@settings(max_examples=120)
@given(**DRAWN)
def test_shared_rows_and_orders(seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int) -> None:
    simulation = draw(seed, num_ranks, head_groups, striped, num_legs)

    check_shared_rows(simulation)
    check_orders(simulation)


@settings(max_examples=120)
@given(**DRAWN)
def test_queries_that_leave_are_those_computed_elsewhere(
    seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int
) -> None:
    """And guest rows are the queries of tasks that have any from elsewhere, tasks whole."""
    simulation = draw(seed, num_ranks, head_groups, striped, num_legs)

    for rank, routing in enumerate(simulation.routings):
        leaving = {row for row in simulation.held(rank) if simulation.servers[row] != rank}
        guests = {row for row in simulation.computed(rank) if simulation.task_of[row] in simulation.guest_tasks}
        if routing.queries is None:
            assert not leaving
            assert not guests
            continue
        sent = [simulation.home[rank][place] for place in routing.queries.send_rows.numbers]
        assert sorted(sent) == sorted(leaving)
        assert sorted(simulation.guests[rank]) == sorted(guests)
        assert routing.queries.num_rows == len(guests)


@settings(max_examples=120)
@given(**DRAWN)
def test_calls_read_what_their_leg_brings_and_backward_what_all_did(
    seed: int, num_ranks: int, head_groups: int, striped: bool, num_legs: int
) -> None:
    simulation = draw(seed, num_ranks, head_groups, striped, num_legs)

    check_legs(simulation)
    check_kept(simulation)


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 12), head_groups=st.integers(1, 9))
def test_ranks_of_a_stripe_have_equal_work(seed: int, num_ranks: int, head_groups: int) -> None:
    """To within the context of the tokens at the two borders of a share."""
    rng = random.Random(seed)
    layout = striped_layout(rng, num_ranks, longest_tokens=5000)
    for stripe in layout.stripes:
        tasks = divide_stripe(stripe, head_groups)
        work = np.zeros(num_ranks, dtype=np.int64)
        covered = np.zeros((head_groups, stripe.stop), dtype=np.int64)
        for document, start, stop, rank, group in tasks:
            assert document == stripe.document
            assert stripe.first_rank <= rank < stripe.stop_rank
            work[rank] += (stop * (stop + 1) - start * (start + 1)) // 2
            covered[group, start:stop] += 1
        of_stripe = work[stripe.first_rank : stripe.stop_rank]
        assert of_stripe.max() - of_stripe.min() <= 2 * stripe.stop
        assert (covered[:, stripe.start :] == 1).all()
        assert (covered[:, : stripe.start] == 0).all()


def test_heads_of_other_documents_stay_together() -> None:
    """Only a document with a stripe has tasks of single groups."""
    plan = plan_in_place(striped_layout(random.Random(6), 3), 4)
    striped = {stripe.document for stripe in plan.layout.stripes}

    assert striped
    assert len(striped) < plan.layout.num_documents
    for document, head in zip(plan.tasks.document.tolist(), plan.tasks.head.tolist(), strict=True):
        assert (head == ALL_HEADS) == (document not in striped)
