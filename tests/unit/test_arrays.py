"""Idioms of integer arrays, against loops in Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import ceil_div, chained, exclusive_cumsum, offsets, ranges, run_starts, run_stops, sum_by


SMALL = st.lists(st.integers(0, 3), max_size=12)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(rows=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=12))
def test_runs_are_of_equal_rows(rows: list[tuple[int, int]]) -> None:
    columns = array([number for row in rows for number in row]).reshape(-1, 2).T
    starts = run_starts(*columns)

    assert starts.tolist() == [at == 0 or rows[at] != rows[at - 1] for at in range(len(rows))]
    assert run_stops(starts).tolist() == [at + 1 == len(rows) or rows[at] != rows[at + 1] for at in range(len(rows))]


@given(lengths=SMALL, data=st.data())
def test_chained_ranges_follow_each_other(lengths: list[int], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, 4)) for _ in lengths]
    opens = [at == 0 or starts[at] != starts[at - 1] + lengths[at - 1] for at in range(len(starts))]

    assert run_starts(chained(array(starts), array(lengths))).tolist() == opens


@given(lengths=SMALL, first=st.integers(-5, 5))
def test_sums_and_ranges(lengths: list[int], first: int) -> None:
    sums = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    starts = [first * at for at in range(len(lengths))]

    assert exclusive_cumsum(array(lengths)).tolist() == sums[:-1]
    assert offsets(array(lengths)).tolist() == sums
    assert ranges(0, array(lengths)).tolist() == [at for length in lengths for at in range(length)]
    expected = [start + at for start, length in zip(starts, lengths, strict=True) for at in range(length)]
    assert ranges(array(starts), array(lengths)).tolist() == expected


@given(dividend=st.integers(0, 2**62), divisor=st.integers(1, 2**40))
def test_division_rounds_up(dividend: int, divisor: int) -> None:
    quotient = ceil_div(dividend, divisor)

    assert (quotient - 1) * divisor < dividend <= quotient * divisor
    assert ceil_div(array([dividend]), divisor).tolist() == [quotient]


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(-(2**40), 2**40)), max_size=20))
def test_values_are_summed_by_group(pairs: list[tuple[int, int]]) -> None:
    groups, values = [group for group, _ in pairs], [value for _, value in pairs]

    expected = [sum(value for of, value in pairs if of == group) for group in range(7)]
    assert sum_by(array(groups), array(values), 7).tolist() == expected
