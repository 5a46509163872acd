"""Ranges of integers against plain lists of them."""

import random
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IndexRanges


LENGTHS = st.integers(0, 6)
SEEDS = st.integers(0, 2**32 - 1)
PARTS = st.lists(st.tuples(st.integers(0, 40), LENGTHS), max_size=8)


def made(parts: list[tuple[int, int]], strides: list[int] | None = None) -> IndexRanges:
    starts, lengths = (np.array([part[at] for part in parts], dtype=np.int64) for at in (0, 1))
    return IndexRanges.of(starts, lengths, None if strides is None else np.array(strides, dtype=np.int64))


def written_out(parts: list[tuple[int, int]]) -> list[list[int]]:
    return [list(range(start, start + length)) for start, length in parts]


def as_lists(runs: IndexRanges) -> list[list[int]]:
    columns = zip(runs.starts.tolist(), runs.lengths.tolist(), runs.strides.tolist(), strict=True)
    return [[start + number * stride for number in range(length)] for start, length, stride in columns]


@given(parts=st.lists(st.tuples(st.integers(0, 40), LENGTHS, st.integers(1, 5)), max_size=8))
def test_numbers_are_those_of_all_runs_in_their_order(parts: list[tuple[int, int, int]]) -> None:
    runs = made([part[:2] for part in parts], [stride for *_, stride in parts])
    numbers = [start + at * stride for start, length, stride in parts for at in range(length)]

    assert runs.numbers.tolist() == numbers
    assert runs.numbers.dtype == np.int64
    assert runs.total == len(numbers)
    assert runs.before.tolist() == [sum(length for _, length, _ in parts[:at]) for at in range(len(parts))]
    assert runs.counts_up == (numbers == list(range(len(numbers))))
    assert IndexRanges.join([runs, runs]).numbers.tolist() == numbers * 2


@given(lengths=st.lists(LENGTHS, max_size=6), stride=st.integers(1, 3))
def test_runs_that_go_on_count_up(lengths: list[int], stride: int) -> None:
    """Drawn numbers hardly ever do."""
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    runs = made(list(zip(starts.tolist(), lengths, strict=True)), [stride] * len(lengths))

    assert runs.counts_up == (runs.numbers.tolist() == list(range(sum(lengths))))


@given(start=st.integers(-5, 50), length=LENGTHS)
def test_range(start: int, length: int) -> None:
    assert IndexRanges.range(start, start + length).numbers.tolist() == list(range(start, start + length))


@given(left=PARTS, right=PARTS)
def test_union_has_every_number_once(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    union = made(left).union(made(right))

    assert union.numbers.tolist() == sorted(set(chain.from_iterable(written_out(left + right))))


@given(parts=PARTS, seed=SEEDS)
def test_places_in_a_union(parts: list[tuple[int, int]], seed: int) -> None:
    """Of runs without empty ones, which neither transfers nor pieces have."""
    parts = [part for part in parts if part[1]]
    chosen = [part for part in parts if random.Random(seed).random() < 0.5]
    whole, some = made(parts).union(made([])), made(chosen)
    places = some.places_in(whole).numbers

    assert whole.numbers[places].tolist() == some.numbers.tolist()


@given(
    parts=PARTS,
    borders=st.lists(st.integers(-3, 50), unique=True, max_size=12).map(sorted),
)
def test_cut_at_keeps_all_numbers_and_crosses_no_border(parts: list[tuple[int, int]], borders: list[int]) -> None:
    runs = made(parts)
    cut = runs.cut_at(np.array(borders, dtype=np.int64))

    expected: list[list[int]] = []
    for numbers in written_out(parts):
        for number in numbers:
            if number == numbers[0] or number in borders:
                expected.append([])
            expected[-1].append(number)
    assert [numbers for numbers in as_lists(cut) if numbers] == expected
    assert cut.numbers.tolist() == runs.numbers.tolist()
    assert cut.lengths.tolist().count(0) == [length for _, length in parts].count(0)  # cuts make no empty ones
    assert set(cut.strides.tolist()) <= {1}
