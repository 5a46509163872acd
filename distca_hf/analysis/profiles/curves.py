"""Curves: times between measured sizes.

Rates, not times, are interpolated, on logarithmic axes: a time grows over orders of magnitude, its rate hardly. Beyond
the measured sizes the rate stays that of the border, and whoever asked gets a note of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


FloatArray = NDArray[np.float64]


@dataclass
class Notes:
    """Everything that was taken from outside of measured sizes, or from other hardware; each once.

    Attributes:
        said: notes in the order in which they came up.
    """

    said: dict[str, tuple[float, float]] = field(default_factory=dict)
    words: dict[str, None] = field(default_factory=dict)

    def add(self, words: str) -> None:
        """Adds a note in words."""
        self.words[words] = None

    def outside(self, name: str, values: FloatArray, lowest: float, highest: float) -> None:
        """Notes values beyond the borders, if there are some."""
        if values.size == 0:
            return
        least, most = float(values.min()), float(values.max())
        if least >= lowest and most <= highest:
            return
        earlier = self.said.get(f"{name}|{lowest:g}|{highest:g}", (least, most))
        self.said[f"{name}|{lowest:g}|{highest:g}"] = min(least, earlier[0]), max(most, earlier[1])

    def lines(self) -> list[str]:
        """Returns all notes, as sentences."""
        beyond = []
        for key, (least, most) in self.said.items():
            name, lowest, highest = key.split("|")
            asked = f"{least:,.4g} to {most:,.4g}"
            beyond.append(
                f"{name}: {asked} asked for, {float(lowest):,.4g} to {float(highest):,.4g} measured; "
                "beyond them rates are those of the border"
            )
        return [*self.words, *beyond]


def between(measured: FloatArray, values: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """Locates values between measured sizes: index of the lower one, and the fraction of the way to the next one on a
    logarithmic axis; values outside are at the border."""
    values = np.clip(values, measured[0], measured[-1])
    index = np.searchsorted(measured, values, side="right") - 1
    following = np.minimum(index + 1, len(measured) - 1)
    step = np.log(measured[following] / measured[index])
    part = np.log(values / measured[index]) / np.where(step > 0, step, 1.0)
    return index.astype(np.int64), part


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds by one size.

    Attributes:
        name: what the size counts, for notes.
        sizes: `[sizes]` rising.
        seconds: `[sizes]`.
        power: work grows as this power of the size.
    """

    name: str
    sizes: FloatArray
    seconds: FloatArray
    power: float = 1.0

    @classmethod
    def of(cls, name: str, sizes: Sequence[float], seconds: Sequence[float], power: float = 1.0) -> "Curve":
        """Returns the curve through some measurements."""
        return cls(name, np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64), power)

    def at(self, sizes: FloatArray | float, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` sizes; 0 for a size of 0."""
        asked = np.asarray(sizes, dtype=np.float64)
        some = np.maximum(asked, 1e-9)
        notes.outside(self.name, asked[asked > 0], self.sizes[0], self.sizes[-1])
        index, part = between(self.sizes, some)
        rate = np.log(self.sizes**self.power / self.seconds)
        following = np.minimum(index + 1, len(rate) - 1)
        log_rate = rate[index] * (1 - part) + rate[following] * part
        return np.where(asked > 0, some**self.power / np.exp(log_rate), 0.0)


@dataclass(frozen=True, eq=False)
class Surface:
    """Seconds by two sizes; work is their product.

    Attributes:
        names: what the sizes count, for notes.
        rows, columns: `[rows]`, `[columns]` rising.
        seconds: `[rows, columns]`.
    """

    names: tuple[str, str]
    rows: FloatArray
    columns: FloatArray
    seconds: FloatArray

    def at(self, rows: FloatArray, columns: FloatArray, notes: Notes) -> FloatArray:
        """Returns `[...]` seconds for `[...]` pairs of sizes; 0 where one of them is 0."""
        rows, columns = np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64)
        some = (rows > 0) & (columns > 0)
        notes.outside(self.names[0], rows[some], self.rows[0], self.rows[-1])
        notes.outside(self.names[1], columns[some], self.columns[0], self.columns[-1])
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
        return np.where(some, rows * columns / np.exp(log_rate), 0.0)
