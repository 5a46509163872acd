"""Collate: the rows of one rank as arrays, from a layout and a document source. Labels are shifted before documents
are cut."""

from dataclasses import dataclass

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.data.documents import IGNORED_LABEL, DocumentSource
from distca_hf.layout import Layout


# Padding rows hold this token; they are in no document, carry no label, and nothing attends to them.
PADDING_TOKEN = 0


@dataclass(frozen=True)
class RankRows:
    """Inputs of one rank's model: int64 arrays of `[rows]`.

    Attributes:
        input_ids: tokens; `PADDING_TOKEN` in padding rows.
        position_ids: position inside the document; 0 in padding rows, each of which is a document of its own.
        labels: not shifted; -100 at the first token of each document and in padding rows.
        shift_labels: label of the next token of the same document; -100 at document ends and in padding rows.
        attention_mask: 1 for tokens, 0 in padding rows: load-balancing losses and token metrics leave these out. The
            first row of a rank without tokens is 1, because a mean over no tokens is NaN.
    """

    input_ids: IntArray
    position_ids: IntArray
    labels: IntArray
    shift_labels: IntArray
    attention_mask: IntArray

    @property
    def num_labels(self) -> int:
        """Rows that have a label to learn."""
        return int(np.count_nonzero(self.shift_labels != IGNORED_LABEL))


def collate(layout: Layout, rank: int, documents: IntArray, source: DocumentSource) -> RankRows:
    """Reads the tokens that `rank` holds, and no others (but for the label after a cut).

    Args:
        layout: layout of the micro-batch.
        documents: `[documents]` which document of the source each document of the layout is.
    """
    rows = int(layout.rank_rows[rank])
    input_ids = np.full(rows, PADDING_TOKEN, dtype=np.int64)
    position_ids = np.zeros(rows, dtype=np.int64)
    labels = np.full(rows, IGNORED_LABEL, dtype=np.int64)
    shift_labels = np.full(rows, IGNORED_LABEL, dtype=np.int64)
    row = 0
    for document, start, stop in layout.held_by(rank):
        tokens = source.read(int(documents[document]), start, stop)
        at = slice(row, row := row + stop - start)
        input_ids[at] = tokens.input_ids
        position_ids[at] = np.arange(start, stop)
        labels[at] = tokens.labels
        shift_labels[at] = tokens.shift_labels
    attention_mask = (np.arange(rows) < max(row, 1)).astype(np.int64)
    return RankRows(input_ids, position_ids, labels, shift_labels, attention_mask)
