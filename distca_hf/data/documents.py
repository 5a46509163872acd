"""Documents of a tokenised `datasets.Dataset`: lengths without reading tokens, and tokens by slice on demand.

A row is a document, unless the dataset was packed by TRL: then `seq_lengths` has the documents of a row. A document
longer than a global micro-batch is refused, split or truncated here, so that all later code gets documents that fit.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distca_hf.arrays import IntArray, ceil_div, exclusive_cumsum, ranges
from distca_hf.config import OverlongPolicy
from distca_hf.data.token_columns import ATTENTION_MASK, MASK_COLUMNS, open_columns, read_column
from distca_hf.errors import PackingError, and_more
from distca_hf.layout import check_document_tokens
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from datasets import Dataset as Dataset


log = get_logger(__name__)

# Label that losses leave out: the `ignore_index` of torch's cross entropy.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Tokens:
    """Tokens of one segment: `input_ids`, `labels` (unshifted) and `shift_labels`, int64, of one length."""

    input_ids: IntArray
    labels: IntArray
    shift_labels: IntArray


class DocumentSource:
    """Documents of a map-style `datasets.Dataset` with `input_ids`.

    Uses, where present: `labels`, `completion_mask` and `assistant_masks` (a token is learnt if all of them say so);
    `length` (tokens per row); `seq_lengths` (documents per row, from TRL's packing); `attention_mask`, in
    which there must be no padding. Other columns are left alone.

    Args:
        dataset: the tokenised dataset.
        capacity_tokens: tokens of a global micro-batch: no document may be longer.
        overlong: policy for a longer document.
        unlearnt_token: a token that is never a label; None if all may be.

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
    ) -> None:
        check_map_style(dataset)
        self._columns, rows = open_columns(dataset)
        self._masks = [name for name in MASK_COLUMNS if name in self._columns]
        if "position_ids" in dataset.column_names and "seq_lengths" not in dataset.column_names:
            raise PackingError(
                "the dataset has a column 'position_ids', as rows of several documents have; say which documents a "
                "row holds in a column 'seq_lengths' (a list of lengths per row), or remove the column"
            )
        self.documents_truncated = 0
        self.tokens_truncated = 0
        self._unlearnt_token = unlearnt_token
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

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Reads tokens [start, stop) of a document, and one label more if the document goes on.

        Raises:
            PackingError: values are missing, or the row is shorter than announced.
        """
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
        labels = self._read("labels", row, begin, labels_end) if "labels" in self._columns else input_ids.copy()
        for mask in self._masks:
            labels[self._read(mask, row, begin, labels_end) == 0] = IGNORED_LABEL
        if self._unlearnt_token is not None:
            labels[input_ids == self._unlearnt_token] = IGNORED_LABEL
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
        counts = pc.list_value_length(packed).fill_null(0).to_numpy().astype(np.int64)
        lengths = check_document_tokens(packed.flatten().to_numpy(zero_copy_only=False), "seq_lengths")
        row = np.repeat(np.arange(len(rows)), counts)
        total = np.bincount(row, weights=lengths, minlength=len(rows)).astype(np.int64)
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
            raise PackingError(
                f"document {first} (row {self._row[first]}) has {tokens[first]} tokens, all ranks together hold "
                f"{capacity_tokens}{and_more(len(too_long) - 1)}. Raise ranks x tokens_per_rank to {tokens.max()} "
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
