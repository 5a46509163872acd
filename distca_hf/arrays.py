"""Arrays of integers: runs of equal rows, sums before each entry, and ranges that stand for index maps.

column                4 4 4 7 7 9
run_starts(column)    1 0 0 1 0 1
run_stops(...)        0 0 1 0 1 1
lengths of the runs   3 2 1
exclusive_cumsum      0 3 5
offsets               0 3 5 6
ranges(0, lengths)    0 1 2 0 1 0

A few ranges of `IndexRanges` stand for millions of rows:

starts 4, 20    lengths 3, 2    strides 1, 8    numbers 4 5 6 20 28
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distca_hf.errors import PackingError


IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Integers = TypeVar("Integers", int, IntArray)

# Largest number in int64 arrays.
MAX_INTEGER = 2**63 - 1
NO_INTEGERS: IntArray = np.zeros(0, dtype=np.int64)


def as_int_array(values: ArrayLike, name: str) -> IntArray:
    """Converts values to a one-dimensional int64 array.

    Raises:
        PackingError: not one-dimensional, not integers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PackingError(f"{name} must be a list of integers, not a nested list of unequal lengths") from error
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PackingError(
            f"{name} must be a list of integers, not an array of {array.dtype} with shape {array.shape}"
        )
    if array.size and int(array.max()) > MAX_INTEGER:
        at = int(np.argmax(array))
        raise PackingError(f"{name}: entry {at} is {array[at]}, more than {MAX_INTEGER}")
    return array.astype(np.int64)


def run_starts(column: IntArray, *columns: IntArray) -> BoolArray:
    """Marks the first entry of every run of equal rows; all columns have `[n]` entries."""
    starts = np.ones(len(column), dtype=bool)
    np.not_equal(column[1:], column[:-1], out=starts[1:])
    for other in columns:
        starts[1:] |= other[1:] != other[:-1]
    return starts


def run_stops(starts: BoolArray) -> BoolArray:
    """Marks the last entry of every run, from the marks of the first ones."""
    stops = np.ones(len(starts), dtype=bool)
    stops[:-1] = starts[1:]
    return stops


def chained(starts: IntArray, lengths: IntArray) -> IntArray:
    """Makes a column for `run_starts` that is equal along ranges which follow each other without a gap."""
    return starts - exclusive_cumsum(lengths)


def first_outside(numbers: IntArray, count: int) -> int | None:
    """Finds the first number that is not in [0, count); returns its index."""
    outside = np.flatnonzero((numbers < 0) | (numbers >= count))
    return int(outside[0]) if len(outside) else None


def first_gap(starts: IntArray, stops: IntArray, opens: BoolArray) -> tuple[int, int] | None:
    """Finds the first range that is empty, or does not begin where the one before it ends. Returns the index of the
    range, and the start that it has to have.

    Args:
        starts, stops: `[n]` ranges in order.
        opens: `[n]` ranges that have to begin at 0 instead, see `run_starts`.
    """
    expected = np.concatenate([[0], stops[:-1]])[: len(stops)]
    expected[opens] = 0
    wrong = np.flatnonzero((starts != expected) | (stops <= starts))
    return (int(wrong[0]), int(expected[wrong[0]])) if len(wrong) else None


def exclusive_cumsum(values: IntArray) -> IntArray:
    """Sums the values before each entry: `[n]`, the first is 0."""
    sums: IntArray = np.cumsum(values) - values
    return sums


def offsets(lengths: IntArray) -> IntArray:
    """Sums lengths to offsets: `[n + 1]`, from 0 to the total."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def sum_by(group: IntArray, values: IntArray, num_groups: int) -> IntArray:
    """Sums values by their groups: `[num_groups]`; exact if sums are below 2 ** 53."""
    return np.bincount(group, weights=values, minlength=num_groups).astype(np.int64)


def ranges(starts: IntArray | int, lengths: IntArray) -> IntArray:
    """Writes out `lengths[i]` consecutive integers from `starts[i]` on, for each i in order: `[sum of lengths]`."""
    within = np.arange(int(lengths.sum()))
    return within + np.repeat(starts - exclusive_cumsum(lengths), lengths)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """Divides and rounds up; exact for any integers."""
    return -(-dividend // divisor)


@dataclass(frozen=True, eq=False)
class IndexRanges:
    """Ranges of integers in order. Range i is `start, start + stride, ...`, `length` numbers."""

    # `[ranges]` int64.
    starts: IntArray
    lengths: IntArray
    strides: IntArray

    @classmethod
    def of(cls, starts: IntArray, lengths: IntArray, strides: IntArray | None = None) -> "IndexRanges":
        """Makes ranges with stride 1, unless strides are given."""
        return cls(starts, lengths, np.ones_like(lengths) if strides is None else strides)

    @classmethod
    def join(cls, parts: Sequence["IndexRanges"]) -> "IndexRanges":
        return cls(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.strides for part in parts]),
        )

    @cached_property
    def total(self) -> int:
        """Number of integers in all ranges."""
        return int(self.lengths.sum())

    @cached_property
    def before(self) -> IntArray:
        """`[ranges]` numbers before each range."""
        return exclusive_cumsum(self.lengths)

    @property
    def counts_up(self) -> bool:
        """Whether the numbers are 0, 1, 2, ..."""
        filled = self.lengths > 0
        return bool(np.all((self.starts == self.before) & ((self.strides == 1) | (self.lengths == 1)) | ~filled))

    def union(self, other: "IndexRanges") -> "IndexRanges":
        """Merges both into ascending ranges without common numbers. All strides are 1."""
        starts = np.concatenate([self.starts, other.starts])
        stops = starts + np.concatenate([self.lengths, other.lengths])
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(stops[order])
        opens = np.ones(len(starts), dtype=bool)
        opens[1:] = starts[1:] > reach[:-1]
        return IndexRanges.of(starts[opens], reach[run_stops(opens)] - starts[opens])

    def cut_at(self, borders: IntArray) -> "IndexRanges":
        """Cuts every range at the borders inside it. Borders are ascending, all strides are 1."""
        stops = self.starts + self.lengths
        first = np.searchsorted(borders, self.starts, side="right")
        parts = np.maximum(np.searchsorted(borders, stops, side="left") - first, 0) + 1
        range_of = np.repeat(np.arange(len(parts)), parts)
        border = ranges(first, parts)
        bounds = np.concatenate([[np.iinfo(np.int64).min], borders, [np.iinfo(np.int64).max]])
        starts = np.maximum(self.starts[range_of], bounds[border])
        return IndexRanges.of(starts, np.minimum(stops[range_of], bounds[border + 1]) - starts)

    def places_in(self, whole: "IndexRanges") -> "IndexRanges":
        """Finds the place of every number in `whole`, which is ascending and holds all of them. All strides are 1."""
        range_of = np.searchsorted(whole.starts, self.starts, side="right") - 1
        return IndexRanges.of(whole.before[range_of] + self.starts - whole.starts[range_of], self.lengths)
