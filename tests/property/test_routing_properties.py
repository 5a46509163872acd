"""Routing of random plans, which leave queries where they are, move them, or divide heads, against a simulation that
moves row by row, by definition."""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL_MASK, Mask, TokenBytes
from distca_hf.placement.place import place
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import divide_stripe, plan_in_place
from distca_hf.planning.routing import LATE_SHARE
from distca_hf.planning.transfers import bytes_between, key_transfers, received_bytes
from support.layouts import random_layout, random_plan, striped_layout, with_mask
from support.simulation import (
    Simulation,
    check_attention,
    check_chunks,
    check_kept,
    check_keys,
    check_orders,
    check_shared_rows,
)


@dataclass(frozen=True)
class Case:
    """A random plan."""

    kind: Literal["in place", "moved", "striped"]
    seed: int
    num_ranks: int
    head_groups: int
    num_chunks: int
    mask: Mask

    def simulated(self) -> Simulation:
        rng = random.Random(self.seed)
        if self.kind == "striped":
            plan = plan_in_place(striped_layout(rng, self.num_ranks), self.head_groups, self.mask)
        elif self.kind == "in place":
            plan = plan_in_place(random_layout(rng, self.num_ranks), mask=self.mask)
        else:
            plan = with_mask(random_plan(rng, random_layout(rng, self.num_ranks), self.head_groups), self.mask)
        return Simulation(plan, self.num_chunks)


CAUSAL = st.just(CAUSAL_MASK)
SHORTER = st.one_of(st.integers(1, 12), st.integers(1, 50))
WINDOWS_AND_CHUNKS = st.builds(Mask, SHORTER, chunked=st.booleans())


def cases(
    kinds: list[str], head_groups: list[int], masks: st.SearchStrategy[Mask] = CAUSAL
) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        seed=st.integers(0, 2**32 - 1),
        num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
        head_groups=st.sampled_from(head_groups),
        num_chunks=st.sampled_from([1, 1, 2, 3, 7]),
        mask=masks,
    )


IN_PLACE = cases(["in place"], [1])
ANY = cases(["in place", "moved", "striped"], [1, 2, 3, 8], CAUSAL | WINDOWS_AND_CHUNKS)


# --- all plans


@given(case=ANY)
def test_every_query_attends_to_what_its_mask_shows_exactly_once(case: Case) -> None:
    check_attention(case.simulated())


@given(case=ANY)
def test_only_what_is_needed_elsewhere_travels_and_once(case: Case) -> None:
    simulation = case.simulated()
    groups = simulation.groups
    tokens = TokenBytes(query=7 * groups, output=5 * groups, key_value=3 * groups)
    moved = np.zeros((case.num_ranks, case.num_ranks), dtype=np.int64)

    check_keys(simulation)
    for rank, routing in enumerate(simulation.routings):
        moved[rank] += 3 * routing.send_counts.sum(axis=0)
        if routing.queries is not None:
            moved[rank] += 7 * routing.queries.send_counts.sum(axis=0) + 5 * routing.queries.receive_counts.sum(axis=0)
    between = bytes_between(simulation.plan, tokens)
    assert moved.tolist() == between.tolist()
    assert received_bytes(simulation.plan, tokens).tolist() == between.sum(axis=0).tolist()


@given(case=ANY)
def test_calls_read_rows_of_their_chunk_and_backward_those_of_all(case: Case) -> None:
    """And rows that come twice are known, and all orders are those of documents."""
    simulation = case.simulated()

    check_shared_rows(simulation)
    check_orders(simulation)
    check_chunks(simulation)
    check_kept(simulation)


@given(case=ANY)
def test_queries_that_leave_are_those_computed_elsewhere(case: Case) -> None:
    """And remote-query rows are the queries of tasks that have any from elsewhere, tasks whole."""
    simulation = case.simulated()

    for rank, routing in enumerate(simulation.routings):
        leaving = {row for row in simulation.held(rank) if simulation.computing_ranks[row] != rank}
        remote_queries = {
            row for row in simulation.computed(rank) if simulation.task_of[row] in simulation.remote_tasks
        }
        if routing.queries is None:
            assert not leaving
            assert not remote_queries
            continue
        sent = [simulation.home[rank][place] for place in routing.queries.send_rows.numbers]
        assert sorted(sent) == sorted(leaving)
        assert sorted(simulation.remote_queries[rank]) == sorted(remote_queries)
        assert routing.queries.num_rows == len(remote_queries)


@given(case=ANY)
def test_key_transfers_are_what_the_routings_send(case: Case) -> None:
    world, num_ranks = case.simulated(), case.num_ranks
    transfers = key_transfers(world.plan, world.chunks)
    by_chunk = np.zeros((case.num_chunks, num_ranks, num_ranks), dtype=np.int64)
    np.add.at(by_chunk, (transfers.chunk, transfers.source, transfers.destination), transfers.rows)

    assert transfers.rows_between(num_ranks).tolist() == by_chunk.sum(axis=0).tolist()
    assert by_chunk.tolist() == np.stack([routing.send_counts for routing in world.routings], axis=1).tolist()
    way = transfers.source, transfers.chunk, transfers.destination
    columns = *way, transfers.document, transfers.head, transfers.start
    order = list(zip(*(column.tolist() for column in columns), strict=True))
    assert order == sorted(order)
    assert (transfers.tokens > 0).all()


# --- queries stay where they are


@given(case=IN_PLACE)
def test_all_own_rows_are_one_call(case: Case) -> None:
    """In the order of the layout; its tasks are the longest ranges of consecutive tokens."""
    world = case.simulated()

    for rank, routing in enumerate(world.routings):
        assert routing.num_rows == world.plan.layout.rank_rows[rank]
        assert routing.num_tokens == world.plan.layout.rank_tokens[rank]
        assert routing.rows_per_token == 1
        assert routing.remote_queries == ()
        assert routing.queries is None
        assert [(call.query_start, call.query_stop) for call in routing.local] == [
            (0, routing.num_tokens) for _ in range(min(1, routing.num_tokens))
        ]
        squares = [queries for call in routing.local for queries, _ in world.tasks_of(rank, call)]
        for (*_, ((document, last, _),)), (((other, first, _),), *_) in pairwise(squares):
            assert (document, last + 1) != (other, first)


@given(case=IN_PLACE)
def test_stored_keys_are_read_by_as_few_calls_as_can_be(case: Case) -> None:
    """In a chunk a new call begins only where queries do not follow each other, or keys of the remote KV do not."""
    for routing in case.simulated().routings:
        for far in routing.prefix_of_chunk:
            for call, following in pairwise(far):
                assert (call.query_stop, call.key_stop) != (following.query_start, following.key_start)


@given(case=IN_PLACE)
def test_late_work_is_the_same_on_all_ranks(case: Case) -> None:
    """A share of what each has for itself, so that no rank waits for another one's results; not more than any has."""
    world = case.simulated()
    tasks, work = world.plan.tasks, world.plan.work
    tokens, squares = tasks.stop - tasks.start, np.zeros(case.num_ranks)
    np.add.at(squares, tasks.rank, tokens * (tokens + 1) / 2)
    late = [routing.late_share * square for routing, square in zip(world.routings, squares, strict=True)]

    working = [rank for rank in range(case.num_ranks) if work[rank]]
    expected = min(LATE_SHARE * sum(work) / len(working), min(squares[rank] for rank in working))
    for rank, routing in enumerate(world.routings):
        assert 0 <= routing.late_share <= 1
        assert late[rank] == pytest.approx(expected if rank in working else 0)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=12),
    num_ranks=st.sampled_from([1, 2, 3, 5, 8]),
    num_chunks=st.sampled_from([1, 4]),
)
def test_placed_layouts_are_routed_as_exactly(lengths: list[int], num_ranks: int, num_chunks: int) -> None:
    world = Simulation(plan_in_place(place(lengths, num_ranks)), num_chunks)

    check_keys(world)
    check_orders(world)


# --- heads are divided


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
