"""Our own Triton kernels, which merge attention, sum gradients, copy rows and add sinks, against the same in torch."""

import pytest
import torch

from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.kernels.rows import (
    RowSums,
    add_sinks,
    copy_rows,
    merge_rows,
    prepare_add,
    prepare_merge,
    scale_rows,
    sink_gradients,
)
from distca_hf.torch_private import _public_current_stream, current_stream
from support.row_sums import assert_prepared_sums_serve


pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)


def _parts_of_one(*index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors on the device, as they come with a plan: one after the other, so that each begins anywhere."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), *index]).cuda()[1:].split([len(x) for x in index])


def test_streams_are_found_by_private_and_public_names_alike() -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            device = torch.cuda.current_device()
            assert current_stream(device) == _public_current_stream(device) == stream.cuda_stream


# --- merge


@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 128), (3, 64), (7, 96), (8, 128), (9, 80), (32, 128), (40, 256)], ids=str
)
@pytest.mark.parametrize("around", [(0, 0), (3, 2)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_is_its_formula_in_place(dtype: torch.dtype, around: tuple[int, int], heads: int, dim: int) -> None:
    """Also where heads are no power of two; what lies beside the given heads and tokens is not touched."""
    tokens, precise = 515, accumulation_dtype(dtype)
    whole_out, whole_lse = (
        torch.full((tokens + 4, sum(around) + heads, *rest), 7.0, device="cuda", dtype=of)
        for rest, of in (((dim,), dtype), ((), precise))
    )
    out, lse = (x[1:-3, around[0] : around[0] + heads] for x in (whole_out, whole_lse))
    out.copy_(_random(tokens, heads, dim, dtype=dtype))
    lse.copy_(5 * _random(tokens, heads, dtype=precise, seed=1))
    far_out, far_lse = _random(tokens, heads, dim, dtype=dtype, seed=2), _random(tokens, heads, dtype=precise, seed=3)

    weights = [part.double().exp().unsqueeze(-1) for part in (lse, far_lse)]
    expected = (weights[0] * out.double() + weights[1] * far_out.double()) / sum(weights)
    expected_lse = sum(weights).squeeze(-1).log()
    merge_rows(out, lse, far_out, far_lse.T.contiguous())

    unit = 64 * torch.finfo(precise).eps  # shares are as exact as log-sum-exps of up to twenty
    assert ((out.double() - expected).abs() <= unit + torch.finfo(dtype).eps * expected.abs()).all()
    assert (lse.double() - expected_lse).abs().max() <= unit
    outside = torch.ones(whole_lse.shape, dtype=torch.bool, device="cuda")
    outside[1:-3, around[0] : around[0] + heads] = False
    assert (whole_out[outside] == 7).all()
    assert (whole_lse[outside] == 7).all()


def test_rows_are_merged_from_a_given_one_on() -> None:
    """As if these rows had been given alone, with any number of them; those around them stay."""
    for rows, start in ((1, 0), (37, 5), (64, 100), (1, 514)):
        whole, far = (_random(of, 8, 128, dtype=torch.bfloat16, seed=of) for of in (515, rows))
        lse, far_lse = _random(515, 8, dtype=torch.float32), _random(8, rows, dtype=torch.float32, seed=1)
        expected, expected_lse = whole.clone(), lse.clone()
        merge_rows(expected[start : start + rows], expected_lse[start : start + rows], far, far_lse)
        merge_rows(whole, lse, far, far_lse, start)

        assert torch.equal(whole, expected)
        assert torch.equal(lse, expected_lse)


def test_log_sum_exps_may_lie_head_by_head() -> None:
    """As kernels write them: of all heads, or of some. The second layer is merged as the first one was."""
    for heads in (slice(0, 8), slice(4, 8)):
        whole, far = (_random(of, 8, 128, dtype=torch.bfloat16, seed=of)[:, heads] for of in (515, 37))
        far, far_lse = far.contiguous(), _random(far.shape[1], 37, dtype=torch.float32, seed=1)
        lse = _random(515, 8, dtype=torch.float32)
        head_by_head = lse.T.contiguous().T
        expected, expected_lse = whole.clone(), lse[:, heads].clone()
        merge_rows(expected, expected_lse, far, far_lse, 5)
        merge_alike = prepare_merge(whole, head_by_head[:, heads], far, far_lse, 5)
        for _ in range(2):
            got, got_lse = _random(515, 8, 128, dtype=torch.bfloat16, seed=515)[:, heads], lse.T.contiguous().T
            merge_alike(got, got_lse[:, heads], far, far_lse)

            assert torch.equal(got, expected)
            assert torch.equal(got_lse[:, heads], expected_lse)


def test_merge_takes_log_sum_exps_of_any_size() -> None:
    for near, far, expected in ((1e4, -1e4, 2.0), (-1e4, 1e4, 4.0), (800.0, 800.0, 3.0), (-800.0, -800.0, 3.0)):
        out, far_out = (torch.full((1, 1, 64), value, device="cuda", dtype=torch.bfloat16) for value in (2.0, 4.0))
        lse, far_lse = (torch.full((1, 1), value, device="cuda") for value in (near, far))
        merge_rows(out, lse, far_out, far_lse)

        assert (out == expected).all()
        assert lse.item() == pytest.approx(max(near, far) + (0.6931472 if near == far else 0))


def test_no_rows_are_merged_added_or_copied() -> None:
    out, lse = _random(5, 2, 64, dtype=torch.bfloat16), _random(5, 2, dtype=torch.float32)
    before = out.clone(), lse.clone()
    merge_rows(out[2:2], lse[2:2], out[:0].clone(), lse[:0].T.clone())
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    rows, nothing = out.flatten(1), out[:0].flatten(1)
    prepare_add(rows, nothing, nothing, RowSums(none, none, none, none, ()))(rows, nothing, nothing)
    copy_rows((out[:0],), None, (out,), none)

    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


# --- sums


def _sums(generator: torch.Generator) -> tuple[RowSums, int, int, int]:
    """Sums of some rows of 300, with rows of a store and of three servers, one of which returns nothing."""
    shared = torch.randperm(300, generator=generator)[:120].sort().values
    own_in_shared = torch.randperm(120, generator=generator)[:70]
    own_rows = torch.randperm(90, generator=generator)[:70]
    parts = [torch.randperm(120, generator=generator)[:rows] for rows in (100, 0, 50)]
    stops = [sum(len(part) for part in parts[: at + 1]) for at in range(len(parts))]
    slices = tuple(slice(stop - len(part), stop) for stop, part in zip(stops, parts, strict=True) if len(part))
    index = (shared, own_rows, own_in_shared, torch.cat(parts))
    return RowSums(*_parts_of_one(*index), slices), 300, 90, stops[-1]


@pytest.mark.parametrize("store_dtype", [torch.bfloat16, torch.float32], ids=["store", "summed store"])
@pytest.mark.parametrize("width", [128, 1024, 640, 24], ids=str)
def test_rows_are_added_in_fp32_and_rounded_once(width: int, store_dtype: torch.dtype) -> None:
    """Rows of keys beside their values are strided, as are those that come home."""
    sums, rows, stored, returned_rows = _sums(torch.Generator().manual_seed(width))
    target = _random(rows, width, dtype=torch.bfloat16)
    own = _random(stored, 2 * width, dtype=store_dtype, seed=1)[:, width:]
    returned = _random(returned_rows, 3 * width, dtype=torch.bfloat16, seed=2)[:, width : 2 * width]
    exact = target.double()
    exact.index_add_(0, sums.rows[sums.own_in_shared], own[sums.own_rows].double())
    exact.index_add_(0, sums.rows[sums.returned_in_shared], returned.double())
    before = target.clone()
    prepare_add(target, own, returned, sums)(target, own, returned)

    assert ((target.double() - exact).abs() <= 1e-5 + exact.abs() * torch.finfo(torch.bfloat16).eps).all()
    others = torch.ones(rows, dtype=torch.bool, device="cuda")
    others[sums.rows] = False
    assert torch.equal(target[others], before[others])


def test_sums_are_the_same_bit_by_bit() -> None:
    sums, rows, stored, returned_rows = _sums(torch.Generator().manual_seed(5))
    shapes = ((rows, 1), (stored, 2), (returned_rows, 3))
    target, own, returned = (_random(length, 256, dtype=torch.bfloat16, seed=seed) for length, seed in shapes)
    results = []
    for _ in range(5):
        again = target.clone()
        prepare_add(again, own, returned, sums)(again, own, returned)
        results.append(again)

    assert all(torch.equal(results[0], again) for again in results[1:])


def test_rows_of_heads_are_added_by_a_prepared_step() -> None:
    sums, rows, stored, returned_rows = _sums(torch.Generator().manual_seed(6))
    shapes = ((rows, 1), (stored, 2), (returned_rows, 3))
    one, other = (
        [
            _random(length, parts * 128, dtype=torch.bfloat16, seed=seed + 3 * parts)[:, -128:].unflatten(1, (2, 64))
            for length, parts in shapes
        ]
        for seed in (0, 1)
    )
    assert_prepared_sums_serve(one, other, sums)
    with pytest.raises(ValueError, match="cannot add rows"):
        prepare_add(*(x.transpose(1, 2) for x in one), sums)


# --- copies


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [1, 32, 640, 2048, 4100], ids=str)
def test_rows_are_copied_as_they_are(width: int, dtype: torch.dtype) -> None:
    """They may be parts of wider rows; rows nobody writes to stay."""
    [places] = _parts_of_one(torch.randperm(400, generator=torch.Generator().manual_seed(width))[:300])
    rows = (100 * _random(300, 2 * width, dtype=torch.float32)).to(dtype)[:, width:]
    target = torch.full((400, width), 7, device="cuda", dtype=dtype)
    expected = target.clone()
    expected[places] = rows
    copy_rows((rows,), None, (target,), places)

    assert torch.equal(target, expected)


@pytest.mark.parametrize("ordered", ["rows", "places", "neither"])
@pytest.mark.parametrize("widths", [(1024, 1024), (4096, 512), (24, 3)], ids=str)
def test_rows_of_two_tensors_are_copied_at_once(widths: tuple[int, int], ordered: str) -> None:
    generator, count = torch.Generator().manual_seed(sum(widths)), 300
    rows, places = _parts_of_one(*(torch.randperm(400, generator=generator)[:count] for _ in range(2)))
    sources = [_random(400, width, dtype=torch.bfloat16, seed=width) for width in widths]
    beside = torch.zeros(400, sum(widths), device="cuda", dtype=torch.bfloat16)
    targets, expected = beside.split(widths, dim=1), beside.clone()
    if ordered == "rows":
        rows, sources = None, [x[:count] for x in sources]
    if ordered == "places":
        places, targets = None, [x[:count] for x in targets]
    chosen = torch.cat([x if rows is None else x[rows] for x in sources], dim=1)
    expected[slice(count) if places is None else places] = chosen
    copy_rows(sources, rows, targets, places)
    assert torch.equal(beside, expected)

    if places is not None:
        together = torch.zeros_like(beside)
        copy_rows(sources, rows, (together,), places)
        assert torch.equal(together, expected)

        taken = [torch.zeros(count, 1, width, device="cuda", dtype=torch.bfloat16) for width in widths]
        copy_rows((together,), places, taken, None)
        assert torch.equal(torch.cat([x.flatten(1) for x in taken], dim=1), chosen)


def test_rows_whose_elements_lie_apart_are_refused() -> None:
    rows = torch.zeros(2, 5, 3, device="cuda").transpose(0, 1)
    with pytest.raises(ValueError, match="make them contiguous"):
        copy_rows((rows,), torch.arange(5).cuda(), (torch.zeros(5, 2, 3, device="cuda"),), None)


def test_kernels_take_any_address() -> None:
    """Triton compiles for aligned addresses; others follow, and the other way around."""
    for first in (0, 1, 0, 3):
        target, rows = torch.zeros(5, 70, device="cuda"), torch.rand(5, 70, device="cuda")
        copy_rows((rows[:, first : first + 64],), None, (target[:, first : first + 64],), torch.arange(5).cuda())

        assert torch.equal(target[:, first : first + 64], rows[:, first : first + 64])
        assert (target[:, :first] == 0).all()
        assert (target[:, first + 64 :] == 0).all()


# --- sinks


SINK_SHAPES = pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 64), (7, 96), (64, 64), (40, 256)], ids=str)


@SINK_SHAPES
@pytest.mark.parametrize("tokens", [1, 515])
@pytest.mark.parametrize("transposed", [False, True], ids=["[T, N]", "[N, T]"])
@pytest.mark.parametrize("of_sinks", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_are_added_in_place(
    dtype: torch.dtype, of_sinks: torch.dtype, transposed: bool, tokens: int, heads: int, dim: int
) -> None:
    """To log-sum-exps as layers hold them and as kernels return them; rows behind stay as they are."""
    precise = accumulation_dtype(dtype)
    whole, lse = _random(tokens + 3, heads, dim, dtype=dtype), 5 * _random(tokens, heads, dtype=precise, seed=1)
    behind, sinks = whole[tokens:].clone(), _random(heads, dtype=of_sinks, seed=2)
    given = lse.t().contiguous().t() if transposed else lse.clone()
    total = (lse.double().exp() + sinks.double().exp()).log()
    expected = whole[:tokens].double() * (lse.double() - total).exp().unsqueeze(-1)
    add_sinks(whole[:tokens], given, sinks)

    unit = 64 * torch.finfo(precise).eps
    assert (given.double() - total).abs().max() <= unit
    error = (whole[:tokens].double() - expected).abs()
    assert (error <= 8 * unit + torch.finfo(dtype).eps * expected.abs()).all()
    assert torch.equal(whole[tokens:], behind)


def test_rows_are_scaled_into_another_tensor() -> None:
    out, lse = _random(300, 8, 128, dtype=torch.bfloat16), _random(300, 8, dtype=torch.float32, seed=1)
    before, target = out.clone(), torch.full_like(out, torch.nan)
    scale_rows(out, lse, lse + 1, target)

    assert torch.equal(out, before)
    assert (target.float() - before.float() * torch.e**-1).abs().max() <= 0.02


@SINK_SHAPES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_sinks_are_those_of_torch(dtype: torch.dtype, heads: int, dim: int) -> None:
    dout, out = (_random(515, heads, dim, dtype=dtype, seed=seed) for seed in (3, 4))
    lse, sinks = (
        _random(515, heads, dtype=accumulation_dtype(dtype), seed=1),
        _random(heads, dtype=torch.float32, seed=2),
    )
    with torch.no_grad():
        got = sink_gradients(dout, out, lse, sinks)
        # As hooks of saved tensors may bring outputs back.
        apart = sink_gradients(dout, out.transpose(0, 1).contiguous().transpose(0, 1), lse, sinks)

    assert torch.equal(apart, got)
    share = (sinks.double() - lse.double()).clamp(max=0).exp()
    expected = -(share * (dout.double() * out.double()).sum(-1)).sum(0)
    assert (got.double() - expected).abs().max() <= 1e-5 * share.sum(0).max() * dim
