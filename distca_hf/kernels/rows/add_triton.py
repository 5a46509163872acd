"""`sum_rows` on a GPU: one Triton kernel, one program for each row."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.kernels.rows.triton_launcher import Launch


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
    strides = target_RD.stride(0), own_RD.stride(0), returned_RD.stride(0)
    dtypes = target_RD.dtype, own_RD.dtype, returned_RD.dtype
    launch = _launch_of(target_RD.device, dtypes, strides, target_RD.shape[1])
    index = rows, own_of_shared, order, offsets
    launch(rows.shape[0], 1, target_RD, own_RD, returned_RD, index=index)


@lru_cache
def _launch_of(
    device: torch.device, dtypes: tuple[torch.dtype, ...], strides: tuple[int, int, int], width: int
) -> Launch:
    """The kernel for such tensors."""
    return Launch(_add_row, (*strides, width, triton.next_power_of_2(width)), device)
