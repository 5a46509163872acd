"""Images that move: each arrives once where it is computed, and its features come home in the order of the batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IntArray, offsets, ranges
from distca_hf.batches.image_plans import ImageMoves, place_images
from distca_hf.cost import imbalance


def _exchange(rows: list[IntArray], sent: list[list[int]], received: list[list[int]]) -> list[IntArray]:
    """An all-to-all of the rows of all ranks; split sizes have to agree."""
    num_ranks = len(rows)
    assert [[sent[a][b] for a in range(num_ranks)] for b in range(num_ranks)] == received
    parts = [np.split(of, np.cumsum(counts)[:-1]) for of, counts in zip(rows, sent, strict=True)]
    return [np.concatenate([parts[source][rank] for source in range(num_ranks)]) for rank in range(num_ranks)]


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=25))
    ),
    st.data(),
    st.booleans(),
)
def test_features_of_every_image_come_home(held_by: tuple[int, list[int]], data: st.DataObject, every: bool) -> None:
    num_ranks, held = held_by[0], np.sort(np.array(held_by[1]))
    numbers = st.lists(st.integers(1, 9), min_size=len(held), max_size=len(held))
    rows, tokens, work = (np.array(data.draw(numbers)) for _ in range(3))
    placed = place_images(work**3, held, num_ranks, every)
    moves = [ImageMoves.of(placed.rank_of, placed.dummies, held, rank) for rank in range(num_ranks)]
    mine = [held == rank for rank in range(num_ranks)]

    # Rows of pixels are numbered over all ranks; those of a rank's batch follow each other.
    taken = [one.pixel_rows(rows[own], rows) for one, own in zip(moves, mine, strict=True)]
    borders = offsets(rows)
    of_batches = [
        ranges(borders[:-1][own], rows[own])[leaving] for own, (leaving, *_) in zip(mine, taken, strict=True)
    ]
    pixels = _exchange(of_batches, [sent for _, sent, _ in taken], [received for *_, received in taken])
    for one, arrived in zip(moves, pixels, strict=True):
        assert arrived.tolist() == ranges(borders[:-1][one.computed], rows[one.computed]).tolist()

    ways = [one.feature_rows(tokens[own], tokens) for one, own in zip(moves, mine, strict=True)]
    of_units = offsets(tokens)
    computed = [
        ranges(of_units[:-1][one.computed], tokens[one.computed])[: sum(sent)]
        for one, (_, sent, _) in zip(moves, ways, strict=True)
    ]
    home = _exchange(computed, [sent for _, sent, _ in ways], [received for *_, received in ways])
    for own, arrived, (places, *_) in zip(mine, home, ways, strict=True):
        in_order = np.empty_like(arrived)
        in_order[places] = arrived
        assert in_order.tolist() == ranges(of_units[:-1][own], tokens[own]).tolist()
    if every:
        assert all(len(one.computed) for one in moves)


@given(st.integers(1, 8), st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.data())
def test_no_rank_has_a_third_more_than_it_must(num_ranks: int, sizes: list[int], data: st.DataObject) -> None:
    """Largest first is within 4/3 of the best way; staying at home adds a percent."""
    work = np.array(sizes)
    home = np.array(data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(work), max_size=len(work))))
    rank_of = place_images(work, home, num_ranks).rank_of
    loads = np.bincount(rank_of, weights=work, minlength=num_ranks)
    in_order = np.sort(work)[::-1]
    # Of the largest images, two must share a rank.
    pair = in_order[num_ranks - 1] + in_order[num_ranks] if len(work) > num_ranks else 0

    assert loads.max() <= max(
        1.02 * work.mean() * len(work) / num_ranks, 1.01 * 4 / 3 * max(work.sum() / num_ranks, pair, work.max())
    )
    assert imbalance(loads) <= imbalance(np.bincount(home, weights=work, minlength=num_ranks)) + 1e-9
