"""Documents of a tokenised `datasets.Dataset`: lengths without reading tokens, and tokens by slice on demand.

Token lists are read as they are stored. Lengths come from Arrow offsets, which are small; values are read from the
memory-mapped file when they are asked for.

A row is a document, unless the dataset was packed by TRL: then `seq_lengths` has the documents of a row. A document
longer than a global micro-batch is refused, split or truncated here, so that all later code gets documents that fit.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distca_hf.arrays import IntArray, ceil_div, exclusive_cumsum, ranges, sum_by
from distca_hf.config import OverlongPolicy
from distca_hf.errors import PackingError, and_more
from distca_hf.layout import check_document_tokens
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from datasets import Dataset as Dataset

log = get_logger(__name__)

# Columns of TRL that are 0 at tokens without a label.
MASK_COLUMNS = ("completion_mask", "assistant_masks")
# Column of tokenisers that is 0 at padding.
ATTENTION_MASK = "attention_mask"
# All columns with one number per token that are read.
TOKEN_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS, ATTENTION_MASK)
# Label that losses leave out: the `ignore_index` of torch's cross entropy.
IGNORED_LABEL = -100


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
    # `length`, `input_ids` and each other column say how many tokens a row has. Where two disagree, documents would be
    # cut at wrong tokens.
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


@dataclass(frozen=True)
class Tokens:
    """Tokens of one segment: `input_ids`, `labels` (unshifted) and `shift_labels`, int64, of one length."""

    input_ids: IntArray
    labels: IntArray
    shift_labels: IntArray


class DocumentSource:
    """Documents of a map-style `datasets.Dataset` with `input_ids`.

    Uses, where present: `labels`, `completion_mask` and `assistant_masks` (a token is learnt if all of them say so);
    `length` (tokens per row); `seq_lengths` (documents per row, from TRL's packing); `attention_mask`, in which there
    must be no padding. Other columns are left alone.

    Args:
        dataset: the tokenised dataset.
        capacity_tokens: tokens of a global micro-batch, or of a rank: no document may be longer.
        overlong: policy for a longer document.
        unlearnt_token: a token that is never a label; None if all may be.
        stay_whole: whether every document must fit on one rank.

    Attributes:
        document_tokens: `[documents]` tokens of each document after `overlong` was applied.
        documents_truncated, tokens_truncated: documents that `truncate` cut, and the tokens that it left out.

    Raises:
        PackingError: the dataset cannot be read as documents; names the row.
    """

    def __init__(
        self,
        dataset: "Dataset",
        capacity_tokens: int,
        overlong: OverlongPolicy = "error",
        unlearnt_token: int | None = None,
        stay_whole: bool = False,
    ) -> None:
        check_map_style(dataset)
        self._dataset, self._transform = dataset, _transform_of(dataset)
        self._columns, rows = open_columns(dataset)
        self._masks = [name for name in MASK_COLUMNS if name in self._columns]
        if "position_ids" in dataset.column_names and "seq_lengths" not in dataset.column_names:
            raise PackingError(
                "the dataset has a column 'position_ids', as rows of several documents have; say which documents a "
                "row holds in a column 'seq_lengths' (a list of lengths per row), or remove the column"
            )
        self.documents_truncated = 0
        self.tokens_truncated = 0
        self._unlearnt_token, self._stay_whole = unlearnt_token, stay_whole
        self._row, self._start, self.document_tokens = self._split_rows(dataset, rows)
        self._apply(overlong, capacity_tokens)

    def __len__(self) -> int:
        return len(self.document_tokens)

    @property
    def rows(self) -> IntArray:
        """`[documents]` dataset row of each document."""
        return self._row

    @cached_property
    def fingerprint(self) -> str:
        """Digest of 64 bits that is equal for two datasets only if all document lengths are."""
        return hashlib.blake2b(self.document_tokens.astype("<i8").tobytes(), digest_size=8).hexdigest()

    def check_unchanged(self) -> None:
        """Checks that rows are still made as they were when lengths were counted.

        Raises:
            PackingError: `set_transform` or `reset_format` was called meanwhile.
        """
        if _transform_of(self._dataset) != self._transform:
            raise PackingError(
                "the dataset got another transform (set_transform, reset_format) after its documents were counted; "
                "give the transform before plugin.dataloader or attach, or make another loader"
            )

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Reads tokens [start, stop) of a document, and one label more if the document goes on.

        Raises:
            PackingError: values are missing, or the row is shorter than announced.
        """
        # 1. Tokens of the row, and the one behind the last, which is its label.
        row, first = int(self._row[document]), int(self._start[document])
        document_stop = first + int(self.document_tokens[document])
        begin, end = first + start, first + stop
        labels_end = min(end + 1, document_stop)
        input_ids = self._read("input_ids", row, begin, labels_end)
        if ATTENTION_MASK in self._columns:
            padding = np.flatnonzero(self._read(ATTENTION_MASK, row, begin, labels_end) == 0)
            if len(padding):
                raise PackingError(
                    f"row {row}: attention_mask is 0 at token {begin + padding[0]}: the dataset is padded. Tokenise "
                    "it without padding: documents are packed here"
                )
        # 2. Labels, but for tokens that nothing is to be learnt from.
        labels = self._read("labels", row, begin, labels_end) if "labels" in self._columns else input_ids.copy()
        for mask in self._masks:
            labels[self._read(mask, row, begin, labels_end) == 0] = IGNORED_LABEL
        if self._unlearnt_token is not None:
            labels[input_ids == self._unlearnt_token] = IGNORED_LABEL
        # 3. Shifted inside of the document: no token predicts the first one of a document.
        if start == 0:
            labels[0] = IGNORED_LABEL
        shift_labels = np.full(stop - start, IGNORED_LABEL, dtype=np.int64)
        shift_labels[: len(labels) - 1] = labels[1:]
        return Tokens(input_ids[: stop - start], labels[: stop - start], shift_labels)

    def _read(self, column: str, row: int, start: int, stop: int) -> IntArray:
        values = self._columns[column].read(row, start, stop)
        if len(values) != stop - start:
            raise PackingError(f"row {row}: column {column!r} has {start + len(values)} values, {stop} were announced")
        return values

    def _split_rows(self, dataset: "Dataset", rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Returns row, first token and length of every document."""
        if "seq_lengths" not in dataset.column_names:
            return (
                np.arange(len(rows)),
                np.zeros(len(rows), dtype=np.int64),
                check_document_tokens(rows, "the dataset"),
            )
        packed = read_column(dataset, "seq_lengths").combine_chunks()
        if not (pa.types.is_list(packed.type) or pa.types.is_large_list(packed.type)):
            raise PackingError(f"column 'seq_lengths' must hold a list of document lengths per row, not {packed.type}")
        # 2, 3, 4 in a row of 9 tokens: documents [0:2), [2:5), [5:9) of that row.
        counts = pc.list_value_length(packed).fill_null(0).to_numpy().astype(np.int64)
        lengths = check_document_tokens(packed.flatten().to_numpy(zero_copy_only=False), "seq_lengths")
        row = np.repeat(np.arange(len(rows)), counts)
        total = sum_by(row, lengths, len(rows))
        wrong = np.flatnonzero(total != rows)
        if len(wrong):
            raise PackingError(
                f"row {wrong[0]}: seq_lengths sum to {total[wrong[0]]}, but the row has {rows[wrong[0]]} tokens"
            )
        return row, exclusive_cumsum(lengths) - exclusive_cumsum(rows)[row], lengths

    def _apply(self, overlong: OverlongPolicy, capacity_tokens: int) -> None:
        tokens = self.document_tokens
        too_long = np.flatnonzero(tokens > capacity_tokens)
        if len(too_long) == 0:
            return
        first = int(too_long[0])
        if overlong == "error":
            holders, setting = ("all data ranks together hold", "ranks x tokens_per_rank")
            if self._stay_whole:
                holders, setting = ("documents of this model stay whole, and a rank holds", "tokens_per_rank")
            raise PackingError(
                f"document {first} (row {self._row[first]}) has {tokens[first]} tokens, {holders} "
                f"{capacity_tokens}{and_more(len(too_long) - 1)}. Raise {setting} to {tokens.max()} "
                "(the longest), or choose overlong='split' or 'truncate'."
            )
        document, start, self.document_tokens = fit_documents(tokens, capacity_tokens, overlong)
        self._row, self._start = self._row[document], self._start[document] + start
        if overlong == "split":
            log.info("split %d of %d documents at %d tokens", len(too_long), len(tokens), capacity_tokens)
            return
        self.documents_truncated = len(too_long)
        self.tokens_truncated = int((tokens[too_long] - capacity_tokens).sum())
        log.warning(
            "truncated %d of %d documents to %d tokens; %d tokens will not be trained on",
            self.documents_truncated,
            len(tokens),
            capacity_tokens,
            self.tokens_truncated,
        )


def _transform_of(dataset: "Dataset") -> Callable[..., object] | None:
    """Returns the function that makes rows on access; None if they are as they are stored."""
    format = dataset.format
    return format["format_kwargs"]["transform"] if format["type"] == "custom" else None


def fit_documents(
    document_tokens: IntArray, capacity_tokens: int, overlong: OverlongPolicy
) -> tuple[IntArray, IntArray, IntArray]:
    """Applies the policy for documents longer than a global micro-batch: document, first token and length of every
    document that comes of it. `error` leaves them as they are: the caller refuses them by name."""
    if overlong == "split":
        return split_documents(document_tokens, capacity_tokens)
    kept = np.minimum(document_tokens, capacity_tokens) if overlong == "truncate" else document_tokens
    return np.arange(len(kept)), np.zeros(len(kept), dtype=np.int64), kept


def split_documents(document_tokens: IntArray, most_tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts documents into pieces of at most `most_tokens`: document, first token and length of every piece."""
    pieces = ceil_div(document_tokens, most_tokens)
    document = np.repeat(np.arange(len(document_tokens)), pieces)
    start = ranges(0, pieces) * most_tokens
    return document, start, np.minimum(document_tokens[document] - start, most_tokens)


def check_map_style(dataset: object) -> None:
    """Checks that a dataset is a map-style `datasets.Dataset` with `input_ids`.

    Raises:
        PackingError: it is not; the message names the remedy.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        raise PackingError(
            "an IterableDataset cannot be packed by placement: all document lengths must be known before the first "
            "step. Save the stream once, for example with datasets.Dataset.from_generator(lambda: iter(stream)), "
            "and train on that."
        )
    if not isinstance(dataset, datasets.Dataset):
        raise PackingError(
            f"expected a tokenised datasets.Dataset, not {type(dataset).__name__}; datasets.Dataset.from_list and "
            "from_generator make one (choose one split of a DatasetDict)"
        )
    if "input_ids" not in dataset.column_names and dataset.format["type"] != "custom":
        raise PackingError(f"the dataset has no column 'input_ids', only {dataset.column_names}; tokenise it first")
