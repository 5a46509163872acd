"""Rows are copied to where they belong, added in at least fp32 and in a fixed order, and completed by sinks."""

import math
import re

import pytest
import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.kernels.rows import (
    RowSums,
    add_sinks,
    copy_rows,
    prepare_add,
    prepare_copy,
    prepare_merge,
    scale_rows,
    sink_gradients,
)
from support.row_sums import assert_prepared_sums_serve


# --- copied


@pytest.mark.parametrize("shape", [(3,), (2, 4)], ids=str)
def test_rows_are_written_to_their_places(shape: tuple[int, ...]) -> None:
    target, places = torch.zeros(6, *shape), torch.tensor([4, 0, 3])
    rows = torch.arange(1.0, 4.0).view(3, *[1] * len(shape)).expand(3, *shape)
    copy_rows((rows,), None, (target,), places)

    assert target.flatten(1)[:, 0].tolist() == [2, 0, 0, 3, 1, 0]
    assert (target == target.flatten(1)[:, 0].view(6, *[1] * len(shape))).all()


def test_steps_are_prepared_for_all_tensors_that_are_alike() -> None:
    like, rows = (torch.zeros(6, 2), torch.zeros(6, 1)), torch.tensor([5, 0, 2])
    copy = prepare_copy(like, rows, (torch.zeros(3, 3),), None)
    merge = prepare_merge(torch.zeros(4, 1, 2), torch.zeros(4, 1), torch.zeros(2, 1, 2), torch.zeros(1, 2), 1)
    for layer in range(1, 3):
        k, v, beside = layer * torch.arange(12.0).view(6, 2), -torch.arange(6.0).view(6, 1), torch.zeros(3, 3)
        copy((k, v), (beside,))
        out, lse, far = torch.zeros(4, 1, 2), torch.zeros(4, 1), torch.full((2, 1, 2), 2.0 * layer)
        merge(out, lse, far, torch.zeros(1, 2))

        assert beside.tolist() == [[10 * layer, 11 * layer, -5], [0, layer, 0], [4 * layer, 5 * layer, -2]]
        assert out[:, 0, 0].tolist() == [0, layer, layer, 0]
        assert lse[:, 0].tolist() == pytest.approx([0, math.log(2), math.log(2), 0])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (torch.zeros(3, 4), "that have 2 and 3 rows"),
        (torch.zeros(2, 5), "(4,) of torch.float32 and (5,) of torch.float32 to (4,) of"),
        (torch.zeros(2, 4).long(), "(4,) of torch.float32 and (4,) of torch.int64 to (4,) of"),
    ],
    ids=["more rows", "wider rows", "another dtype"],
)
def test_rows_that_do_not_fit_are_refused(source: torch.Tensor, told: str) -> None:
    target = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=re.escape(told)):
        copy_rows((target[:2], source), None, (target, target), torch.tensor([0, 1]))

    assert not target.any()


@pytest.mark.parametrize(("rows", "places"), [([0, 1, 2], [3, 4]), (None, [3]), ([0], None)], ids=str)
def test_as_many_places_as_rows_are_needed(rows: list[int] | None, places: list[int] | None) -> None:
    target = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"cannot copy \d rows to \d places"):
        copy_rows((target[:2],), rows and torch.tensor(rows), (target,), places and torch.tensor(places))


def test_rows_side_by_side_are_taken_apart_and_put_together() -> None:
    """Whatever the shapes of the rows."""
    k, v, beside = torch.arange(24.0).view(6, 2, 2), -torch.arange(6.0).view(6, 1), torch.zeros(4, 5)
    copy_rows((k, v), torch.tensor([5, 2]), (beside,), torch.tensor([3, 0]))
    assert beside.tolist() == [[8, 9, 10, 11, -2], [0] * 5, [0] * 5, [20, 21, 22, 23, -5]]

    again_k, again_v = torch.zeros(2, 2, 2), torch.zeros(2, 1)
    copy_rows((beside,), torch.tensor([3, 0]), (again_k, again_v), None)
    assert torch.equal(again_k, k[[5, 2]])
    assert torch.equal(again_v, v[[5, 2]])


def test_whole_tensors_are_not_copied_by_rows() -> None:
    with pytest.raises(ValueError, match="neither rows nor places"):
        copy_rows((torch.ones(2),), None, (torch.zeros(2),), None)


# --- added


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


# --- sinks


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows(dtype: torch.dtype, tokens: int = 9, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    out = torch.randn(tokens, heads, 5, generator=generator, dtype=torch.float64).to(dtype)
    return out, 3 * torch.randn(tokens, heads, generator=generator, dtype=torch.float64).to(accumulation_dtype(dtype))


@pytest.mark.parametrize("of_sinks", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["[T, N]", "[N, T]"])
def test_sinks_are_added_in_place(dtype: torch.dtype, of_sinks: torch.dtype, transposed: bool) -> None:
    (out, lse), sinks = rows(dtype), torch.tensor([-2.0, 0.5, 4.0]).to(of_sinks)
    given = lse.t().contiguous().t() if transposed else lse.clone()
    result = out.clone()
    add_sinks(result, given, sinks)

    total = (lse.double().exp() + sinks.double().exp()).log()
    unit = torch.finfo(dtype).eps
    assert (given.double() - total).abs().max() <= 16 * torch.finfo(given.dtype).eps
    assert (result.double() - out.double() * (lse.double() - total).exp()[..., None]).abs().max() <= 8 * unit


@pytest.mark.parametrize(("lse", "sink", "share"), [(1e4, -1e4, 1.0), (-1e4, 1e4, 0.0), (800.0, 800.0, 0.5)])
def test_scores_of_any_size_are_added(lse: float, sink: float, share: float) -> None:
    """Their exponentials are beyond every dtype."""
    out, of_row = torch.full((1, 1, 2), 2.0), torch.full((1, 1), lse)
    add_sinks(out, of_row, torch.tensor([sink]))

    assert out.flatten().tolist() == pytest.approx([2 * share] * 2, abs=1e-4)
    assert of_row.item() == pytest.approx(max(lse, sink) + (0.6931472 if lse == sink else 0))


def test_rows_may_be_scaled_into_another_tensor() -> None:
    out, lse = rows(torch.float64)
    before, target = out.clone(), torch.full_like(out, torch.nan)
    scale_rows(out, lse, lse + 1, target)

    torch.testing.assert_close(target, before * torch.e**-1)
    assert torch.equal(out, before)


def test_gradient_is_that_of_one_more_column() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    dout, sinks = torch.randn(4, 1, 6, generator=generator, dtype=torch.float64), torch.tensor([0.3]).double()
    given = sinks.clone().requires_grad_()
    shares = torch.cat([scores[:, :4], given.expand(4, 1)], 1).softmax(-1)[:, :4]
    whole = (shares @ values).unsqueeze(1)
    [expected] = torch.autograd.grad(whole, given, dout)

    out, lse = (scores[:, :4].softmax(-1) @ values).unsqueeze(1), scores[:, :4].logsumexp(-1, keepdim=True)
    add_sinks(out, lse, sinks)
    with torch.no_grad():
        torch.testing.assert_close(sink_gradients(dout, out, lse, sinks), expected)
    torch.testing.assert_close(out, whole.detach())
