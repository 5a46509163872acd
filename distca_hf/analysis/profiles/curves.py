"""Curves: times between measured sizes.

Rates are interpolated instead of times, on logarithmic axes: a time grows over orders of magnitude, its rate hardly
changes. Beyond the measured sizes the rate stays as at the border, and a note reports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distca_hf.analysis.profiles.cluster_profile import AttentionTimes
from distca_hf.placement.by_kernel_time import between


FloatArray = NDArray[np.float64]
# Whole numbers, or others.
Amounts = NDArray[Any]
# Smallest share of extrapolated seconds of one kind that is noted.
WORTH_A_NOTE = 0.005


class Beyond(NamedTuple):
    """Seconds of one kind that were extrapolated. `lowest`, `highest`: measured sizes. `most`: largest size that was
    needed. `seconds`, `outside_seconds`: of all sizes, and of sizes that were not measured."""

    lowest: float
    highest: float
    most: float
    seconds: float
    outside_seconds: float

    @property
    def share(self) -> float:
        return self.outside_seconds / self.seconds if self.seconds else 0.0


@dataclass
class Notes:
    """Collects notes about times that were extrapolated, or measured on other hardware; each once. `texts`: notes as
    text, in the order in which they were added."""

    texts: dict[str, None] = field(default_factory=dict)
    beyond: dict[str, Beyond] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.texts[text] = None

    def count(self, name: str, sizes: FloatArray, seconds: FloatArray, lowest: float, highest: float) -> None:
        """Counts seconds of these sizes, and how many of them are outside of the measured sizes."""
        if sizes.size == 0:
            return
        outside = (sizes < lowest) | (sizes > highest)
        of_seconds = float(seconds.sum()), float(seconds[outside].sum())
        self._add(name, Beyond(lowest, highest, float(sizes.max()), *of_seconds))

    def merge(self, other: "Notes") -> None:
        self.texts.update(other.texts)
        for name, beyond in other.beyond.items():
            self._add(name, beyond)

    def lines(self) -> list[str]:
        return [
            *self.texts,
            *(
                f"{name}: up to {of.most:,.0f} needed, {of.lowest:,.0f} to {of.highest:,.0f} measured; "
                f"{100 * of.share:.1f} % of their seconds are extrapolated at the rate of the nearest size"
                for name, of in self.beyond.items()
                if of.share >= WORTH_A_NOTE
            ),
        ]

    def _add(self, name: str, beyond: Beyond) -> None:
        old = self.beyond.get(name)
        if old is not None:
            lowest, highest = min(old.lowest, beyond.lowest), max(old.highest, beyond.highest)
            seconds, outside = old.seconds + beyond.seconds, old.outside_seconds + beyond.outside_seconds
            beyond = Beyond(lowest, highest, max(old.most, beyond.most), seconds, outside)
        self.beyond[name] = beyond


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds by one size. `name`: what it counts, for notes. `sizes`: `[sizes]` rising. `power`: work grows as this
    power of the size."""

    name: str
    sizes: FloatArray
    seconds: FloatArray
    power: float = 1.0

    @classmethod
    def of(cls, name: str, sizes: Sequence[float], seconds: Sequence[float], power: float = 1.0) -> "Curve":
        return cls(name, np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64), power)

    def at(self, sizes: FloatArray | float, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` sizes; 0 for a size of 0."""
        asked = np.asarray(sizes, dtype=np.float64)
        some = np.maximum(asked, 1e-9)
        index, part = between(self.sizes, some)
        rate = np.log(self.sizes**self.power / self.seconds)
        following = np.minimum(index + 1, len(rate) - 1)
        log_rate = rate[index] * (1 - part) + rate[following] * part
        seconds = np.where(asked > 0, some**self.power / np.exp(log_rate), 0.0)
        notes.count(self.name, asked[asked > 0], seconds[asked > 0], self.sizes[0], self.sizes[-1])
        return seconds


@dataclass(frozen=True, eq=False)
class Surface:
    """Seconds `[rows, columns]` by two rising sizes; work is their product. `names`: what the sizes count, for
    notes."""

    names: tuple[str, str]
    rows: FloatArray
    columns: FloatArray
    seconds: FloatArray

    def at(self, rows: FloatArray, columns: FloatArray, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` pairs of sizes; 0 if one of them is 0."""
        rows, columns = np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64)
        some = (rows > 0) & (columns > 0)
        row, row_part = between(self.rows, np.maximum(rows, 1))
        column, column_part = between(self.columns, np.maximum(columns, 1))
        rate = np.log(self.rows[:, None] * self.columns[None, :] / self.seconds)
        row_up, column_up = np.minimum(row + 1, len(self.rows) - 1), np.minimum(column + 1, len(self.columns) - 1)
        log_rate = (
            rate[row, column] * (1 - row_part) * (1 - column_part)
            + rate[row_up, column] * row_part * (1 - column_part)
            + rate[row, column_up] * (1 - row_part) * column_part
            + rate[row_up, column_up] * row_part * column_part
        )
        seconds = np.where(some, rows * columns / np.exp(log_rate), 0.0)
        for name, sizes, measured in ((self.names[0], rows, self.rows), (self.names[1], columns, self.columns)):
            notes.count(name, sizes[some], seconds[some], measured[0], measured[-1])
        return seconds


def square_curve(times: AttentionTimes, seconds: tuple[float, ...]) -> Curve:
    """Returns seconds of squares by their queries."""
    power = 1.0 if times.window_tokens else 2.0
    name = f"queries of a square{f', window {times.window_tokens}' if times.window_tokens else ''}"
    return Curve.of(name, times.square_tokens, seconds, power)


def prefix_surface(times: AttentionTimes, seconds: tuple[tuple[float, ...], ...]) -> Surface:
    """Returns seconds of prefixes by their queries and keys."""
    names = "queries of a prefix", "keys of a prefix"
    rows, columns = (np.array(sizes, dtype=np.float64) for sizes in (times.prefix_queries, times.prefix_keys))
    return Surface(names, rows, columns, np.array(seconds, dtype=np.float64))


def kernel_times_of(times: AttentionTimes) -> dict[str, Any]:
    """Returns the table of `placement.by_kernel_time.KernelTimes`, of a full table with prefixes."""
    queries = np.array(times.square_tokens)
    keys = np.array(sorted({*times.square_tokens, *times.prefix_keys} - set(queries[queries > times.prefix_keys[-1]])))
    keys = keys[keys >= queries[0]]
    passes = (times.square_forward, times.prefix_forward), (times.square_backward, times.prefix_backward)
    # For each number of queries, `[keys]` seconds of the last queries of documents of that many tokens. Notes are not
    # kept: beyond measured prefixes, rates are the border's.
    notes, rows = Notes(), []
    for number in queries[queries <= keys[-1]]:
        total, before = np.zeros(len(keys)), np.maximum(0.0, keys - number)
        for square, prefix in passes:
            total += square_curve(times, square).at(number, notes)
            total += prefix_surface(times, prefix).at(np.full(len(keys), number), before, notes)
        rows.append(total)
    return {
        "query_tokens": [int(x) for x in queries[queries <= keys[-1]]],
        "key_tokens": [int(x) for x in keys],
        "seconds": [
            [float(x) if key >= number else None for x, key in zip(row, keys, strict=True)]
            for number, row in zip(queries, rows, strict=False)
        ],
    }
