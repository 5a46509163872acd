"""Collate: the rows of one rank as arrays, and checksums by which ranks compare what they read.

Labels are shifted before documents are cut.

Every rank reads its own copy of the dataset. Documents of equal lengths give equal plans, whatever their tokens: if
one rank had shuffled differently, halves of two documents would meet. So ranks compare a checksum of the dataset
before the first step. It covers all documents of a small dataset, and a sample of a large one. In every micro-batch,
ranks compare the tokens around each cut, which both of its ranks can read.

    rank 0   … t t t t t t ┊                    rank 0 adds the checksum of the tokens around the cut,
    rank 1                 ┊ t t t t t t …      rank 1 subtracts it: their sum over all ranks is 0
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray, ceil_div
from distca_hf.data.documents import IGNORED_LABEL, NO_DRAWS, DocumentSource, Tokens
from distca_hf.data.rows import Draws
from distca_hf.errors import PackingError
from distca_hf.layout import Layout
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


# Padding rows hold this token; they are in no document, carry no label, and nothing attends to them.
PADDING_TOKEN = 0
# Number of tokens on either side of a cut that its ranks compare: enough for texts to differ, and few to read.
AROUND_A_CUT_TOKENS = 8
# Modulus of checksums and of their sums: they fit in int64.
MODULUS = 1 << 62
# Largest dataset, in tokens, that is read as a whole: that takes a tenth of a second.
MOST_TOKENS = 1 << 22
# The same in documents. This many documents of a larger dataset are read.
MOST_DOCUMENTS = 1024
# Documents whose rows are drawn twice if a transform makes them: enough to find one that changes a row in fifty.
MOST_DRAWN_TWICE = 256
# Equal tokens at an end of a document that count as a run, and the share of documents with a run of one token above
# which a warning is logged. Texts end in a token two or three times at most.
RUN_TOKENS, TOLD_SHARE = 4, 0.1
# Tokens at the end of a document in which to look for runs.
END_TOKENS = 64


class TokenSource(Protocol):
    """Tokens by document."""

    @property
    def inputs(self) -> Mapping[str, np.dtype[Any]]: ...

    def read(self, document: int, start: int, stop: int, draws: Draws) -> Tokens:
        """Returns tokens [start, stop) of a document."""
        ...


@dataclass(frozen=True)
class RankRows:
    """Inputs of one rank's model: int64 arrays of `[rows]`."""

    input_ids: IntArray  # tokens; `PADDING_TOKEN` in padding rows
    position_ids: IntArray  # position inside the document; 0 in padding rows, each of which counts as a document
    labels: IntArray  # not shifted; -100 at the first token of each document and in padding rows
    shift_labels: IntArray  # label of the next token of the same document; -100 at document ends and in padding rows
    # 1 for tokens, 0 in padding rows, which load-balancing losses and token metrics leave out. 1 in the first row of a
    # rank without tokens, because a mean over no tokens is NaN.
    attention_mask: IntArray
    inputs: Mapping[str, NDArray[Any]]  # further inputs of the model by name, int64 or float32; 0 in padding rows

    @property
    def num_labels(self) -> int:
        """Rows that have a label to learn."""
        return int(np.count_nonzero(self.shift_labels != IGNORED_LABEL))


def collate(layout: Layout, rank: int, documents: IntArray, source: TokenSource, draws: Draws = NO_DRAWS) -> RankRows:
    """Reads the tokens that `rank` holds, and no others except the label after a cut.

    Args:
        documents: `[documents]` number in the source of each document of the layout.
        draws: of the documents that `rank` holds, if rows are drawn.
    """
    rows = int(layout.rank_rows[rank])
    input_ids, position_ids, labels, shift_labels = (np.empty(rows, dtype=np.int64) for _ in range(4))
    attention_mask = np.ones(rows, dtype=np.int64)
    inputs = {name: np.zeros(rows, dtype) for name, dtype in source.inputs.items()}
    row = 0
    for document, start, stop in layout.held_by(rank):
        tokens = source.read(int(documents[document]), start, stop, draws)
        at = slice(row, row := row + stop - start)
        input_ids[at] = tokens.input_ids
        position_ids[at] = np.arange(start, stop)
        labels[at] = tokens.labels
        shift_labels[at] = tokens.shift_labels
        for name, values in tokens.inputs.items():
            inputs[name][at] = values
    # Padding.
    input_ids[row:], position_ids[row:], attention_mask[max(row, 1) :] = PADDING_TOKEN, 0, 0
    labels[row:] = shift_labels[row:] = IGNORED_LABEL
    return RankRows(input_ids, position_ids, labels, shift_labels, attention_mask, inputs)


@dataclass(frozen=True)
class Cut:
    """One side of a cut: this rank holds the tokens before or after it."""

    document: int
    position: int  # first token after the cut
    checksum: int  # checksum of tokens and labels around the cut; negative on the rank that holds the tokens after it


def cuts_of(
    layout: Layout, rank: int, documents: IntArray, source: DocumentSource, draws: Draws = NO_DRAWS
) -> list[Cut]:
    """Returns the cuts at which segments of a rank begin and end. Arguments: see `collate`."""
    cuts = []
    for document, start, stop in layout.held_by(rank):
        name, tokens = int(documents[document]), int(layout.document_tokens[document])
        for position, sign in ((stop, 1), (start, -1)):
            if 0 < position < tokens:
                begin, end = max(0, position - AROUND_A_CUT_TOKENS), min(tokens, position + AROUND_A_CUT_TOKENS)
                digest = hashlib.blake2b(f"{name} {position}".encode(), digest_size=8)
                digest.update(source.read(name, begin, end, draws).to_bytes())
                cuts.append(Cut(name, position, sign * (int.from_bytes(digest.digest()) % (MODULUS - 1) + 1)))
    return cuts


def sum_of(cuts: list[Cut]) -> int:
    """Returns the sum of checksums, modulo `MODULUS`. Over all ranks it is 0 if both sides of each cut agree."""
    return sum(cut.checksum for cut in cuts) % MODULUS


def checked_contents(source: DocumentSource) -> str:
    """Returns a checksum of tokens and labels: of all documents if they are few, else of a sample over the dataset.
    Warns of rows that look padded. Raises PackingError if a document cannot be trained on, or a transform gives other
    values when a row is drawn again."""
    lengths = source.document_tokens
    everything = len(lengths) <= MOST_DOCUMENTS and int(lengths.sum()) <= MOST_TOKENS
    documents = np.arange(len(lengths))
    if not everything:
        documents = np.unique(np.linspace(0, len(lengths) - 1, MOST_DOCUMENTS).astype(np.int64))
    most_tokens = int(lengths.max(initial=0)) if everything else MOST_TOKENS // MOST_DOCUMENTS
    digest, runs = hashlib.blake2b(digest_size=8), Runs()
    drawn: dict[int, dict[str, str]] = {}
    twice = set(documents[:: ceil_div(len(documents), MOST_DRAWN_TWICE)].tolist())
    for document in documents.tolist():
        draws, tokens = source.draw([document]), int(lengths[document])
        beginning = source.read(document, 0, min(tokens, most_tokens), draws)
        digest.update(beginning.to_bytes())
        end = beginning
        if tokens > most_tokens:
            end = source.read(document, max(0, tokens - END_TOKENS), tokens, draws)
        runs.note(int(source.rows[document]), beginning.input_ids, end.input_ids[-END_TOKENS:])
        if draws and document in twice:
            drawn[document] = _digests(draws)
    runs.warn(len(documents))
    # In reverse order: a transform that remembers the row before then gives other values, too.
    for document in reversed(drawn):
        now, before = _digests(source.draw([document])), drawn[document]
        if wrong := [name for name in {**before, **now} if now.get(name) != before.get(name)]:
            raise PackingError(
                f"row {source.rows[document]}: the dataset's transform gives other {wrong[0]!r} when it makes the row "
                "again. Ranks that share a document, and a resumed run, must see one row: draw from random, "
                "numpy.random or torch, which are seeded for it, not from another generator, the clock or a "
                "tokenizer's dropout; or use dataset.map"
            )
    return digest.hexdigest()


def _digests(draws: Draws) -> dict[str, str]:
    """Returns a checksum of each column of one drawn row."""
    (values,) = draws.values()
    return {name: hashlib.blake2b(array.tobytes()).hexdigest() for name, array in values.items()}


class Runs:
    """Runs of one token at the ends of documents, which may be padding."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._longest: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, row: int, beginning: IntArray, end: IntArray) -> None:
        """Notes the first and last tokens of a document, unless it repeats a single token."""
        if (beginning == beginning[0]).all() and (end == beginning[0]).all():
            return
        for verb, ids in (("end in", end[::-1]), ("begin with", beginning[:END_TOKENS])):
            run = int(np.argmin(ids == ids[0])) or len(ids)
            if run >= RUN_TOKENS:
                self._counts[found := (verb, int(ids[0]))] += 1
                self._longest[found] = max(self._longest.get(found, (0, 0)), (run, row))

    def warn(self, num_documents: int) -> None:
        """Warns if many of these documents have a run of the same token."""
        for (verb, token), count in self._counts.items():
            if count > 1 and count >= TOLD_SHARE * num_documents:
                run, row = self._longest[verb, token]
                log.warning(
                    "%d of %d documents that were looked at %s a run of token %d (row %d: %s%d of them). If it is "
                    "padding, it costs time, and is learnt unless labels say otherwise: tokenise without padding, "
                    "because documents are packed here",
                    *(count, num_documents, verb, token, row, "at least " if run == END_TOKENS else "", run),
                )
