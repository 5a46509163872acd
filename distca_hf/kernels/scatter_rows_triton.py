"""`scatter_rows` on a GPU: one Triton kernel, one program for each row, or for parts of long ones."""

import torch
import triton
import triton.language as tl


MOST_ELEMENTS_OF_A_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _copy_row(target, places, rows, target_stride, rows_stride, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    place = tl.load(places + row)
    values = tl.load(rows + row * rows_stride + column, mask=inside)
    tl.store(target + place * target_stride + column, values, mask=inside)


def scatter_rows_on_gpu(target_RD: torch.Tensor, places: torch.Tensor, rows_ND: torch.Tensor) -> None:
    """See `scatter_rows`."""
    width = target_RD.shape[1]
    block = min(MOST_ELEMENTS_OF_A_BLOCK, triton.next_power_of_2(width))
    _copy_row[(len(places), triton.cdiv(width, block))](
        target_RD, places, rows_ND, target_RD.stride(0), rows_ND.stride(0), width, WIDTH=block
    )
