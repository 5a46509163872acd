"""`merge` on a GPU: one Triton kernel that reads and writes every element once.

Shape legend in `kernels.interface`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from distca_hf.kernels.rows.triton_launcher import Launch


MOST_HEADS_OF_A_BLOCK = 8


@triton.jit(do_not_specialize=["far_head_stride", "start"])  # type: ignore[untyped-decorator]
def _merge_block(  # type: ignore[no-untyped-def]
    out,
    lse,
    far_out,
    far_lse,
    far_head_stride,
    start,
    OUT_STRIDE: tl.constexpr,
    LSE_STRIDE: tl.constexpr,
    FAR_OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_OF_BLOCK: tl.constexpr,
    DIM_OF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_OF_BLOCK + tl.arange(0, HEADS_OF_BLOCK)
    column = tl.arange(0, DIM_OF_BLOCK)
    is_head = head < HEADS
    out += (start + row) * OUT_STRIDE
    lse += (start + row) * LSE_STRIDE
    near = tl.load(lse + head, mask=is_head, other=0.0)
    far = tl.load(far_lse + head * far_head_stride + row, mask=is_head, other=0.0)
    largest = tl.maximum(near, far)
    near_part, far_part = tl.exp(near - largest), tl.exp(far - largest)
    both = near_part + far_part
    places = head[:, None] * DIM + column[None, :]
    inside = is_head[:, None] & (column < DIM)[None, :]
    near_values = tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
    far_values = tl.load(far_out + row * FAR_OUT_STRIDE + places, mask=inside, other=0.0).to(tl.float32)
    merged = near_values * (near_part / both)[:, None] + far_values * (far_part / both)[:, None]
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head, largest + tl.log(both), mask=is_head)


def merge_on_gpu(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, far_out_RNV: torch.Tensor, far_lse_NR: torch.Tensor, start: int
) -> None:
    """See `merge`; log-sum-exps in fp32."""
    rows, heads, dim = far_out_RNV.shape
    if not rows:
        return
    strides = out_TNV.stride(0), lse_TN.stride(0), far_out_RNV.stride(0)
    launch, blocks = _launch_of(out_TNV.device, out_TNV.dtype, strides, heads, dim)
    launch(rows, blocks, out_TNV, lse_TN, far_out_RNV, far_lse_NR, numbers=(far_lse_NR.stride(0), start))


@lru_cache
def _launch_of(
    device: torch.device, dtype: torch.dtype, strides: tuple[int, int, int], heads: int, dim: int
) -> tuple[Launch, int]:
    """The kernel for such tensors, and its blocks of heads."""
    block = min(MOST_HEADS_OF_A_BLOCK, triton.next_power_of_2(heads))
    constants = *strides, heads, dim, block, triton.next_power_of_2(dim)
    return Launch(_merge_block, constants, device), -(-heads // block)
