"""Routing of random layouts against a simulation that moves tokens one by one."""

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.layout import Layout
from distca_hf.packing.placement import place
from distca_hf.planning.planner import plan_in_place
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import key_transfers
from support.layouts import random_layout


Token = tuple[int, int]  # document, position

WORLDS = {"seed": st.integers(0, 2**32 - 1), "num_ranks": st.sampled_from([1, 2, 3, 4, 5, 8])}


@dataclass(frozen=True)
class World:
    """A layout, the routings of its ranks, and who holds and needs which tokens, by definition."""

    layout: Layout
    routings: list[Routing]

    @classmethod
    def of(cls, layout: Layout) -> "World":
        plan = plan_in_place(layout)
        plan.validate()
        return cls(layout, [route(plan, rank) for rank in range(layout.num_ranks)])

    @cached_property
    def layout_tokens(self) -> list[list[Token | None]]:
        """Token in each layout row of each rank; None in padding rows."""
        rows: list[list[Token | None]] = []
        for rank in range(self.layout.num_ranks):
            tokens: list[Token | None] = []
            for document, start, stop in self.layout.held_by(rank):
                tokens += [(document, position) for position in range(start, stop)]
            rows.append(tokens + [None] * (int(self.layout.rank_rows[rank]) - len(tokens)))
        return rows

    @cached_property
    def canonical_tokens(self) -> list[list[Token | None]]:
        """Token in each canonical row of each rank, as `row_order` says."""
        return [
            tokens if routing.row_order is None else [tokens[row] for row in routing.row_order.numbers]
            for tokens, routing in zip(self.layout_tokens, self.routings, strict=True)
        ]

    def held(self, rank: int) -> set[Token]:
        return {token for token in self.layout_tokens[rank] if token is not None}

    def needed(self, rank: int) -> set[Token]:
        """All keys that the queries of a rank attend to."""
        return {(document, key) for document, query in self.held(rank) for key in range(query + 1)}

    def stored(self, rank: int) -> set[Token]:
        """Needed keys of documents of which the rank lacks some, or holds in several pieces."""
        held = self.held(rank)
        scattered = {
            document
            for document, position in held
            if position and (document, position - 1) not in held  # a piece that begins inside the document
        }
        return {(document, position) for document, position in self.needed(rank) if document in scattered}

    def sent(self, rank: int) -> list[list[Token]]:
        """Tokens that a rank sends to each rank."""
        routing = self.routings[rank]
        tokens = [self.canonical_tokens[rank][row] for row in routing.send_rows.numbers]
        borders = np.cumsum([0, *routing.send_counts])
        return [tokens[start:stop] for start, stop in pairwise(borders)]

    def received(self, rank: int) -> list[Token]:
        """Tokens that arrive at a rank, in the order of arrival."""
        return [token for source in range(self.layout.num_ranks) for token in self.sent(source)[rank]]

    def store(self, rank: int) -> list[Token]:
        """Content of a rank's store; asserts that every row is written once."""
        routing = self.routings[rank]
        store: list[Token | None] = [None] * routing.store_rows
        own = [self.canonical_tokens[rank][row] for row in routing.own_rows.numbers]
        for tokens, rows in (
            (self.received(rank), routing.received_to_store.numbers),
            (own, routing.own_to_store.numbers),
        ):
            for token, row in zip(tokens, rows, strict=True):
                assert store[row] is None
                store[row] = token
        assert None not in store
        return store


def draw_world(seed: int, num_ranks: int) -> World:
    return World.of(random_layout(random.Random(seed), num_ranks))


@settings(max_examples=300)
@given(**WORLDS)
def test_canonical_rows_are_tasks_then_padding(seed: int, num_ranks: int) -> None:
    """Longest ranges of consecutive tokens; those that begin their document first, then by document and position."""
    world = draw_world(seed, num_ranks)

    for rank, routing in enumerate(world.routings):
        runs: list[list[Token]] = []
        for token in sorted(world.held(rank)):
            if runs and runs[-1][-1] == (token[0], token[1] - 1):
                runs[-1].append(token)
            else:
                runs.append([token])
        runs.sort(key=lambda run: (run[0][1] > 0, run[0]))
        tokens = [token for run in runs for token in run]
        assert world.canonical_tokens[rank] == tokens + [None] * (routing.num_rows - len(tokens))
        if routing.row_order is not None:
            assert sorted(routing.row_order.numbers.tolist()) == list(range(routing.num_rows))


@settings(max_examples=300)
@given(**WORLDS)
def test_every_missing_key_is_received_once_and_nothing_else(seed: int, num_ranks: int) -> None:
    world = draw_world(seed, num_ranks)

    for rank, routing in enumerate(world.routings):
        received = world.received(rank)
        assert sorted(received) == sorted(world.needed(rank) - world.held(rank))
        assert len(routing.send_rows.numbers) == routing.send_counts.sum()
        assert routing.send_counts[rank] == 0
        for other, other_routing in enumerate(world.routings):
            assert routing.send_counts[other] == other_routing.receive_counts[rank]
    sends = any(len(routing.send_rows.numbers) for routing in world.routings)
    assert all(routing.exchanges == sends for routing in world.routings)


@settings(max_examples=300)
@given(**WORLDS)
def test_stores_hold_whole_prefixes_in_order(seed: int, num_ranks: int) -> None:
    world = draw_world(seed, num_ranks)

    for rank in range(num_ranks):
        assert world.store(rank) == sorted(world.stored(rank))


@settings(max_examples=300)
@given(**WORLDS)
def test_keys_of_every_task_are_the_causal_prefix_of_its_queries(seed: int, num_ranks: int) -> None:
    world = draw_world(seed, num_ranks)

    for rank, routing in enumerate(world.routings):
        canonical, store = world.canonical_tokens[rank], world.store(rank)
        computed: list[Token | None] = []
        for call in routing.calls:
            assert call.cu_seqlens_q[0] == call.cu_seqlens_k[0] == 0
            assert call.query_start + call.cu_seqlens_q[-1] == call.query_stop
            assert call.key_start + call.cu_seqlens_k[-1] == call.key_stop
            keys_in = store if call.from_store else canonical
            attended = 0
            for task in range(len(call.cu_seqlens_q) - 1):
                queries = canonical[
                    call.query_start + call.cu_seqlens_q[task] : call.query_start + call.cu_seqlens_q[task + 1]
                ]
                keys = keys_in[call.key_start + call.cu_seqlens_k[task] : call.key_start + call.cu_seqlens_k[task + 1]]
                document, last = queries[-1]
                assert queries == [(document, last + 1 - len(queries) + query) for query in range(len(queries))]
                assert keys == [(document, position) for position in range(last + 1)]
                attended += sum(position + 1 for _, position in queries)
                computed += queries
            assert call.pairs == attended
        assert computed == [token for token in canonical if token is not None]
        assert [call.from_store for call in routing.calls] == sorted(call.from_store for call in routing.calls)


@settings(max_examples=300)
@given(**WORLDS)
def test_shared_rows_are_those_whose_gradients_come_from_elsewhere_or_from_the_store(
    seed: int, num_ranks: int
) -> None:
    """The gradient of every other row is whole when the calls on own rows have run."""
    world = draw_world(seed, num_ranks)

    for rank, routing in enumerate(world.routings):
        parts = {token: 0 for token in world.held(rank)}
        own = next((call for call in routing.calls if not call.from_store), None)
        for token in world.canonical_tokens[rank][: own.query_stop if own else 0]:
            parts[token] += 1
        elsewhere = {token for token in parts if token in world.stored(rank)}
        for other in range(num_ranks):
            elsewhere |= {token for token in parts if other != rank and token in world.needed(other)}
        shared = [world.canonical_tokens[rank][row] for row in routing.shared_rows.numbers]

        assert sorted(shared) == sorted(elsewhere)
        assert routing.shared_rows.numbers.tolist() == sorted(set(routing.shared_rows.numbers.tolist()))
        assert all(parts[token] == 1 for token in parts if token not in elsewhere)


@settings(max_examples=300)
@given(**WORLDS)
def test_calls_of_all_ranks_attend_every_pair_once(seed: int, num_ranks: int) -> None:
    world = draw_world(seed, num_ranks)
    pairs = sum(call.pairs for routing in world.routings for call in routing.calls)

    assert pairs == sum(tokens * (tokens + 1) // 2 for tokens in world.layout.document_tokens.tolist())


@settings(max_examples=300)
@given(**WORLDS)
def test_key_transfers_are_what_the_routings_send(seed: int, num_ranks: int) -> None:
    world = draw_world(seed, num_ranks)
    transfers = key_transfers(plan_in_place(world.layout))

    assert transfers.rows_between(num_ranks).tolist() == [routing.send_counts.tolist() for routing in world.routings]
    order = list(
        zip(
            transfers.source.tolist(),
            transfers.destination.tolist(),
            transfers.document.tolist(),
            transfers.start.tolist(),
            strict=True,
        )
    )
    assert order == sorted(order)
    assert (transfers.tokens > 0).all()


@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 300)), min_size=1, max_size=12),
    num_ranks=st.sampled_from([1, 2, 3, 5, 8]),
)
def test_placed_layouts_are_routed_as_exactly(lengths: list[int], num_ranks: int) -> None:
    world = World.of(place(lengths, num_ranks))

    for rank in range(num_ranks):
        assert sorted(world.received(rank)) == sorted(world.needed(rank) - world.held(rank))
        assert world.store(rank) == sorted(world.stored(rank))
