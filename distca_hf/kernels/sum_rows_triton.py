"""`sum_rows` on a GPU: one Triton kernel, one program for each row."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _add_row(  # type: ignore[no-untyped-def]
    target,
    own,
    returned,
    rows,
    own_of_shared,
    order,
    offsets,
    target_stride,
    own_stride,
    returned_stride,
    width,
    WIDTH: tl.constexpr,
):
    shared = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < width
    place = target + tl.load(rows + shared) * target_stride + column
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    own_row = tl.load(own_of_shared + shared)
    if own_row >= 0:
        total += tl.load(own + own_row * own_stride + column, mask=inside, other=0.0).to(tl.float32)
    for at in range(tl.load(offsets + shared), tl.load(offsets + shared + 1)):
        row = tl.load(order + at)
        total += tl.load(returned + row * returned_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(target.dtype.element_ty), mask=inside)


def add_rows_on_gpu(
    target_RD: torch.Tensor,
    own_RD: torch.Tensor,
    returned_RD: torch.Tensor,
    rows: torch.Tensor,
    own_of_shared: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See `add_rows` and `RowSums`; sums in fp32."""
    tensors = target_RD, own_RD, returned_RD
    width = target_RD.shape[1]
    _add_row[(len(rows),)](
        *tensors,
        *(rows, own_of_shared, order, offsets),
        *(x.stride(0) for x in tensors),
        width,
        WIDTH=triton.next_power_of_2(width),
    )
