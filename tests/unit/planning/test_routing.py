"""Routing of small layouts worked out by hand, exact counts, and queries that move."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.kernel_calls import Span, adding_calls
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import Routing, route
from distca_hf.planning.transfers import key_transfers, received_bytes


def routings_of(plan: Plan) -> list[Routing]:
    return [route(plan, rank) for rank in range(plan.layout.num_ranks)]


# --- by hand


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


# --- queries that move


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
