"""Documents of a tokenised `datasets.Dataset`: lengths without reading tokens, and tokens by slice on demand.

A row is a document, unless TRL packed the dataset: then `seq_lengths` has the documents of a row. A document longer
than a global micro-batch is refused, split or truncated here. All later code gets documents that fit.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distca_hf.arrays import MAX_INTEGER, IntArray, ceil_div, exclusive_cumsum, ranges, sum_by
from distca_hf.config import OverlongPolicy
from distca_hf.data.drawn_rows import DrawnRows
from distca_hf.data.rows import (
    ATTENTION_MASK,
    MASK_COLUMNS,
    Draws,
    Reading,
    StoredRows,
    Values,
    is_drawn,
    shown_columns,
)
from distca_hf.errors import PackingError, and_more
from distca_hf.layout import check_document_tokens
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from datasets import Dataset as Dataset

log = get_logger(__name__)

# Label that losses leave out: the `ignore_index` of torch's cross entropy.
IGNORED_LABEL = -100
# Stored rows need no draws.
NO_DRAWS: Draws = {}


@dataclass(frozen=True)
class Tokens:
    """Tokens of one segment: `input_ids`, `labels` (unshifted) and `shift_labels`, all int64, and further inputs of
    the model by name. All have the same length."""

    input_ids: IntArray
    labels: IntArray
    shift_labels: IntArray
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        integers = b"".join(x.astype("<i8").tobytes() for x in (self.input_ids, self.labels, self.shift_labels))
        return integers + b"".join(values.tobytes() for _, values in sorted(self.inputs.items()))


def follows_masks(reading: Reading, names: Container[str]) -> bool:
    """Returns whether masks decide what is learnt of a row with these columns."""
    return reading.masks == "always" or "labels" not in names


def tokens_of(values: Values, tokens: int, is_first: bool, reading: Reading, inputs: Iterable[str]) -> Tokens:
    """Returns a segment of a document. `values` are of the segment, and of one token more if the document goes on."""
    input_ids = values["input_ids"]
    # 1. Labels, except of tokens that are not learnt. If the document ends with the segment, one more follows.
    labels = np.full(tokens + 1, IGNORED_LABEL, dtype=np.int64)
    known = labels[: len(input_ids)]
    known[:] = values["labels" if "labels" in values else "input_ids"]
    if follows_masks(reading, values):
        for mask in MASK_COLUMNS:
            if mask in values:
                known[values[mask] == 0] = IGNORED_LABEL
    if reading.unlearnt_token is not None:
        known[input_ids == reading.unlearnt_token] = IGNORED_LABEL
    # 2. Labels shifted within the document: no token predicts its first one.
    if is_first:
        labels[0] = IGNORED_LABEL
    return Tokens(input_ids[:tokens], labels[:-1], labels[1:], {name: values[name][:tokens] for name in inputs})


def check_values(values: Values, where: str, begin: int, origin: int, vocabulary_tokens: int | None) -> None:
    """Checks values of a row. Raises PackingError if they cannot be trained on.

    Args:
        begin: tokens of the row before these values.
        origin: tokens of the row before their document.
        vocabulary_tokens: tokens that the model has embeddings for, if known.
    """
    if (mask := values.get(ATTENTION_MASK)) is not None and len(wrong := np.flatnonzero(mask != 1)):
        at = int(wrong[0])
        if mask[at] == 0:
            raise PackingError(
                f"{where}attention_mask is 0 at token {begin + at}: the dataset is padded. Tokenise it "
                "without padding: documents are packed here"
            )
        raise PackingError(
            f"{where}attention_mask is {mask[at]} at token {begin + at}, as if it numbered documents; say "
            "which documents a row holds in a column 'seq_lengths' (a list of lengths per row)"
        )
    if (positions := values.get("position_ids")) is not None:
        expected = np.arange(begin - origin, begin - origin + len(positions))
        if len(wrong := np.flatnonzero(positions != expected)):
            at = int(wrong[0])
            raise PackingError(
                f"{where}position_ids is {positions[at]} at token {begin + at}, which has position "
                f"{expected[at]} in its document. If documents begin within rows, give their lengths in a column "
                "'seq_lengths' (a list per row); other positions than 0, 1, 2, ... are not placed"
            )
    for name in ("input_ids", "labels"):
        ids = values.get(name)
        if ids is None or (ids.min(initial=0) >= 0 and ids.max(initial=0) < (vocabulary_tokens or MAX_INTEGER)):
            continue
        unknown = (ids < 0) & ((name == "input_ids") | (ids != IGNORED_LABEL))
        if vocabulary_tokens is not None:
            unknown |= ids >= vocabulary_tokens
        if len(wrong := np.flatnonzero(unknown)):
            known = "0 or more" if vocabulary_tokens is None else f"0 to {vocabulary_tokens - 1} in this model"
            raise PackingError(
                f"{where}{name} is {ids[wrong[0]]} at token {begin + wrong[0]}, and tokens are {known}"
                f"{and_more(len(wrong) - 1)}. Tokenise with the tokenizer of the model, or resize its embeddings"
            )


class DocumentSource:
    """Documents of a map-style `datasets.Dataset` with `input_ids`.

    Uses, if present: `labels`, `completion_mask` and `assistant_masks` (a token is learnt if all of them say so);
    `length` (tokens per row); `seq_lengths` (documents per row, from TRL's packing); `attention_mask`, which must have
    no padding; `position_ids`, which must begin at 0 in every document; and other numbers per token that the model's
    forward pass takes. Columns without numbers are ignored.

    Attributes:
        document_tokens: `[documents]` tokens of each document after `overlong` was applied.
        documents_truncated, tokens_truncated: documents that `truncate` cut, and the tokens that it left out.
        are_drawn: whether a transform makes the rows: they must be drawn before they are read.
        masks, masks_left: columns that decide what is learnt, and columns that could but do not.

    Raises:
        PackingError: the dataset cannot be read as documents; names the row.
    """

    def __init__(
        self,
        dataset: "Dataset",
        capacity_tokens: int,  # tokens of a global micro-batch, or of a rank: no document may be longer
        overlong: OverlongPolicy = "error",
        stay_whole: bool = False,
        reading: Reading = Reading(),  # noqa: B008 (immutable)
        seed: int = 0,
    ) -> None:
        check_map_style(dataset)
        self._dataset, self._format, self._reading = dataset, dataset.format, reading
        self.are_drawn = is_drawn(dataset)
        self._rows = DrawnRows(dataset, reading, seed) if self.are_drawn else StoredRows(dataset, reading)
        self.inputs = self._rows.inputs
        names = self._rows.names
        self.masks = [name for name in MASK_COLUMNS if name in names and follows_masks(self._reading, names)]
        self.masks_left = [name for name in MASK_COLUMNS if name in self._rows.shown and name not in self.masks]
        self.documents_truncated = 0
        self.tokens_truncated = 0
        self._stay_whole = stay_whole
        self._row, self._start, self.document_tokens = self._split_rows()
        self._origin = self._start  # of positions, also in a document that is split
        self._apply(overlong, capacity_tokens)
        if self.are_drawn:
            self.read(0, 0, int(self.document_tokens[0]), self.draw([0]))

    def __len__(self) -> int:
        return len(self.document_tokens)

    @property
    def rows(self) -> IntArray:
        """`[documents]` dataset row of each document."""
        return self._row

    @cached_property
    def fingerprint(self) -> str:
        """Digest of 64 bits, equal for two datasets only if all document lengths are equal."""
        return hashlib.blake2b(self.document_tokens.astype("<i8").tobytes(), digest_size=8).hexdigest()

    def check_unchanged(self) -> None:
        """Checks that rows are made, and columns shown, as they were when lengths were counted. Raises PackingError if
        `set_transform`, `set_format` or `reset_format` was called meanwhile."""
        if self._dataset.format != self._format:
            raise PackingError(
                "the dataset got another transform or format (set_transform, set_format, reset_format) after its "
                "documents were counted; set it before plugin.dataloader or attach, or make another loader"
            )

    def draw(self, documents: IntArray | list[int], epoch: int = 0) -> Draws:
        """Draws the rows of some documents as they are in an epoch; nothing if rows are stored. Only for the thread
        that trains, or another process (`drawn_rows`)."""
        rows = self._rows
        return rows.draw(np.unique(self._row[documents]).tolist(), epoch) if isinstance(rows, DrawnRows) else NO_DRAWS

    def read(self, document: int, start: int, stop: int, draws: Draws = NO_DRAWS) -> Tokens:
        """Reads tokens [start, stop) of a document, and one label more if the document goes on. Raises PackingError if
        values are missing, or cannot be trained on; names row, token and numbers."""
        # 1. Tokens of the row, and the one after the last, which is its label.
        row, first = int(self._row[document]), int(self._start[document])
        begin = first + start
        labels_end = min(first + stop + 1, first + int(self.document_tokens[document]))
        if isinstance(self._rows, StoredRows):
            values = self._rows.read(row, begin, labels_end)
        else:
            values = {name: of_row[begin:labels_end] for name, of_row in draws[row].items()}
        where = f"row {row}: "
        check_values(values, where, begin, int(self._origin[document]), self._reading.vocabulary_tokens)
        # 2. Labels, shifted within the document.
        return tokens_of(values, stop - start, start == 0, self._reading, self.inputs)

    def _split_rows(self) -> tuple[IntArray, IntArray, IntArray]:
        """Returns row, first token and length of every document."""
        rows = self._rows.lengths
        if self._rows.documents is None:
            return (
                np.arange(len(rows)),
                np.zeros(len(rows), dtype=np.int64),
                check_document_tokens(rows, "the dataset"),
            )
        packed = self._rows.documents.combine_chunks()
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
        self._row, self._origin = self._row[document], self._start[document]
        self._start = self._origin + start
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
    """Applies the policy for documents longer than a global micro-batch. Returns document, first token and length of
    every resulting document. `error` leaves them as they are: the caller refuses them by name."""
    if overlong == "split":
        return split_documents(document_tokens, capacity_tokens)
    kept = np.minimum(document_tokens, capacity_tokens) if overlong == "truncate" else document_tokens
    return np.arange(len(kept)), np.zeros(len(kept), dtype=np.int64), kept


def split_documents(document_tokens: IntArray, most_tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cuts documents into pieces of at most `most_tokens`. Returns document, first token and length of every piece."""
    pieces = ceil_div(document_tokens, most_tokens)
    document = np.repeat(np.arange(len(document_tokens)), pieces)
    start = ranges(0, pieces) * most_tokens
    return document, start, np.minimum(document_tokens[document] - start, most_tokens)


def check_map_style(dataset: object) -> None:
    """Checks that a dataset is a map-style `datasets.Dataset` with `input_ids`. Raises PackingError if it is not; the
    message names the remedy."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        raise PackingError(
            "an IterableDataset cannot be evaluated with evaluate='distca': document lengths must be known before. "
            "Save it once, for example with datasets.Dataset.from_generator(lambda: iter(stream)); or evaluate your "
            "own batches (evaluate='local')"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise PackingError(
            f"expected a tokenised datasets.Dataset, not {type(dataset).__name__}; datasets.Dataset.from_list and "
            "from_generator make one (choose one split of a DatasetDict)"
        )
    if type(dataset).__getitem__ is not datasets.Dataset.__getitem__:
        raise PackingError(
            f"{type(dataset).__name__} makes its rows itself (__getitem__), and tokens are read as they are stored; "
            "make them in a transform instead (dataset.set_transform), or once with dataset.map"
        )
    if len(dataset) == 0:
        raise PackingError("the dataset is empty: it has no rows. Look at what filtered it, or at its file")
    if is_drawn(dataset) or "input_ids" in (shown := shown_columns(dataset)):
        return
    if "input_ids" in dataset.column_names:
        raise PackingError(
            f"the dataset hides its column 'input_ids' (set_format(columns={shown})); show it, too, or call "
            "dataset.reset_format()"
        )
    raise PackingError(
        f"the dataset has no column 'input_ids', only {dataset.column_names}; tokenise it first: `distca examples "
        "tokenise_texts` prints the path of a script that does. If the Trainer makes batches of something else, leave "
        "tokens_per_rank out"
    )
