"""Collate: the rows of one rank as arrays, and checksums by which ranks compare what they read.

Labels are shifted before documents are cut.

Every rank reads its own copy of the dataset. Documents of equal lengths give equal plans, whatever their tokens: if
one rank has shuffled otherwise, halves of two documents would meet. So a checksum of the dataset is compared before
the first step (`data.dataset_check`). In every micro-batch, so are the tokens around each cut, which both of its ranks
can read.

    rank 0   … t t t t t t ┊                    rank 0 adds the checksum of the tokens around the cut,
    rank 1                 ┊ t t t t t t …      rank 1 subtracts it: their sum over all ranks is 0
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distca_hf.arrays import IntArray
from distca_hf.data.documents import IGNORED_LABEL, NO_DRAWS, DocumentSource
from distca_hf.data.rows import Draws
from distca_hf.layout import Layout


# Padding rows hold this token; they are in no document, carry no label, and nothing attends to them.
PADDING_TOKEN = 0
# Number of tokens on either side of a cut that its ranks compare: enough for texts to differ, and few to read.
AROUND_A_CUT_TOKENS = 8
# Modulus of checksums and of their sums, so that they fit in int64.
MODULUS = 1 << 62


@dataclass(frozen=True)
class RankRows:
    """Inputs of one rank's model: int64 arrays of `[rows]`.

    Attributes:
        input_ids: tokens; `PADDING_TOKEN` in padding rows.
        position_ids: position inside the document; 0 in padding rows, each of which counts as a document.
        labels: not shifted; -100 at the first token of each document and in padding rows.
        shift_labels: label of the next token of the same document; -100 at document ends and in padding rows.
        attention_mask: 1 for tokens, 0 in padding rows: load-balancing losses and token metrics leave these out. The
            first row of a rank without tokens is 1, because a mean over no tokens is NaN.
        inputs: further inputs of the model by name, int64 or float32; 0 in padding rows.
    """

    input_ids: IntArray
    position_ids: IntArray
    labels: IntArray
    shift_labels: IntArray
    attention_mask: IntArray
    inputs: Mapping[str, NDArray[Any]]

    @property
    def num_labels(self) -> int:
        """Rows that have a label to learn."""
        return int(np.count_nonzero(self.shift_labels != IGNORED_LABEL))


def held_documents(layout: Layout, rank: int, documents: IntArray) -> IntArray:
    """Returns which documents of the source `rank` holds parts of. Arguments: see `collate`."""
    return documents[np.array([document for document, _, _ in layout.held_by(rank)], dtype=np.int64)]


def collate(
    layout: Layout, rank: int, documents: IntArray, source: DocumentSource, draws: Draws = NO_DRAWS
) -> RankRows:
    """Reads the tokens that `rank` holds, and no others (but for the label after a cut).

    Args:
        documents: `[documents]` which document of the source each document of the layout is.
        draws: of the documents that `rank` holds, if rows are drawn.
    """
    rows = int(layout.rank_rows[rank])
    input_ids = np.full(rows, PADDING_TOKEN, dtype=np.int64)
    position_ids = np.zeros(rows, dtype=np.int64)
    labels = np.full(rows, IGNORED_LABEL, dtype=np.int64)
    shift_labels = np.full(rows, IGNORED_LABEL, dtype=np.int64)
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
    attention_mask = (np.arange(rows) < max(row, 1)).astype(np.int64)
    return RankRows(input_ids, position_ids, labels, shift_labels, attention_mask, inputs)


@dataclass(frozen=True)
class Cut:
    """One side of a cut: this rank holds the tokens before or after it.

    Attributes:
        position: first token after the cut.
        checksum: of tokens and labels around it; negative on the rank that holds the tokens after it.
    """

    document: int
    position: int
    checksum: int


def cuts_of(
    layout: Layout, rank: int, documents: IntArray, source: DocumentSource, draws: Draws = NO_DRAWS
) -> list[Cut]:
    """Returns the cuts at which segments of a rank begin and end. Arguments: see `collate`."""
    cuts = []
    for document, start, stop in layout.held_by(rank):
        name, tokens = int(documents[document]), int(layout.document_tokens[document])
        for position, sign in ((stop, 1), (start, -1)):
            if 0 < position < tokens:
                cuts.append(Cut(name, position, sign * _checksum_around(source, name, position, tokens, draws)))
    return cuts


def sum_of(cuts: list[Cut]) -> int:
    """Returns the sum of checksums, modulo `MODULUS`. Over all ranks it is 0 where they hold the same."""
    return sum(cut.checksum for cut in cuts) % MODULUS


def _checksum_around(source: DocumentSource, document: int, position: int, document_tokens: int, draws: Draws) -> int:
    begin, end = max(0, position - AROUND_A_CUT_TOKENS), min(document_tokens, position + AROUND_A_CUT_TOKENS)
    digest = hashlib.blake2b(f"{document} {position}".encode(), digest_size=8)
    digest.update(source.read(document, begin, end, draws).to_bytes())
    return int.from_bytes(digest.digest()) % (MODULUS - 1) + 1
