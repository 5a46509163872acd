"""Ranges of integers against plain lists of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IndexRanges


LENGTHS = st.integers(0, 6)


@given(parts=st.lists(st.tuples(st.integers(0, 40), LENGTHS, st.integers(1, 5)), max_size=8))
def test_places_and_order_are_those_of_all_numbers(parts: list[tuple[int, int, int]]) -> None:
    runs = IndexRanges.of(*(np.array([part[at] for part in parts], dtype=np.int64) for at in range(3)))
    numbers = [start + at * stride for start, length, stride in parts for at in range(length)]

    assert runs.total == len(numbers)
    assert runs.before.tolist() == [sum(length for _, length, _ in parts[:at]) for at in range(len(parts))]
    assert runs.counts_up == (numbers == list(range(len(numbers))))


@given(lengths=st.lists(LENGTHS, max_size=6), stride=st.integers(1, 3))
def test_runs_that_go_on_count_up(lengths: list[int], stride: int) -> None:
    """Drawn numbers hardly ever do."""
    of_runs = np.array(lengths, dtype=np.int64)
    runs = IndexRanges.of(np.cumsum(of_runs) - of_runs, of_runs, np.full_like(of_runs, stride))

    numbers = [first + at * stride for first, length in zip(runs.starts, lengths, strict=True) for at in range(length)]
    assert runs.counts_up == (numbers == list(range(sum(lengths))))
