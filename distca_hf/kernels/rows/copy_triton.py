"""`copy_rows` on a GPU: one Triton kernel, one program for each row of each tensor, or for parts of long ones."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.kernels.rows.formats import KindOfRows, kinds_of_rows, widths_of_parts
from distca_hf.kernels.rows.triton_launcher import Launch


MOST_ELEMENTS_OF_A_BLOCK = 2048


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


def copy_rows_on_gpu(
    sources: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
    places: torch.Tensor | None,
    count: int,
) -> None:
    """See `copy_rows`; `count` rows."""
    any_rows, any_places = rows is not None, places is not None
    kinds = kinds_of_rows(sources), kinds_of_rows(targets)
    launch, blocks = _launch_of(targets[0].device, *kinds, any_rows, any_places)
    index = places if rows is None else rows
    assert index is not None
    indices = index if rows is None else rows, index if places is None else places
    if count:
        launch(count, blocks, sources[0], targets[0], sources[-1], targets[-1], index=indices)


@lru_cache
def _launch_of(
    device: torch.device,
    sources: tuple[KindOfRows, ...],
    targets: tuple[KindOfRows, ...],
    any_rows: bool,
    any_places: bool,
) -> tuple[Launch, int]:
    """The kernel for such tensors, and its blocks of a row.

    Raises:
        ValueError: rows do not fit, or their elements do not follow each other.
    """
    width, other_width = (*widths_of_parts(sources, targets), 0)[:2]
    for row, (_, *apart), _ in (*sources, *targets):
        if not _follow_each_other(row, apart):
            raise ValueError(f"cannot copy rows {tuple(row)} whose elements lie {apart} apart: make them contiguous")
    strides = (kinds[end][1][0] for end in (0, -1) for kinds in (sources, targets))
    block = min(MOST_ELEMENTS_OF_A_BLOCK, triton.next_power_of_2(max(width, other_width)))
    columns = (width if len(sources) < len(targets) else 0, width if len(targets) < len(sources) else 0)
    constants = *strides, *columns, width, other_width, any_rows, any_places, block
    return Launch(_copy_row, constants, device), -(-width // block) - (-other_width // block)


def _follow_each_other(row: torch.Size, strides: Sequence[int]) -> bool:
    """Whether elements of a row with this shape lie one behind the other."""
    expected = 1
    for size, stride in zip(reversed(row), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
