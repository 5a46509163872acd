"""Calls that add to what larger ones write: no row is written twice, and each is added to once at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.planning.kernel_calls import Span, adding_calls


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
