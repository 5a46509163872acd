"""`merge` on a GPU: one Triton kernel that reads and writes every element once.

Shape legend in `kernels.interface`.
"""

import torch
import triton
import triton.language as tl


MOST_HEADS_OF_A_BLOCK = 8


@triton.jit  # type: ignore[untyped-decorator]
def _merge_block(  # type: ignore[no-untyped-def]
    out,
    lse,
    far_out,
    far_lse,
    out_stride,
    lse_stride,
    far_out_stride,
    far_lse_stride,
    heads,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    is_head = head < heads
    near = tl.load(lse + row * lse_stride + head, mask=is_head, other=0.0)
    far = tl.load(far_lse + row * far_lse_stride + head, mask=is_head, other=0.0)
    largest = tl.maximum(near, far)
    near_part, far_part = tl.exp(near - largest), tl.exp(far - largest)
    both = near_part + far_part
    places = head[:, None] * dim + column[None, :]
    inside = is_head[:, None] & (column < dim)[None, :]
    near_values = tl.load(out + row * out_stride + places, mask=inside, other=0.0).to(tl.float32)
    far_values = tl.load(far_out + row * far_out_stride + places, mask=inside, other=0.0).to(tl.float32)
    merged = near_values * (near_part / both)[:, None] + far_values * (far_part / both)[:, None]
    tl.store(out + row * out_stride + places, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row * lse_stride + head, largest + tl.log(both), mask=is_head)


def merge_rows(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, far_out_TNV: torch.Tensor, far_lse_TN: torch.Tensor
) -> None:
    """See `merge`; half precision, log-sum-exps in fp32."""
    rows, heads, dim = out_TNV.shape
    block = min(MOST_HEADS_OF_A_BLOCK, triton.next_power_of_2(heads))
    tensors = out_TNV, lse_TN, far_out_TNV, far_lse_TN
    _merge_block[(rows, triton.cdiv(heads, block))](
        *tensors, *(x.stride(0) for x in tensors), heads, dim, HEADS=block, DIM=triton.next_power_of_2(dim)
    )
