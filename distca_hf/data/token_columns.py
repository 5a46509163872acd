"""Columns: token lists of a `datasets.Dataset`, by slice and as they are stored.

Lengths come from Arrow offsets, which are small; values are read from the memory-mapped file when they are asked for.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError


if TYPE_CHECKING:
    from datasets import Dataset


# Columns of TRL that are 0 at tokens without a label.
MASK_COLUMNS = ("completion_mask", "assistant_masks")
# Column of tokenisers that is 0 at padding.
ATTENTION_MASK = "attention_mask"
# All columns with one number per token that are read.
TOKEN_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS, ATTENTION_MASK)


class Column(Protocol):
    """One column of token lists."""

    def read(self, row: int, start: int, stop: int) -> IntArray:
        """Reads values [start, stop) of a row, as int64."""
        ...


class ArrowColumn:
    """A list column read straight from Arrow memory (usually a memory-mapped file).

    Raises:
        PackingError: the column is not a list of integers per row.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, row_of: IntArray | None) -> None:
        is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not any(check(column.type) for check in is_list) or not (
            pa.types.is_integer(column.type.value_type) or pa.types.is_boolean(column.type.value_type)
        ):
            raise PackingError(f"column {name!r} must hold a list of integers per row, not {column.type}")
        self._name = name
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._row_of = row_of
        self._first_row = np.cumsum([0] + [len(chunk) for chunk in self._chunks])

    @cached_property
    def lengths(self) -> IntArray:
        """`[rows]` list lengths, from the offsets alone; a missing list counts 0."""
        counted = [pc.list_value_length(chunk).fill_null(0).to_numpy() for chunk in self._chunks]
        lengths = np.concatenate(counted).astype(np.int64) if counted else np.zeros(0, dtype=np.int64)
        return lengths if self._row_of is None else lengths[self._row_of]

    def read(self, row: int, start: int, stop: int) -> IntArray:
        stored = row if self._row_of is None else int(self._row_of[row])
        chunk = int(np.searchsorted(self._first_row, stored, side="right")) - 1
        values = self._chunks[chunk][stored - int(self._first_row[chunk])].values[start:stop]
        if values.null_count:
            raise PackingError(
                f"row {row}: column {self._name!r} has missing values between tokens {start} and {stop}"
            )
        return values.to_numpy(zero_copy_only=False).astype(np.int64)


class ItemColumn:
    """A column of a dataset that makes its rows on access (`set_transform`): the whole row is made for each read.

    Args:
        lengths: `[rows]` announced lengths; a row of another length is an error.
    """

    def __init__(self, name: str, dataset: "Dataset", lengths: IntArray) -> None:
        self._name = name
        self._dataset = dataset
        self._lengths = lengths

    def read(self, row: int, start: int, stop: int) -> IntArray:
        values = np.asarray(self._dataset[row][self._name])
        if values.ndim != 1 or values.dtype.kind not in "iub" or len(values) != self._lengths[row]:
            raise PackingError(
                f"row {row}: column {self._name!r} gave an array of {values.dtype} with shape {values.shape}; "
                f"{self._lengths[row]} integers were announced"
            )
        return values[start:stop].astype(np.int64)


def open_columns(dataset: "Dataset") -> tuple[dict[str, Column], IntArray]:
    """Opens the token columns of a dataset, by name, and counts the tokens of every row.

    Raises:
        PackingError: a column cannot be read, or columns of one row differ in length; names row and lengths.
    """
    announced = _announced_lengths(dataset)
    if dataset.format["type"] == "custom":
        return _open_items(dataset, announced)
    row_of = _row_indices(dataset)
    columns = {
        name: ArrowColumn(name, dataset.data.column(name), row_of)
        for name in TOKEN_COLUMNS
        if name in dataset.column_names
    }
    lengths = columns["input_ids"].lengths
    if announced is not None and len(wrong := np.flatnonzero(announced != lengths)):
        raise PackingError(
            f"row {wrong[0]}: column 'length' says {announced[wrong[0]]}, input_ids has {lengths[wrong[0]]} tokens. "
            "Rename the column if it counts something else."
        )
    for name, column in columns.items():
        if len(wrong := np.flatnonzero(column.lengths != lengths)):
            raise PackingError(
                f"row {wrong[0]}: column {name!r} has {column.lengths[wrong[0]]} values for {lengths[wrong[0]]} tokens"
                " of input_ids; make it of the same tokens, or remove it"
            )
    return dict(columns), lengths


def read_column(dataset: "Dataset", name: str) -> pa.ChunkedArray:
    """Reads a whole column, in the dataset's order; for small columns."""
    column = dataset.data.column(name)
    indices = _row_indices(dataset)
    return column if indices is None else column.take(pa.array(indices))


def _open_items(dataset: "Dataset", announced: IntArray | None) -> tuple[dict[str, Column], IntArray]:
    made = dataset[0] if len(dataset) else {}
    if "input_ids" not in made:
        raise PackingError(f"the dataset's transform gives no 'input_ids', only {list(made)}")
    if announced is None:
        raise PackingError(
            "the dataset makes its tokens on access (set_transform), so lengths must be in an integer column "
            "'length'; or tokenise it once with dataset.map"
        )
    return {name: ItemColumn(name, dataset, announced) for name in TOKEN_COLUMNS if name in made}, announced


def _announced_lengths(dataset: "Dataset") -> IntArray | None:
    """Reads the column `length`, if it holds an integer for every row."""
    if "length" not in dataset.column_names:
        return None
    column = read_column(dataset, "length")
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return column.to_numpy().astype(np.int64)


def _row_indices(dataset: "Dataset") -> IntArray | None:
    """Returns the stored row of each row, for a dataset that was shuffled or selected from."""
    indices = dataset._indices  # no public accessor; `flatten_indices` would copy all tokens
    return None if indices is None else indices.column(0).to_numpy().astype(np.int64)
