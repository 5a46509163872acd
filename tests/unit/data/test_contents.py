"""Ranks that hold other tokens or labels of equal lengths: checksums of the dataset, and of tokens around cuts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import distca_hf
from distca_hf.batches.agreement import check_cuts
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.comm.transport import Transport
from distca_hf.data import collate
from distca_hf.data.collate import AROUND_A_CUT_TOKENS, checked_contents, cuts_of, sum_of
from distca_hf.data.documents import DocumentSource
from distca_hf.data.rows import Reading
from distca_hf.errors import PlanMismatchError
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.testing import run_ranks


def source_of(rows: list[list[int]], **columns: Any) -> DocumentSource:
    return DocumentSource(Dataset.from_dict({"input_ids": rows, **columns}), 1 << 20)


ROWS = [[7 * row + token for token in range(length)] for row, length in enumerate((40, 3, 90, 1, 25))]


# --- the dataset


def test_datasets_of_equal_contents_have_one_checksum_however_they_are_stored() -> None:
    plain = Dataset.from_dict({"input_ids": ROWS})
    stored = (
        plain,
        plain.add_column("labels", ROWS),
        Dataset.from_dict({"input_ids": ROWS[::-1]}).select([4, 3, 2, 1, 0]),
        plain.cast_column("input_ids", plain.features["input_ids"].__class__(plain.features["input_ids"].feature)),
        Dataset.from_list([{"input_ids": np.array(row, dtype=np.int32)} for row in ROWS]),
    )
    assert len({checked_contents(DocumentSource(dataset, 1 << 20)) for dataset in stored}) == 1


@pytest.mark.parametrize("row", range(5))
def test_every_token_counts_in_a_small_dataset(row: int) -> None:
    usual = checked_contents(source_of(ROWS))
    for at in range(len(ROWS[row])):
        changed = [list(tokens) for tokens in ROWS]
        changed[row][at] += 1
        assert checked_contents(source_of(changed)) != usual


def test_labels_and_masks_count() -> None:
    labels = [list(row) for row in ROWS]
    labels[2][50] = -100
    mask = [[1] * len(row) for row in ROWS]
    mask[2][51] = 0
    checksums = {
        checked_contents(source_of(ROWS)),
        checked_contents(source_of(ROWS, labels=labels)),
        checked_contents(source_of(ROWS, completion_mask=mask)),
        checked_contents(
            DocumentSource(Dataset.from_dict({"input_ids": ROWS}), 1 << 20, reading=Reading(unlearnt_token=50))
        ),
    }
    assert len(checksums) == 4


def test_of_a_large_dataset_documents_all_over_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "MOST_DOCUMENTS", 10)
    monkeypatch.setattr(collate, "MOST_TOKENS", 100)
    rows = [[row] * 30 for row in range(200)]
    source, read = source_of(rows), []
    right = DocumentSource.read
    monkeypatch.setattr(
        DocumentSource, "read", lambda self, *given: read.append(given) or right(self, *given), raising=True
    )
    shuffled = checked_contents(source_of([rows[0], *rows[:0:-1]]))
    read.clear()

    assert checked_contents(source) != shuffled
    beginnings, ends = read[::2], read[1::2]
    assert [document for document, *_ in beginnings] == [0, 22, 44, 66, 88, 110, 132, 154, 176, 199]
    assert all((start, stop) == (0, 10) for _, start, stop, _ in beginnings)
    assert [document for document, *_ in ends] == [document for document, *_ in beginnings]


@pytest.mark.parametrize("side", ["end in", "begin with"])
@pytest.mark.parametrize(
    ("padding", "padded", "told"), [(40, 30, True), (3, 30, False), (40, 2, False), (0, 30, False)]
)
def test_rows_that_look_padded_are_told(
    side: str, padding: int, padded: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither rows of one token alone, nor a few."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 90, 60).tolist() for _ in range(60)]
    for at in range(padded):
        filled = [0] * (padding + at % 2 if padding == 40 else padding)
        rows[at] = (rows[at] + filled) if side == "end in" else filled + rows[at]
    checked_contents(source_of([*rows, *[[5] * 30] * 60]))
    wanted = f"30 of 120 documents that were looked at {side} a run of token 0 (row 29: 41 of them)"

    assert [record.getMessage().startswith(wanted) for record in caplog.records] == [True] * told


def test_inputs_of_the_model_count() -> None:
    kinds = [[0] * len(row) for row in ROWS]
    reading = Reading(inputs=frozenset({"token_type_ids"}))
    checksums = set()
    for kind in (0, 1):
        kinds[2][51] = kind
        dataset = Dataset.from_dict({"input_ids": ROWS, "token_type_ids": kinds})
        checksums.add(checked_contents(DocumentSource(dataset, 1 << 20, reading=reading)))
    assert len(checksums) == 2


# --- cuts


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    num_ranks=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_sides_of_all_cuts_add_up_to_nothing(lengths: list[int], num_ranks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = source_of([rng.integers(0, 99, length).tolist() for length in lengths])
    layout = place(np.array(lengths), num_ranks)
    documents = np.arange(len(lengths))
    cuts = [cuts_of(layout, rank, documents, source) for rank in range(num_ranks)]

    assert sum(map(sum_of, cuts)) % collate.MODULUS == 0
    assert all(0 <= sum_of(of_rank) < collate.MODULUS for of_rank in cuts)
    held = layout.segment_start > 0
    assert sum(cut.checksum < 0 for of_rank in cuts for cut in of_rank) == int(held.sum())


@pytest.mark.parametrize("offset", [-AROUND_A_CUT_TOKENS, -1, 0, AROUND_A_CUT_TOKENS - 1])
def test_tokens_on_both_sides_of_a_cut_count(offset: int) -> None:
    layout = Layout.from_segments([60], [[(0, 0, 30)], [(0, 30, 60)]])
    rows = [list(range(60))]
    other = [list(range(60))]
    other[0][30 + offset] += 1
    left = cuts_of(layout, 0, np.array([0]), source_of(rows))
    right = cuts_of(layout, 1, np.array([0]), source_of(other))

    assert [cut.position for cut in left + right] == [30, 30]
    assert (sum_of(left) + sum_of(right)) % collate.MODULUS != 0


def test_another_document_of_the_same_tokens_counts() -> None:
    layout, source = Layout.from_segments([6], [[(0, 0, 3)], [(0, 3, 6)]]), source_of([[1] * 6] * 2)
    left, right = cuts_of(layout, 0, np.array([0]), source), cuts_of(layout, 1, np.array([1]), source)

    assert (sum_of(left) + sum_of(right)) % collate.MODULUS != 0


# --- in the loader


def _first_batch(change: Callable[[list[list[int]]], None]) -> Callable[[Transport], str]:
    """What a rank hears when it asks for the first batch; rank 2 holds something else."""

    def run(transport: Transport) -> str:
        rows = [[row] * 200 for row in range(6)]
        if transport.rank == 2:
            change(rows)
        config = distca_hf.DistCAPlugin(tokens_per_rank=100)
        loader = PlacedLoader(
            Dataset.from_dict({"input_ids": rows}),
            PlacedPlanner(config, transport.world_size),
            transport,
            torch.device("cpu"),
            shuffle=False,
        )
        with pytest.raises(PlanMismatchError) as refused:
            next(iter(loader))
        return str(refused.value)

    return run


def test_every_rank_names_the_ranks_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "MOST_DOCUMENTS", 1)

    def change(rows: list[list[int]]) -> None:
        rows[1:] = [[99] * 200 for _ in rows[1:]]

    for rank, words in enumerate(run_ranks(4, _first_batch(change))):
        assert f"rank {rank}, micro-batch 0: rank 1 and rank 2 hold other tokens" in words or (
            f"rank {rank}, micro-batch 0: rank 2 and rank 3 hold other tokens" in words
        )
        assert "of document 1, where it is cut" in words
        assert "shuffle it with a seed" in words


def test_cut_inside_of_one_rank_is_not_named() -> None:
    rows = [list(range(60)), list(range(100, 160))]
    others = [rows[0], rows[1][::-1]]
    layout = Layout.from_segments([60, 60], [[(0, 30, 60), (0, 0, 30), (1, 0, 30)], [(1, 30, 60)]])

    def run(transport: Transport) -> str:
        cuts = cuts_of(layout, transport.rank, np.arange(2), source_of(others if transport.rank else rows))
        of_ranks = transport.gather([len(cuts), sum_of(cuts)], "cuts").wait()
        numbers = {"cuts": [row[0] for row in of_ranks], "around_cuts": [row[1] for row in of_ranks]}
        with pytest.raises(PlanMismatchError) as refused:
            check_cuts(transport, SimpleNamespace(cuts=cuts), 0, numbers)  # type: ignore[arg-type]
        return str(refused.value)

    for words in run_ranks(2, run):
        assert "rank 0 and rank 1 hold other tokens or labels around token 30 of document 1, where" in words


def test_other_contents_are_named_before_the_first_batch() -> None:
    for words in run_ranks(3, _first_batch(lambda rows: rows.reverse())):
        assert "contents of documents is" in words
        assert "on ranks 0 and 1" in words
