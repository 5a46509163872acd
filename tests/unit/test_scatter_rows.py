"""Rows that came from elsewhere are written where they belong, and nothing else is."""

import pytest
import torch

from distca_hf.kernels.scatter_rows import scatter_rows


@pytest.mark.parametrize("shape", [(3,), (2, 4)], ids=str)
def test_rows_are_written_to_their_places(shape: tuple[int, ...]) -> None:
    target, places = torch.zeros(6, *shape), torch.tensor([4, 0, 3])
    rows = torch.arange(1.0, 4.0).view(3, *[1] * len(shape)).expand(3, *shape)
    scatter_rows(target, places, rows)

    assert target.flatten(1)[:, 0].tolist() == [2, 0, 0, 3, 1, 0]
    assert (target == target.flatten(1)[:, 0].view(6, *[1] * len(shape))).all()


def test_no_rows_change_nothing() -> None:
    target = torch.ones(3, 2)
    scatter_rows(target, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))

    assert (target == 1).all()
