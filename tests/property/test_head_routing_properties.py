"""Routing of plans that divide heads and move queries, against a simulation that moves row by row, by definition."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.planning.plan import Plan
from distca_hf.planning.planner import divide_stripe, plan_in_place
from distca_hf.planning.routing import route
from distca_hf.planning.runs import Runs
from distca_hf.planning.task import ALL_HEADS
from distca_hf.planning.traffic import bytes_between
from support.layouts import random_layout, random_plan, striped_layout


Row = tuple[int, int, int]  # document, position, group of heads

DRAWN = {
    "seed": st.integers(0, 2**32 - 1),
    "num_ranks": st.sampled_from([1, 2, 3, 5, 8]),
    "head_groups": st.sampled_from([1, 2, 3, 8]),
    "striped": st.booleans(),
}


def draw(seed: int, num_ranks: int, head_groups: int, striped: bool) -> Plan:
    rng = random.Random(seed)
    if striped:
        return plan_in_place(striped_layout(rng, num_ranks), head_groups)
    layout = random_layout(rng, num_ranks)
    return random_plan(rng, layout, head_groups)


def rows_at_home(layout: Layout, rank: int, groups: int) -> list[Row | None]:
    """Content of a rank's rows; None in padding."""
    rows: list[Row | None] = [
        (document, position, group)
        for document, start, stop in layout.held_by(rank)
        for position in range(start, stop)
        for group in range(groups)
    ]
    return rows + [None] * (int(layout.rank_rows[rank]) * groups - len(rows))


class Simulation:
    """Rows of every rank, moved as the routings say."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.groups = plan, plan.tasks.head_groups
        ranks = range(plan.layout.num_ranks)
        self.routings = [route(plan, rank) for rank in ranks]
        self.home = [rows_at_home(plan.layout, rank, self.groups) for rank in ranks]
        self.canonical = [
            home if routing.row_order is None else [home[row] for row in routing.row_order.numbers]
            for home, routing in zip(self.home, self.routings, strict=True)
        ]
        self.keys_sent = [
            _parts(self.canonical[r], self.routings[r].send_rows, self.routings[r].send_counts) for r in ranks
        ]
        self.store = [self._store(rank) for rank in ranks]
        self.queries = [self._queries(rank) for rank in ranks]

    def _store(self, rank: int) -> list[Row]:
        routing = self.routings[rank]
        store: list[Row | None] = [None] * routing.store_rows
        received = [row for source in self.keys_sent for row in source[rank]]
        own = [self.canonical[rank][row] for row in routing.own_rows.numbers]
        for rows, places in ((received, routing.received_to_store), (own, routing.own_to_store)):
            _put(store, places.numbers, rows)
        return store

    def _queries(self, rank: int) -> list[Row | None]:
        moves = self.routings[rank].queries
        if moves is None:
            return self.canonical[rank]
        queries: list[Row | None] = [None] * moves.num_rows
        _put(queries, moves.local_to_query.numbers, [self.home[rank][row] for row in moves.local_rows.numbers])
        received = []
        for source, routing in enumerate(self.routings):
            received += _parts(self.home[source], routing.queries.send_rows, routing.queries.send_counts)[rank]
        _put(queries, moves.received_to_query.numbers, received)
        return queries


def _parts(rows: list[Row | None], chosen: Runs, counts: np.ndarray) -> list[list[Row | None]]:
    """The chosen rows, cut in one part for each destination."""
    taken = [rows[row] for row in chosen.numbers]
    return [taken[start:stop] for start, stop in pairwise(np.cumsum([0, *counts]).tolist())]


def _put(target: list[Row | None], places: np.ndarray, rows: list[Row | None]) -> None:
    for place, row in zip(places, rows, strict=True):
        assert target[place] is None
        target[place] = row


@settings(max_examples=300)
@given(**DRAWN)
def test_every_query_is_computed_once_against_its_causal_prefix(
    seed: int, num_ranks: int, head_groups: int, striped: bool
) -> None:
    simulation = Simulation(draw(seed, num_ranks, head_groups, striped))
    computed: Counter[Row] = Counter()

    for rank, routing in enumerate(simulation.routings):
        work = 0
        for call in routing.calls:
            width, keys_in = (
                call.rows_per_token,
                simulation.store[rank] if call.from_store else simulation.canonical[rank],
            )
            assert call.query_stop - call.query_start == width * call.cu_seqlens_q[-1]
            assert call.key_stop - call.key_start == width * call.cu_seqlens_k[-1]
            spans = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
            for (first, last), (first_key, last_key) in spans:
                queries = simulation.queries[rank][call.query_start + first * width : call.query_start + last * width]
                keys = keys_in[call.key_start + first_key * width : call.key_start + last_key * width]
                document, end, _ = queries[-1]
                groups = [row[2] for row in queries[:width]]
                assert groups == list(range(groups[0], groups[0] + width))
                assert queries == [
                    (document, position, group)
                    for position in range(end + 1 - (last - first), end + 1)
                    for group in groups
                ]
                assert keys == [(document, position, group) for position in range(end + 1) for group in groups]
                computed.update(queries)
                work += sum(position + 1 for _, position, _ in queries)
        assert work == simulation.plan.work[rank]

    everything = {row for home in simulation.home for row in home if row is not None}
    assert computed == Counter(everything)


@settings(max_examples=300)
@given(**DRAWN)
def test_only_what_is_needed_elsewhere_travels_and_once(
    seed: int, num_ranks: int, head_groups: int, striped: bool
) -> None:
    plan = draw(seed, num_ranks, head_groups, striped)
    simulation = Simulation(plan)
    groups = simulation.groups
    tokens = TokenBytes(query=7 * groups, output=5 * groups, key_value=3 * groups)
    moved = np.zeros((num_ranks, num_ranks), dtype=np.int64)

    for rank, routing in enumerate(simulation.routings):
        held = set(simulation.home[rank]) - {None}
        needed = {
            (document, key, group)
            for document, query, group in (row for row in simulation.queries[rank] if row is not None)
            for key in range(query + 1)
        }
        received = [row for source in simulation.keys_sent for row in source[rank]]
        assert sorted(received) == sorted(needed - held)
        shared = [simulation.canonical[rank][row] for row in routing.shared_rows.numbers]
        sent = [row for part in simulation.keys_sent[rank] for row in part]
        copied = [simulation.canonical[rank][row] for row in routing.own_rows.numbers]
        assert sorted(shared) == sorted({*sent, *copied})
        for runs in (routing.send_rows, routing.own_rows):
            places = runs.places_in(routing.shared_rows).numbers
            assert routing.shared_rows.numbers[places].tolist() == runs.numbers.tolist()
        moved[rank] += 3 * routing.send_counts
        if routing.queries is not None:
            moved[rank] += 7 * routing.queries.send_counts + 5 * routing.queries.receive_counts

    assert moved.tolist() == bytes_between(plan, tokens).tolist()


@settings(max_examples=300)
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
