"""Rows of one rank: tokens, positions and labels in the order of the layout, and padding that belongs to nobody."""

import random
from typing import Any

import numpy as np
from datasets import Dataset

from distca_hf.data.collate import collate
from distca_hf.data.documents import DocumentSource
from distca_hf.layout import Layout
from support.layouts import random_layout


DOCUMENTS = [[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22], [30]]


def example() -> Layout:
    """Rank 0 holds d1 and the beginning of d0, rank 1 holds d2 and the rest of d0; both are padded."""
    return Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [7, 8])


def source_of(documents: list[list[int]], **columns: Any) -> DocumentSource:
    return DocumentSource(Dataset.from_dict({"input_ids": documents, **columns}), 1000)


def test_rank_without_tokens_leaves_one_row_to_average_over() -> None:
    layout = Layout.from_segments([3], [[(0, 0, 3)], []], [4, 4])
    masks = [collate(layout, rank, np.array([1]), source_of(DOCUMENTS)).attention_mask for rank in (0, 1)]

    assert [mask.tolist() for mask in masks] == [[1, 1, 1, 0], [1, 0, 0, 0]]


class CountingSource:
    """A source that remembers which tokens it was asked for."""

    def __init__(self, source: DocumentSource) -> None:
        self._source, self.inputs = source, source.inputs
        self.reads: list[tuple[int, int, int]] = []

    def read(self, document: int, start: int, stop: int, draws: Any) -> Any:
        self.reads.append((document, start, stop))
        return self._source.read(document, start, stop, draws)


def test_only_the_tokens_of_the_rank_are_read() -> None:
    source = CountingSource(source_of(DOCUMENTS))
    collate(example(), 1, np.arange(3), source)

    assert source.reads == [(2, 0, 1), (0, 2, 8)]


def test_ranks_together_hold_what_the_documents_hold() -> None:
    """Random layouts, row by row against the whole documents."""
    for seed in range(60):
        rng = random.Random(seed)
        layout = random_layout(rng, num_ranks=1 + seed % 5)
        documents = [[rng.randrange(1, 1000) for _ in range(tokens)] for tokens in layout.document_tokens]
        masks = [[rng.randrange(2) for _ in document] for document in documents]
        source = source_of(documents, completion_mask=masks)
        seen, labels = 0, 0
        for rank in range(layout.num_ranks):
            rows = collate(layout, rank, np.arange(len(documents)), source)
            held = layout.segments_of(rank)
            at = 0
            for segment in range(held.start, held.stop):
                document = int(layout.segment_document[segment])
                for position in range(int(layout.segment_start[segment]), int(layout.segment_stop[segment])):
                    tokens, mask = documents[document], masks[document]
                    label = [-100 if p == 0 or not mask[p] else tokens[p] for p in range(len(tokens))] + [-100]
                    row = [rows.input_ids[at], rows.position_ids[at], rows.labels[at], rows.shift_labels[at]]
                    assert row == [tokens[position], position, label[position], label[position + 1]]
                    at += 1
            seen += at
            labels += rows.num_labels
            assert not rows.input_ids[at:].any()
            assert not rows.position_ids[at:].any()
            assert (rows.labels[at:] == -100).all()
            assert (rows.shift_labels[at:] == -100).all()
        assert seen == sum(map(len, documents))
        assert labels == sum(sum(mask[1:]) for mask in masks)
