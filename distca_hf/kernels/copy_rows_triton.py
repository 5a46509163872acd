"""`copy_rows` on a GPU: one Triton kernel, one program for each row of each tensor, or for parts of long ones."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.kernels.launch import Launcher


MOST_ELEMENTS_OF_A_BLOCK = 2048


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
    WIDTH: tl.constexpr,
    OTHER_SOURCE_STRIDE: tl.constexpr,
    OTHER_TARGET_STRIDE: tl.constexpr,
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
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        values = tl.load(source + row * SOURCE_STRIDE + column, mask=inside)
        tl.store(target + place * TARGET_STRIDE + column, values, mask=inside)
    else:
        column = (block - tl.cdiv(WIDTH, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        inside = column < OTHER_WIDTH
        values = tl.load(other_source + row * OTHER_SOURCE_STRIDE + column, mask=inside)
        tl.store(other_target + place * OTHER_TARGET_STRIDE + column, values, mask=inside)


_launch = Launcher(_copy_row)


@lru_cache
def _blocks(*widths: int) -> tuple[int, int]:
    """Elements of a block, and blocks of a row."""
    block = min(MOST_ELEMENTS_OF_A_BLOCK, triton.next_power_of_2(max(widths)))
    return block, sum(-(-width // block) for width in widths)


def copy_rows_on_gpu(
    count: int,
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
) -> None:
    """See `copy_rows`; one or two tensors."""
    index = places if rows is None else rows
    assert index is not None
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    widths: list[int] = []
    for source, target in zip(sources, targets, strict=True):
        width = source.shape[1:].numel()
        tensors += source, target
        numbers += source.stride(0), target.stride(0), width
        widths.append(width)
    block, blocks = _blocks(*widths)
    if len(widths) == 1:
        tensors += tensors
        numbers += 0, 0, 0
    _launch(
        (count, blocks, 1),
        (*tensors, index if rows is None else rows, index if places is None else places),
        (*numbers, rows is not None, places is not None, block),
    )
