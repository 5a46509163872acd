"""Gradients that come home are added row by row, in at least fp32, in a fixed order."""

import pytest
import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.kernels.rows import RowSums, prepare_add
from support.row_sums import assert_prepared_sums_serve


# Rows 1, 4 and 5 of six get something: 4 from the store, 1 and 5 from the first server, all three from the second.
SUMS = RowSums(
    rows=torch.tensor([1, 4, 5]),
    own_rows=torch.tensor([2]),
    own_in_shared=torch.tensor([1]),
    returned_in_shared=torch.tensor([2, 0, 1, 0, 2]),
    parts=(slice(0, 2), slice(2, 5)),
)


def test_every_row_gets_what_is_its_own() -> None:
    target, own = torch.zeros(6, 2), torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 2)
    returned = torch.tensor([[10.0], [20.0], [40.0], [80.0], [160.0]]).expand(5, 2)
    prepare_add(target, own, returned, SUMS)(target, own, returned)

    assert target[:, 0].tolist() == [0, 20 + 80, 0, 0, 4 + 40, 10 + 160]
    assert torch.equal(target[:, 0], target[:, 1])


def test_rows_of_heads_are_added_by_a_prepared_step() -> None:
    """Own and returned rows are parts of wider ones."""
    generator = torch.Generator().manual_seed(0)
    one, other = (
        [
            torch.randn(rows, parts * 4, generator=generator)[:, -4:].unflatten(1, (2, 2))
            for rows, parts in ((6, 1), (3, 2), (5, 3))
        ]
        for _ in range(2)
    )
    assert_prepared_sums_serve(one, other, SUMS)


def test_orders_for_one_kernel_are_by_row_and_then_by_server() -> None:
    assert SUMS.offsets.tolist() == [0, 2, 3, 5]
    assert SUMS.order.tolist() == [1, 3, 2, 0, 4]
    assert SUMS.own_of_shared.tolist() == [-1, 2, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """Each of four halves of a unit would be lost by itself."""
    unit = torch.finfo(dtype).eps
    rows = torch.tensor([0])
    sums = RowSums(rows, rows, rows, torch.zeros(3, dtype=torch.int64), tuple(slice(at, at + 1) for at in range(3)))
    target = torch.ones(1, 4, dtype=dtype)
    half = torch.full((3, 4), unit / 2, dtype=dtype)
    prepare_add(target, half[:1], half, sums)(target, half[:1], half)

    rounds_at_once = accumulation_dtype(dtype) != dtype
    assert (target == (1 + 2 * unit if rounds_at_once else 1)).all()


def test_nothing_is_added_where_nothing_is_shared() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    target = torch.randn(3, 2)
    before = target.clone()
    nothing = torch.randn(0, 2)
    prepare_add(target, nothing, nothing, RowSums(none, none, none, none, ()))(target, nothing, nothing)

    assert torch.equal(target, before)
