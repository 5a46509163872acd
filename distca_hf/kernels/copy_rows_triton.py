"""`copy_rows` on a GPU: one Triton kernel, one program for each row of each tensor, or for parts of long ones."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.kernels.launch import Launcher


MOST_ELEMENTS_OF_A_BLOCK = 2048
NOTHING = torch.Size((0,))


@triton.jit  # type: ignore[untyped-decorator]
def _copy_block(source, target, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
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
    WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    ANY_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        other_block = block - tl.cdiv(WIDTH, BLOCK)
        from_row, to_row = other_source + row * OTHER_SOURCE_STRIDE, other_target + place * OTHER_TARGET_STRIDE
        _copy_block(from_row, to_row, other_block, OTHER_WIDTH, BLOCK)


_launch = Launcher(_copy_row)


def copy_rows_on_gpu(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
    index: torch.Tensor,
) -> None:
    """See `copy_rows`; one or two tensors, and the rows or places that are given."""
    source, target, other, other_target = sources[0], targets[0], sources[-1], targets[-1]
    row, other_row = source.shape[1:], other.shape[1:] if len(sources) > 1 else NOTHING
    strides = source.stride(0), target.stride(0), other.stride(0), other_target.stride(0)
    blocks, constants = _constants(strides, row, other_row, rows is not None, places is not None)
    indices = index if rows is None else rows, index if places is None else places
    _launch((index.shape[0], blocks, 1), (source, target, other, other_target, *indices), constants)


@lru_cache
def _constants(
    strides: tuple[int, int, int, int], row: torch.Size, other_row: torch.Size, any_rows: bool, any_places: bool
) -> tuple[int, tuple[int, ...]]:
    """Blocks of a row, and constants of the kernel."""
    widths = row.numel(), other_row.numel()
    block = min(MOST_ELEMENTS_OF_A_BLOCK, triton.next_power_of_2(max(widths)))
    return sum(-(-width // block) for width in widths), (*strides, *widths, any_rows, any_places, block)
