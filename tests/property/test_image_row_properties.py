"""Rows of images: each arrives once, with the rows that move, and is numbered in the order of the rank's rows."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IntArray, offsets
from distca_hf.layout import Layout, Topology
from distca_hf.placement.given import place_given
from distca_hf.planning.row_moves import RowMoves


def arrived(values: list[IntArray], moves: list[RowMoves]) -> list[IntArray]:
    """Returns what each rank receives of these values, in the order of arrival."""
    parts = [np.split(of, np.cumsum(one.sent_counts)[:-1]) for of, one in zip(values, moves, strict=True)]
    for source, one in enumerate(moves):
        assert one.received_counts == [other.sent_counts[source] for other in moves]
    return [np.concatenate([of[rank] for of in parts]) for rank in range(len(moves))]


@given(
    st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(1, 12), max_size=30),
    st.booleans(),
)
def test_rows_of_images_move_with_all_rows(packs: list[list[int]], runs: list[int], is_padded: bool) -> None:
    """Runs without and with images take turns; every second row of a padded batch is padding."""
    home, num_ranks = Layout.from_packs(packs), len(packs)
    first = offsets(home.rank_tokens)
    of_tokens = np.resize(np.repeat(np.arange(len(runs)) % 2 == 1, runs), first[-1]) if runs else np.zeros(first[-1])
    is_image = [of_tokens[start:stop].astype(bool) for start, stop in pairwise(first)]
    borders = [np.flatnonzero(np.diff(of, prepend=False, append=False)) for of in is_image]
    placed = place_given(home, Topology(num_ranks, num_ranks))
    places = [2 * np.arange(len(of)) if is_padded else None for of in is_image]
    moves = [
        RowMoves.of(home, placed, rank, of, max(1, 2 * len(is_image[rank])), borders) for rank, of in enumerate(places)
    ]

    def tokens_at(rank: int, rows: IntArray) -> IntArray:
        """Returns the numbers of tokens at places of a batch."""
        return first[rank] + rows // (2 if is_padded else 1)

    images = [one.images for one in moves]
    all_came = arrived([tokens_at(rank, one.sent) for rank, one in enumerate(moves)], moves)
    images_came = arrived([tokens_at(rank, one.sent) for rank, one in enumerate(images)], images)
    assert sum(map(len, images_came)) == of_tokens.sum()
    for one, image, came, of_images in zip(moves, images, all_came, images_came, strict=True):
        in_rows = np.full(one.num_placed, -1)
        in_rows[one.received] = came
        in_order = np.full(image.num_placed, -1)
        in_order[image.received] = of_images
        assert in_order.tolist() == in_rows[image.positions].tolist()
        held = in_rows[in_rows >= 0]
        assert in_order.tolist() == held[of_tokens[held].astype(bool)].tolist()
        assert image.crosses == one.crosses


def test_moves_without_known_images_have_none() -> None:
    home = Layout.from_packs([[40], [3]])
    placed = place_given(home, Topology(2, 2))

    assert RowMoves.of(home, placed, 0).images is None
    none = np.zeros(0, dtype=np.int64)
    one = RowMoves.of(home, placed, 1, image_runs=[np.array([0, 40]), none]).images
    assert one is not None
    assert one.sent_counts == [0, 0]
    assert one.num_placed == sum(one.received_counts) == len(one.positions) > 0
