"""Packs of one optimizer step, sorted so that ranks run equally heavy ones at the same time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.data.accumulation import SortedPackSampler
from distca_hf.errors import PackingError


@given(
    rows=st.integers(0, 60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    seed=st.integers(-(2**40), 2**40),
    epoch=st.integers(0, 9),
)
def test_every_row_once_and_every_step_holds_the_rows_of_the_shuffled_order(
    rows: int, sizes: tuple[int, int, int], seed: int, epoch: int
) -> None:
    work = np.random.RandomState(rows).randint(1, 1000, rows)
    sampler, unsorted = (SortedPackSampler(values, *sizes, seed) for values in (work, np.ones(rows, dtype=np.int64)))
    sampler.set_epoch(epoch)
    unsorted.set_epoch(epoch)
    order, shuffled = list(sampler), list(unsorted)

    assert sorted(order) == list(range(rows))
    step = int(np.prod(sizes))
    for first in range(0, rows, step):
        assert sorted(order[first : first + step]) == sorted(shuffled[first : first + step])


def test_equally_heavy_packs_run_at_the_same_time() -> None:
    """Two ranks, three micro-steps: each micro-step takes neighbours of the sorted order."""
    sampler = SortedPackSampler(
        np.array([10, 500, 12, 490, 100, 98]), num_ranks=2, packs_per_rank=1, micro_steps=3, seed=0
    )

    assert list(sampler) == [1, 3, 4, 5, 2, 0]


def test_ranks_that_take_several_packs_get_close_sums() -> None:
    work = np.array([8, 7, 6, 5, 4, 3, 2, 1])
    order = list(SortedPackSampler(work, num_ranks=2, packs_per_rank=4, micro_steps=1, seed=3))

    assert (work[order[:4]].sum(), work[order[4:]].sum()) == (18, 18)


def test_epochs_differ_and_come_again() -> None:
    sampler = SortedPackSampler(np.arange(50), 2, 1, 2, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)

    assert first != second
    assert list(sampler) == first
    assert len(sampler) == 50


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, -2)])
def test_sizes_must_be_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(PackingError, match="hold no pack"):
        SortedPackSampler(np.arange(3), *sizes, seed=0)
