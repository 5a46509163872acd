"""Routing of layers with a window, against a simulation that moves row by row and counts pairs by definition."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.planning.window_routing import halo_rows_between, window_plan
from support.layouts import packed_layout, random_layout, striped_layout
from support.simulation import Row, check_call_shapes, put, rows_at_home, without_gaps


def drawn_layout(seed: int, num_ranks: int) -> Layout:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return packed_layout(rng, num_ranks, 40)
    return rng.choice([random_layout, striped_layout])(rng, num_ranks)


LAYOUTS = st.builds(drawn_layout, st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 5, 8]))
WINDOWS = st.one_of(st.integers(1, 12), st.integers(1, 80))


class WindowSimulation:
    """Rows of every rank, moved as the routings say."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self.layout, self.ranks = layout, range(layout.num_ranks)
        self.plans = [window_plan(layout, rank, mask) for rank in self.ranks]
        self.routings = [plan.forward for plan in self.plans]
        self.home = [rows_at_home(layout, rank) for rank in self.ranks]
        sent = [self._parts(rank) for rank in self.ranks]
        self.received = [[row for source in self.ranks for row in sent[source][rank]] for rank in self.ranks]
        self.store = [self._store(rank) for rank in self.ranks]

    def _parts(self, rank: int) -> list[list[Row]]:
        """Rows that a rank sends to each rank."""
        routing = self.routings[rank]
        rows = without_gaps([self.home[rank][place] for place in routing.send_rows.numbers])
        borders = np.cumsum([0, *routing.send_counts]).tolist()
        assert borders[-1] == len(rows)
        return [rows[start:stop] for start, stop in pairwise(borders)]

    def _store(self, rank: int) -> list[Row]:
        routing = self.routings[rank]
        assert len(self.received[rank]) == routing.receive_counts.sum()
        store: list[Row | None] = [None] * routing.remote_kv_rows
        put(store, routing.received_to_remote_kv, self.received[rank])
        copied = without_gaps([self.home[rank][place] for place in routing.local_rows.numbers])
        put(store, routing.local_to_remote_kv, copied)
        return without_gaps(store)

    def attended(self, rank: int) -> list[np.ndarray]:
        """How often every query attends to every key of its document on a rank."""
        counts = [np.zeros((tokens, tokens), dtype=np.int64) for tokens in self.layout.document_tokens.tolist()]
        routing = self.routings[rank]
        for call in (*routing.local, *routing.prefix):
            before = sum(int(count.sum()) for count in counts)
            rows = self.home[rank] if call.kind is CallKind.LOCAL else list(self.store[rank])
            spans = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
            for (first, last), (first_key, last_key) in spans:
                queries = without_gaps(self.home[rank][call.query_start + first : call.query_start + last])
                keys = without_gaps(rows[call.key_start + first_key : call.key_start + last_key])
                for number, (document, query, _) in enumerate(queries):
                    place = number + len(keys) - len(queries)  # masks are aligned bottom-right
                    first_seen = max(0, place + 1 - call.window_tokens) if call.window_tokens else 0
                    seen = keys[first_seen : place + 1 if call.kind.is_causal else None]
                    assert seen
                    assert all(key[0] == document for key in seen)
                    np.add.at(counts[document], (query, [key[1] for key in seen]), 1)
            assert call.pairs == sum(int(count.sum()) for count in counts) - before
        return counts


@settings(max_examples=200)
@given(layout=LAYOUTS, window_tokens=WINDOWS)
def test_every_query_attends_to_its_window_exactly_once_where_it_is_held(layout: Layout, window_tokens: int) -> None:
    mask = Mask(window_tokens)
    simulation = WindowSimulation(layout, mask)
    total = [np.zeros((tokens, tokens), dtype=np.int64) for tokens in layout.document_tokens.tolist()]
    for rank, routing in enumerate(simulation.routings):
        check_call_shapes(routing)
        attended = simulation.attended(rank)
        held = {row[:2] for row in simulation.home[rank] if row is not None}
        for document, counts in enumerate(attended):
            assert {(document, query) for query in np.flatnonzero(counts.any(axis=1)).tolist()} <= held
            total[document] += counts
        assert routing.pairs == layout.rank_work_of(mask)[rank] == simulation.plans[rank].facts.work[rank]
        assert 0 <= routing.late_share <= 1
    for counts in total:
        everything = np.ones_like(counts)
        assert (counts == np.tril(everything) - np.tril(everything, -window_tokens)).all()


@settings(max_examples=200)
@given(layout=LAYOUTS, window_tokens=WINDOWS)
def test_only_halos_travel_each_key_once(layout: Layout, window_tokens: int) -> None:
    simulation = WindowSimulation(layout, Mask(window_tokens))
    for rank, (plan, routing) in enumerate(zip(simulation.plans, simulation.routings, strict=True)):
        held = {row for row in simulation.home[rank] if row is not None}
        needed = {
            (document, key, group)
            for document, query, group in held
            for key in range(max(0, query + 1 - window_tokens), query + 1)
        }
        assert sorted(simulation.received[rank]) == sorted(needed - held)
        assert len(simulation.store[rank]) == len(set(simulation.store[rank]))
        assert routing.exchanges == any(map(len, simulation.received))
        assert routing.queries is None
        received, sent = routing.receive_counts.tolist(), routing.send_counts.tolist()
        assert received == [int(other.send_counts[rank]) for other in simulation.routings]
        assert sum(received) == plan.facts.key_rows_received[rank]
        assert sum(sent) == plan.facts.key_rows_sent[rank]


@settings(max_examples=200)
@given(layout=LAYOUTS, window_tokens=WINDOWS)
def test_shared_rows_are_all_whose_gradients_have_other_parts(layout: Layout, window_tokens: int) -> None:
    for routing in WindowSimulation(layout, Mask(window_tokens)).routings:
        shared = list(routing.shared_rows.numbers)
        assert shared == sorted({*routing.send_rows.numbers, *routing.local_rows.numbers})
        assert [shared[place] for place in routing.send_in_shared.numbers] == list(routing.send_rows.numbers)
        assert [shared[place] for place in routing.local_in_shared.numbers] == list(routing.local_rows.numbers)


def test_packs_of_whole_documents_exchange_nothing() -> None:
    layout = packed_layout(random.Random(0), 4, 50)
    for rank in range(4):
        routing = window_plan(layout, rank, Mask(3)).forward
        assert not routing.exchanges
        assert not routing.prefix
        assert routing.remote_kv_rows == 0


def test_a_long_document_costs_a_halo_for_each_part() -> None:
    layout = place([4000], 4)
    full, window = (CAUSAL_MASK, Mask(100))
    facts = window_plan(layout, 0, window).facts
    parts = sum(1 for _, start, _ in (segment for rank in range(4) for segment in layout.held_by(rank)) if start)
    assert sum(facts.key_rows_received) == 99 * parts
    assert halo_rows_between(layout, window).sum(axis=0).tolist() == list(facts.key_rows_received)
    assert facts.rows_per_token == 1
    assert sum(facts.work) == window.pairs(0, 4000) < full.pairs(0, 4000)


def test_attention_servers_take_no_part() -> None:
    layout = place([300, 20], 2).with_servers(1)
    plan = window_plan(layout, 2, Mask(7), num_servers=1)
    assert plan.forward.exchanges
    assert plan.forward.pairs == plan.forward.num_rows == plan.forward.late_share == 0
    assert plan.facts.speeds == (1.0, 1.0, 0.0)
    assert plan.facts.imbalance == pytest.approx(max(plan.facts.work[:2]) / np.mean(plan.facts.work[:2]))


def test_a_mask_without_a_window_is_refused() -> None:
    with pytest.raises(PlanError, match="routed by `rank_plan`"):
        window_plan(place([5], 1), 0, CAUSAL_MASK)
