"""Idioms of integer arrays: runs of equal rows, sums before each entry, ranges written out.

column                4 4 4 7 7 9
run_starts(column)    1 0 0 1 0 1
run_stops(...)        0 0 1 0 1 1
lengths of the runs   3 2 1
exclusive_cumsum      0 3 5
offsets               0 3 5 6
ranges(0, lengths)    0 1 2 0 1 0
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray


IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Integers = TypeVar("Integers", int, IntArray)


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
    """Makes a column for `run_starts` that is equal along ranges which follow each other: each begins where the one
    before it ends."""
    return starts - exclusive_cumsum(lengths)


def exclusive_cumsum(values: IntArray) -> IntArray:
    """Sums the values before each entry: `[n]`, the first is 0."""
    sums: IntArray = np.cumsum(values) - values
    return sums


def offsets(lengths: IntArray) -> IntArray:
    """Sums lengths to offsets: `[n + 1]`, from 0 to the total."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def ranges(starts: IntArray | int, lengths: IntArray) -> IntArray:
    """Writes out `lengths[i]` consecutive integers from `starts[i]` on, for each i in order: `[sum of lengths]`."""
    within = np.arange(int(lengths.sum()))
    return within + np.repeat(starts - exclusive_cumsum(lengths), lengths)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """Divides and rounds up; exact for any integers."""
    return -(-dividend // divisor)
