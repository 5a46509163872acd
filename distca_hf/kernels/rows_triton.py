"""Rows on a GPU: one Triton kernel for each function of `kernels.rows`.

Shape legend in `kernels.interface`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.arrays import ceil_div
from distca_hf.kernels.interface import AddRows, CopyRows, KindOfRows, MergeRows, kinds_of_rows, widths_of_parts
from distca_hf.kernels.launches import TritonLaunch


# Most elements, and most heads, of a row that one program holds in registers. Triton starts 128 threads for each, and
# a thread holds 16 elements.
MOST_ELEMENTS_OF_A_BLOCK = 2048
MOST_HEADS_OF_A_BLOCK = 8


@triton.jit  # type: ignore[untyped-decorator]
def _copy_block(source, target, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "places"])  # type: ignore[untyped-decorator]
def _copy_row(  # type: ignore[no-untyped-def]
    source,
    target,
    other_source,
    other_target,
    rows,
    places,
    SOURCE_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    OTHER_SOURCE_STRIDE: tl.constexpr,
    OTHER_TARGET_STRIDE: tl.constexpr,
    OTHER_SOURCE_COLUMN: tl.constexpr,
    OTHER_TARGET_COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    ANY_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program (row, block). Blocks of the first tensor come first, then the second one's:
    #
    #     k[rows] | block 0 | block 1 |    v[rows] | block 2 |     two tensors to one, in which rows lie side by side
    #     both    | block 0 | block 1 | block 2 |                  OTHER_TARGET_COLUMN is the first column of v
    #
    # int64, because a row times its stride may be beyond 2 ** 31.
    row = tl.program_id(0).to(tl.int64)
    place = row
    if ANY_PLACES:
        place = tl.load(places + row)
    if ANY_ROWS:
        row = tl.load(rows + row)
    block = tl.program_id(1)
    if block < tl.cdiv(WIDTH, BLOCK):
        _copy_block(source + row * SOURCE_STRIDE, target + place * TARGET_STRIDE, block, WIDTH, BLOCK)
    else:
        from_row = other_source + row * OTHER_SOURCE_STRIDE + OTHER_SOURCE_COLUMN
        to_row = other_target + place * OTHER_TARGET_STRIDE + OTHER_TARGET_COLUMN
        _copy_block(from_row, to_row, block - tl.cdiv(WIDTH, BLOCK), OTHER_WIDTH, BLOCK)


def prepare_copy_on_gpu(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
    count: int,
) -> CopyRows:
    """Does `prepare_copy` for `count` rows."""
    any_rows, any_places = rows is not None, places is not None
    kinds = kinds_of_rows(sources), kinds_of_rows(targets)
    launch, blocks = _copy_launch(targets[0].device, *kinds, any_rows, any_places)
    index = places if rows is None else rows
    assert index is not None
    indices = index, index if places is None else places  # of two equal ones the kernel reads one
    if not count:
        return lambda sources, targets: None
    copy = launch.prepared(count, blocks, indices)
    return lambda sources, targets: copy(sources[0], targets[0], sources[-1], targets[-1])


@lru_cache
def _copy_launch(
    device: torch.device,
    sources: tuple[KindOfRows, ...],
    targets: tuple[KindOfRows, ...],
    any_rows: bool,
    any_places: bool,
) -> tuple[TritonLaunch, int]:
    """Returns the kernel for tensors like these, and its blocks of a row."""
    width, other_width = (*widths_of_parts(sources, targets), 0)[:2]
    _check_rows("copy", (*sources, *targets))
    strides = (kinds[end][1][0] for end in (0, -1) for kinds in (sources, targets))
    block = min(MOST_ELEMENTS_OF_A_BLOCK, triton.next_power_of_2(max(width, other_width)))
    columns = (width if len(sources) < len(targets) else 0, width if len(targets) < len(sources) else 0)
    constants = *strides, *columns, width, other_width, any_rows, any_places, block
    return TritonLaunch(_copy_row, constants, device), ceil_div(width, block) + ceil_div(other_width, block)


def _check_rows(do: str, kinds: Sequence[KindOfRows]) -> None:
    """Checks that elements of rows follow each other."""
    for row, (_, *apart), _ in kinds:
        if not _follow_each_other(row, apart):
            raise ValueError(f"cannot {do} rows {tuple(row)} whose elements lie {apart} apart: make them contiguous")


def _follow_each_other(row: torch.Size, strides: Sequence[int]) -> bool:
    """Returns whether elements of a row with this shape follow each other."""
    expected = 1
    for size, stride in zip(reversed(row), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@triton.jit(do_not_specialize_on_alignment=["rows", "own_of_shared", "order", "offsets"])  # type: ignore[untyped-decorator]
def _add_row(  # type: ignore[no-untyped-def]
    target,
    own,
    returned,
    rows,
    own_of_shared,
    order,
    offsets,
    TARGET_STRIDE: tl.constexpr,
    OWN_STRIDE: tl.constexpr,
    RETURNED_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program for each row that something is added to: its sum stays in registers and is rounded once.
    #
    #     order     | 4 9 | 7 | 0 2 5 |     returned rows of shared rows 0, 1, 2, by rank
    #     offsets   0     2   3       6
    shared = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = target + tl.load(rows + shared) * TARGET_STRIDE + column
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    own_row = tl.load(own_of_shared + shared)
    if own_row >= 0:
        total += tl.load(own + own_row * OWN_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    for at in range(tl.load(offsets + shared), tl.load(offsets + shared + 1)):
        row = tl.load(order + at)
        total += tl.load(returned + row * RETURNED_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(target.dtype.element_ty), mask=inside)


def prepare_add_on_gpu(
    target: torch.Tensor, own: torch.Tensor, returned: torch.Tensor, index: tuple[torch.Tensor, ...]
) -> AddRows:
    """Does `prepare_add`; sums in fp32. `index` has `rows`, `own_of_shared`, `order` and `offsets` of `RowSums`."""
    _check_rows("add", kinds_of_rows((target, own, returned)))
    strides = target.stride(0), own.stride(0), returned.stride(0)
    dtypes = target.dtype, own.dtype, returned.dtype
    launch = _add_launch(target.device, dtypes, strides, target.shape[1:].numel())
    return launch.prepared(index[0].shape[0], 1, index)


@lru_cache
def _add_launch(
    device: torch.device, dtypes: tuple[torch.dtype, ...], strides: tuple[int, int, int], width: int
) -> TritonLaunch:
    """Returns the kernel for such tensors: other dtypes have another launch, because its first call compiles it."""
    return TritonLaunch(_add_row, (*strides, width, triton.next_power_of_2(width)), device)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["lse_stride", "lse_head_stride", "other_head_stride", "start"]
)
def _merge_block(  # type: ignore[no-untyped-def]
    out,
    lse,
    other_out,
    other_lse,
    lse_stride,
    lse_head_stride,
    other_head_stride,
    start,
    OUT_STRIDE: tl.constexpr,
    OTHER_OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_OF_BLOCK: tl.constexpr,
    DIM_OF_BLOCK: tl.constexpr,
):
    # Program (row, block of heads). lse = log(exp(one) + exp(other)), each out weighted with its share of that sum.
    # The larger one is subtracted before exp, which would overflow. `lse` is [T, N] or a transposed [N, T].
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_OF_BLOCK + tl.arange(0, HEADS_OF_BLOCK)
    column = tl.arange(0, DIM_OF_BLOCK)
    is_head = head < HEADS
    out += (start + row) * OUT_STRIDE
    lse += (start + row) * lse_stride + head * lse_head_stride
    one = tl.load(lse, mask=is_head, other=0.0)
    other = tl.load(other_lse + head * other_head_stride + row, mask=is_head, other=0.0)
    largest = tl.maximum(one, other)
    one_part, other_part = tl.exp(one - largest), tl.exp(other - largest)
    both = one_part + other_part
    places = head[:, None] * DIM + column[None, :]
    inside = is_head[:, None] & (column < DIM)[None, :]
    one_values = tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
    other_values = tl.load(other_out + row * OTHER_OUT_STRIDE + places, mask=inside, other=0.0).to(tl.float32)
    merged = one_values * (one_part / both)[:, None] + other_values * (other_part / both)[:, None]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse, largest + tl.log(both), mask=is_head)


def prepare_merge_on_gpu(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, other_out_RNV: torch.Tensor, other_lse_NR: torch.Tensor, start: int
) -> MergeRows:
    """Does `prepare_merge`; log-sum-exps are in fp32."""
    rows, heads, dim = other_out_RNV.shape
    if not rows:
        return lambda out, lse, other_out, other_lse: None
    strides = out_TNV.stride(0), other_out_RNV.stride(0)
    launch, blocks = _launch_of_heads("merge", out_TNV.device, out_TNV.dtype, strides, heads, dim)
    numbers = *lse_TN.stride(), other_lse_NR.stride(0), start
    return launch.prepared(rows, blocks, numbers=numbers)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["lse_stride", "lse_head_stride", "total_stride", "total_head_stride"]
)
def _scale_block(  # type: ignore[no-untyped-def]
    out,
    target,
    lse,
    total,
    lse_stride,
    lse_head_stride,
    total_stride,
    total_head_stride,
    OUT_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_OF_BLOCK: tl.constexpr,
    DIM_OF_BLOCK: tl.constexpr,
):
    # Program (row, block of heads). Log-sum-exps are [T, N] or a transposed [N, T]: strides change with the batch.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_OF_BLOCK + tl.arange(0, HEADS_OF_BLOCK)
    column = tl.arange(0, DIM_OF_BLOCK)
    is_head = head < HEADS
    one = tl.load(lse + row * lse_stride + head * lse_head_stride, mask=is_head, other=0.0)
    both = tl.load(total + row * total_stride + head * total_head_stride, mask=is_head, other=0.0)
    places = head[:, None] * DIM + column[None, :]
    inside = is_head[:, None] & (column < DIM)[None, :]
    values = tl.load(out + row * OUT_STRIDE + places, mask=inside, other=0.0).to(tl.float32)
    scaled = values * tl.exp(one - both)[:, None]
    tl.store(target + row * TARGET_STRIDE + places, scaled.to(target.dtype.element_ty), mask=inside)


def scale_rows_on_gpu(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, total_TN: torch.Tensor, target_TNV: torch.Tensor
) -> None:
    """Does `kernels.rows.scale_rows`; log-sum-exps are in fp32."""
    rows, heads, dim = out_TNV.shape
    if not rows:
        return
    strides = out_TNV.stride(0), target_TNV.stride(0)
    launch, blocks = _launch_of_heads("scale", out_TNV.device, out_TNV.dtype, strides, heads, dim)
    launch(rows, blocks, out_TNV, target_TNV, lse_TN, total_TN, numbers=(*lse_TN.stride(), *total_TN.stride()))


@triton.jit  # type: ignore[untyped-decorator]
def _dot_block(  # type: ignore[no-untyped-def]
    one,
    other,
    sums,
    ONE_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_OF_BLOCK: tl.constexpr,
    DIM_OF_BLOCK: tl.constexpr,
):
    # Program (row, block of heads).
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_OF_BLOCK + tl.arange(0, HEADS_OF_BLOCK)
    column = tl.arange(0, DIM_OF_BLOCK)
    is_head = head < HEADS
    places = head[:, None] * DIM + column[None, :]
    inside = is_head[:, None] & (column < DIM)[None, :]
    left = tl.load(one + row * ONE_STRIDE + places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(other + row * OTHER_STRIDE + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + row * HEADS + head, tl.sum(left * right, axis=1), mask=is_head)


def dot_rows_on_gpu(one_TNV: torch.Tensor, other_TNV: torch.Tensor) -> torch.Tensor:
    """Returns `[T, N]` products of values, summed in fp32; values and heads of a row follow each other."""
    rows, heads, dim = one_TNV.shape
    sums_TN = one_TNV.new_empty((rows, heads), dtype=torch.float32)
    if rows:
        strides = one_TNV.stride(0), other_TNV.stride(0)
        launch, blocks = _launch_of_heads("dot", one_TNV.device, one_TNV.dtype, strides, heads, dim)
        launch(rows, blocks, one_TNV, other_TNV, sums_TN)
    return sums_TN


@lru_cache
def _launch_of_heads(
    name: str, device: torch.device, dtype: torch.dtype, strides: tuple[int, int], heads: int, dim: int
) -> tuple[TritonLaunch, int]:
    """Returns the kernel of a name for such tensors, and its blocks of heads."""
    kernel = {"merge": _merge_block, "scale": _scale_block, "dot": _dot_block}[name]
    block = min(MOST_HEADS_OF_A_BLOCK, triton.next_power_of_2(heads))
    constants = (*strides, heads, dim, block, triton.next_power_of_2(dim))
    return TritonLaunch(kernel, constants, device), ceil_div(heads, block)
