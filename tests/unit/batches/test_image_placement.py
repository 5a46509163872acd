"""Images go to ranks with less work, and stay where they arrived if they may."""

import numpy as np

from distca_hf.arrays import sum_by
from distca_hf.batches.image_plans import HARDLY_MORE, STAYING, ImageCost, are_even, place_images
from distca_hf.cost import imbalance


PAGE, PHOTO = 128 * 128, 32 * 32
# Operations of the tower of Qwen3-VL-8B: 27 layers of 1152 numbers.
COST = ImageCost(pair=4 * 1152 * 27, patch=2 * 412_000_000)


def test_work_is_that_of_attention_and_of_matrices() -> None:
    patches = np.array([1, 16, PAGE])

    assert COST.work_of(patches).tolist() == [4 * 1152 * 27 * p**2 + 824_000_000 * p for p in patches.tolist()]


def test_even_images_stay() -> None:
    home = np.array([0, 1, 1, 0])
    work = np.array([100, 100, 1, 3])

    assert place_images(work, home, 2).rank_of.tolist() == home.tolist()
    assert place_images(work[:0], home[:0], 2, every_rank=True).dummies.tolist() == [-1, -1]


def test_few_images_leave_their_rank() -> None:
    """Rank 0 has four pages, rank 1 sixteen photos: two pages leave."""
    home, work = np.repeat([0, 1], [4, 16]), COST.work_of(np.repeat([PAGE, PHOTO], [4, 16]))
    rank_of = place_images(work, home, 2).rank_of

    assert imbalance(sum_by(home, work, 2)) > 1.8
    assert imbalance(sum_by(rank_of, work, 2)) < 1.02
    assert (rank_of[:4] == 0).sum() == (rank_of[:4] == 1).sum() == 2


def test_a_rank_without_an_image_computes_a_copy_of_the_smallest() -> None:
    placed = place_images(np.array([5, 90]), np.array([2, 2]), 4, every_rank=True)

    assert sorted(placed.rank_of.tolist()) == [0, 2]
    assert placed.dummies.tolist() == [-1, 0, -1, 0]


def _dealt_plainly(work: np.ndarray, home: np.ndarray, num_ranks: int, room: float) -> list[int]:
    """Looks at all ranks for each image."""
    loads, rank_of = np.zeros(num_ranks, dtype=np.int64), home.tolist()
    for image in np.argsort(-work, kind="stable"):
        if loads[rank_of[image]] + work[image] > room:
            rank_of[image] = int(loads.argmin())
        loads[rank_of[image]] += work[image]
    return rank_of


def test_images_are_dealt_as_by_looking_at_all_ranks() -> None:
    random = np.random.default_rng(0)
    for most in (3, 50, 10**9) * 30:  # many are equal, and few
        num_ranks = int(random.integers(1, 9))
        work = random.integers(1, most, random.integers(1, 40))
        home = random.integers(0, num_ranks, len(work))
        least, loads = max(work.sum() / num_ranks, work.max()), sum_by(home, work, num_ranks)
        dealt = [_dealt_plainly(work, home, num_ranks, staying * least) for staying in (*STAYING, 0.0)]
        busiest = [sum_by(np.array(of), work, num_ranks).max() for of in dealt]
        first = next(at for at, load in enumerate(busiest) if at == len(STAYING) or load <= HARDLY_MORE * busiest[-1])

        placed = place_images(work, home, num_ranks).rank_of.tolist()
        assert placed == (home.tolist() if are_even(loads) else dealt[first])
