"""Placement of batches worth looking at: equal documents, one document, dust, giants, fewer tokens than ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca_hf.errors import PackingError
from distca_hf.layout import TILE_TOKENS, Layout
from distca_hf.placement.place import fill_in_order, place


def work_off(layout: Layout) -> float:
    """Largest distance of a rank's work from the mean, as a share of the mean."""
    work = layout.rank_work.astype(np.float64)
    return float(np.abs(work / work.mean() - 1).max())


# --- batches with one right answer


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [7, 1, 300, 2], [2**20, 3]], ids=str)
def test_one_rank_holds_every_document_whole_and_in_order(lengths: list[int]) -> None:
    layout = place(lengths, 1)

    assert layout.held_by(0) == [(document, 0, tokens) for document, tokens in enumerate(lengths)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_documents_leave_all_ranks_empty(num_ranks: int) -> None:
    for layout in (place([], num_ranks), fill_in_order([], num_ranks)):
        layout.validate()
        assert layout.rank_rows.tolist() == [0] * num_ranks
        assert layout.num_documents == 0


@pytest.mark.parametrize(
    ("tokens", "num_ranks"),
    [(1000, 2), (1000, 3), (1000, 5)] + [(tokens, ranks) for tokens in (65537, 2**20) for ranks in (2, 5, 24, 64)],
)
def test_one_document_over_all_ranks_is_a_zigzag(tokens: int, num_ranks: int) -> None:
    """The n-th rank from the back ends where the n-th of 2 x ranks equal parts from the back does, up to a tile: work
    is equal, and keys and values cost what they cost in a zigzag."""
    layout = place([tokens], num_ranks)
    ends = sorted((layout.held_by(rank)[-1][2] for rank in range(num_ranks)), reverse=True)

    for rank, end in enumerate(ends):
        assert abs(end - tokens * (2 * num_ranks - rank) / (2 * num_ranks)) <= (rank + 1) * TILE_TOKENS
    assert work_off(layout) <= 0.008 + 4 * num_ranks / tokens


@pytest.mark.parametrize("tokens", [1, 1000, 2**20])
@pytest.mark.parametrize(("per_rank", "num_ranks"), [(1, 24), (2, 5), (9, 64)])
def test_equal_documents_that_divide_evenly_are_not_cut(tokens: int, per_rank: int, num_ranks: int) -> None:
    layout = place([tokens] * (per_rank * num_ranks), num_ranks)

    assert all((start, stop) == (0, tokens) for rank in range(num_ranks) for _, start, stop in layout.held_by(rank))
    assert [len(layout.held_by(rank)) for rank in range(num_ranks)] == [per_rank] * num_ranks


def test_a_giant_of_the_longest_length_is_balanced_in_exact_integers() -> None:
    tokens = 2**31 - 1
    layout = place(np.array([tokens], dtype=np.int32), 8)

    layout.validate()
    assert sum(layout.rank_work.tolist()) == tokens * (tokens + 1) // 2
    assert sum(layout.rank_tokens.tolist()) == tokens
    assert work_off(layout) <= 1e-3


# --- what the loader relies on


def test_layout_does_not_depend_on_the_process() -> None:
    """Ranks are processes with hash seeds of their own, and must derive the same layout."""
    program = (
        "import random; from distca_hf.placement.place import place; rng = random.Random(9)\n"
        "for ranks in (2, 7, 64):\n"
        "    lengths = [rng.choice([64, 500, 500, 9000, int(rng.lognormvariate(7, 1.5)) + 1]) for _ in range(300)]\n"
        "    layout = place(lengths, ranks)\n"
        "    print([layout.segment_document.tolist(), layout.segment_start.tolist(), layout.segment_stop.tolist(),"
        " layout.rank_segments.tolist(), layout.rank_rows.tolist()])"
    )
    root = Path(__file__).parents[3]
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }

    assert len(printed) == 1
    assert printed.pop().count("\n") == 3


@pytest.mark.parametrize("pack", [place, fill_in_order])
@pytest.mark.parametrize(
    ("lengths", "words"), [([5, 0], "document 1 has 0 tokens"), ([1.5], "list of integers, not an array of float64")]
)
def test_impossible_lengths_are_refused(pack: Any, lengths: Any, words: str) -> None:
    with pytest.raises(PackingError, match=words):
        pack(lengths, 2)
