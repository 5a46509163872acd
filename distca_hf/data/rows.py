"""Rows of a dataset: the numbers that a row holds for its tokens, in the columns that count.

Stored rows are read by slice. Their lengths come from Arrow offsets, which are small, and values from the
memory-mapped file on demand.

Images, videos and sound are recognised by the names that Transformers' processors give them. Placed micro-batches hold
only tokens, so datasets with these media are refused. Given batches may hold them (`batches.given`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError, and_more


if TYPE_CHECKING:
    from datasets import Dataset as Dataset


# Names of columns and of arguments of models, or parts of them ("pixel_values_videos").
MEDIA = re.compile(r"pixel_values|(^|_)(images?|videos?|audios?|speech)(_|$)|^input_(features|values)$")
# Classes of columns that hold media, whatever the column's name.
MEDIA_FEATURES = ("Image", "Audio", "Video")


def media_columns(dataset: "Dataset") -> list[str]:
    """Returns names of the stored columns that hold images, videos or sound. A number or a text (a caption, a path)
    does not count."""
    return [name for name, feature in dataset.features.items() if is_media(name, feature)]


def is_media(name: str, feature: Any = None) -> bool:
    """Returns whether a column holds images, videos or sound, by its name, or by its kind if that is known."""
    inner: Any = feature
    while isinstance(inner, list) or hasattr(inner, "feature"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    kind = type(inner).__name__
    is_plain = kind == "Value" and inner is feature
    return kind in MEDIA_FEATURES or (MEDIA.search(name) is not None and not is_plain)


def media_refusal(columns: Iterable[str]) -> str:
    """Returns why a dataset with these columns of media cannot be placed."""
    return (
        f"the dataset has images, videos or sound ({', '.join(columns)}), and placed micro-batches hold only tokens: "
        "they would be left out. Leave tokens_per_rank out, and train on your own batches, which may hold them; or "
        "remove the columns to train on text"
    )


# Columns of TRL that are 0 at tokens without a label.
MASK_COLUMNS = ("completion_mask", "assistant_masks")
# Column of tokenizers that is 0 at padding.
ATTENTION_MASK = "attention_mask"
# Columns of integers, one per token, that have a meaning here.
TOKEN_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS, ATTENTION_MASK, "position_ids")
# All columns with a meaning: the two others give a row's number of tokens, and its documents.
KNOWN_COLUMNS = frozenset({*TOKEN_COLUMNS, "length", "seq_lengths"})
# Arguments of models that batches fill in, or that describe the dataset's rows: placed documents are in other rows.
OF_BATCHES = frozenset(
    {"shift_labels", "num_items_in_batch", "seq_idx", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
)

# One array of `[tokens]` per column, by name. Values of drawn rows are of the whole row.
Values = Mapping[str, NDArray[Any]]
# Drawn rows by number.
Draws = Mapping[int, Values]


@dataclass(frozen=True)
class Reading:
    """What to read from rows for one model, as its Trainer or loop would."""

    only: frozenset[str] | None = None  # columns to look at; None: all that the dataset shows
    masks: Literal["always", "without labels", "never"] = "always"
    # Names of the arguments of the model's forward pass; None if no model is known.
    inputs: frozenset[str] | None = None
    vocabulary_tokens: int | None = None  # tokens that the model has embeddings for; None if no model is known
    unlearnt_token: int | None = None  # a token that is never a label; None if all may be
    # Columns that would change the loss, with what to do about them.
    refused: Mapping[str, str] = field(default_factory=dict)

    def looks_at(self, name: str, where: str = "") -> bool:
        """Returns whether a column of this name counts. Raises PackingError if it would change the loss."""
        if self.only is not None and name not in self.only:
            return False
        if name in self.refused:
            raise PackingError(f"{where}the dataset's column {name!r} {self.refused[name]}")
        return self.masks != "never" or name not in MASK_COLUMNS

    def check(self, names: Sequence[str], where: str = "") -> list[str]:
        """Returns which of these unknown columns of numbers are inputs of the model: a number per token, which travels
        with its token. Raises PackingError if a model or a loss may need another one of them, and a placed batch
        cannot hold it."""
        inputs = [name for name in names if name in (self.inputs or ()) and name not in OF_BATCHES]
        others = [name for name in names if name not in inputs]
        if not others:
            return inputs
        if others[0] in OF_BATCHES:
            because = "batches fill it in, or describe other rows"
        elif self.inputs is None:
            because = "a column that the model's forward pass takes needs plugin.dataloader(model=...)"
        else:
            because = "the model's forward pass does not name it"
        remedy = "leave it out of the transform" if where else f"dataset.remove_columns({others})"
        raise PackingError(
            f"{where}column {others[0]!r}{and_more(len(others) - 1)} holds numbers that a loss may need, and placed "
            f"batches would leave them out: {because}. To train without it: {remedy}"
        )


# For lengths only: other columns may hold anything.
FOR_LENGTHS = Reading(only=KNOWN_COLUMNS)


def is_drawn(dataset: "Dataset") -> bool:
    """Returns whether the rows of a dataset are made by a transform."""
    return bool(getattr(dataset, "format", {}).get("type") == "custom")  # a stream has none


def shown_columns(dataset: "Dataset") -> list[str]:
    """Returns the stored columns that the dataset's format shows (`set_format(columns=...)` hides others)."""
    format = dataset.format
    return list(dataset.column_names if format["output_all_columns"] else format["columns"])


class StoredRows:
    """Rows as they are stored. Raises PackingError if a column cannot be read, or columns of one row differ in length;
    names row and lengths."""

    def __init__(self, dataset: "Dataset", reading: Reading) -> None:
        self.shown = frozenset(shown_columns(dataset))
        shown = [name for name in shown_columns(dataset) if reading.looks_at(name)]
        unknown = [name for name in shown if name not in KNOWN_COLUMNS]
        if media := [name for name in unknown if is_media(name, dataset.features[name])]:
            raise PackingError(media_refusal(media))
        types = dataset.data.schema
        further = reading.check([name for name in unknown if _is_of_numbers(types.field(name).type)])
        if reading.masks == "without labels" and "labels" in shown:
            shown = [name for name in shown if name not in MASK_COLUMNS]
        row_of = _row_indices(dataset)
        self._columns = {
            name: ArrowColumn(name, dataset.data.column(name), row_of, of_floats=name in further)
            for name in (*TOKEN_COLUMNS, *further)
            if name in shown
        }
        self.names = frozenset(self._columns)
        self.inputs: Mapping[str, np.dtype[Any]] = {name: self._columns[name].dtype for name in further}
        # A list of document lengths per row, if rows hold several; None if each row is a document.
        self.documents = read_column(dataset, "seq_lengths") if "seq_lengths" in shown else None
        if "position_ids" in shown and self.documents is None:
            raise PackingError(
                "the dataset has a column 'position_ids', as rows of several documents have; say which documents a "
                "row holds in a column 'seq_lengths' (a list of lengths per row), or remove the column"
            )
        self.lengths = lengths = self._columns["input_ids"].lengths  # `[rows]` tokens
        # `length`, `input_ids` and each other column say how many tokens a row has. If two disagree, documents would
        # be cut at wrong tokens.
        announced = announced_lengths(dataset) if "length" in shown else None
        if announced is not None and len(wrong := np.flatnonzero(announced != lengths)):
            raise PackingError(
                f"row {wrong[0]}: column 'length' says {announced[wrong[0]]}, input_ids has {lengths[wrong[0]]} "
                "tokens. Rename the column if it counts something else."
            )
        for name, column in self._columns.items():
            if len(wrong := np.flatnonzero(column.lengths != lengths)):
                raise PackingError(
                    f"row {wrong[0]}: column {name!r} has {column.lengths[wrong[0]]} values for {lengths[wrong[0]]} "
                    "tokens of input_ids; make it of the same tokens, or remove it"
                )

    def read(self, row: int, start: int, stop: int) -> Values:
        """Reads tokens [start, stop) of a row."""
        return {name: column.read(row, start, stop) for name, column in self._columns.items()}


class ArrowColumn:
    """A list column read straight from Arrow memory (usually a memory-mapped file). Raises PackingError if the column
    is not a list of integers per row.

    Args:
        row_of: stored row of each row; None if rows are in order.
        of_floats: whether the column may hold floating-point numbers.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, row_of: IntArray | None, of_floats: bool = False) -> None:
        inner = column.type.value_type if _is_list(column.type) else None
        is_integer = inner is not None and (pa.types.is_integer(inner) or pa.types.is_boolean(inner))
        is_float = inner is not None and of_floats and pa.types.is_floating(inner)
        if not is_integer and not is_float:
            if inner is None and name == "labels" and _is_of_numbers(column.type):
                raise PackingError(f"column {name!r} {ONE_PER_ROW}")
            kinds = "numbers" if of_floats else "integers"
            raise PackingError(f"column {name!r} must hold a list of {kinds} per row, not {column.type}")
        self._name, self._column, self._row_of = name, column, row_of
        self.dtype = np.dtype(np.float32 if is_float else np.int64)

    @cached_property
    def lengths(self) -> IntArray:
        """`[rows]` list lengths, read from offsets only; a missing list counts 0."""
        lengths = pc.list_value_length(self._column).fill_null(0).to_numpy().astype(np.int64)
        return lengths if self._row_of is None else lengths[self._row_of]

    def read(self, row: int, start: int, stop: int) -> NDArray[Any]:
        """Reads values [start, stop) of a row."""
        stored = row if self._row_of is None else int(self._row_of[row])
        values = self._column[stored].values[start:stop]
        if values.null_count:
            raise PackingError(
                f"row {row}: column {self._name!r} has missing values between tokens {start} and {stop}"
            )
        return values.to_numpy(zero_copy_only=False).astype(self.dtype)


def row_of(table: pa.Table) -> dict[str, Any]:
    """Returns the only row of a table. Lists of numbers are arrays, so that no number becomes a Python object."""
    row: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        value = column[0]
        values = value.values if isinstance(value, pa.ListScalar) else None
        numbers = None if values is None or values.null_count else values.to_numpy(zero_copy_only=False)
        row[name] = value.as_py() if numbers is None or numbers.dtype.kind not in "iufb" else numbers
    return row


# Refusal of a column of labels with one number per row.
ONE_PER_ROW = (
    "holds one label per row, as for classifying texts; placed batches train a language model. Leave tokens_per_rank "
    "out, and train on your own batches"
)


def read_column(dataset: "Dataset", name: str) -> pa.ChunkedArray:
    """Reads a whole (small) column, in the dataset's order."""
    column = dataset.data.column(name)
    indices = _row_indices(dataset)
    return column if indices is None else column.take(pa.array(indices))


def announced_lengths(dataset: "Dataset") -> IntArray | None:
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


def _is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_of_numbers(kind: pa.DataType) -> bool:
    """Returns whether a column holds numbers, or lists of numbers."""
    while _is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if _is_list(kind) else kind.storage_type
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
