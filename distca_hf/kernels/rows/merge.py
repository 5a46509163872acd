"""Merge: attention over two sets of keys from attention over each, by their log-sum-exps.

Shape legend in `kernels.interface`.
"""

import torch

from distca_hf.kernels.interface import has_fused_kernels


def merge(
    out_TNV: torch.Tensor, lse_TN: torch.Tensor, far_out_RNV: torch.Tensor, far_lse_NR: torch.Tensor, start: int = 0
) -> None:
    """Adds to attention over some keys (`out` and `lse`, in place) that over other ones, for R rows from `start` on,
    in the dtype of the log-sum-exps: max(fp32, dtype).

    Rows may lie apart; heads and values of a row follow each other, and so do rows of `far_lse`, which is as kernels
    return it.

    Raises:
        ValueError: there are fewer rows to add to.
    """
    stop = start + far_out_RNV.shape[0]
    if stop > out_TNV.shape[0]:
        raise ValueError(f"cannot add attention of rows {start} to {stop} to that of {out_TNV.shape[0]} rows")
    if has_fused_kernels(out_TNV):
        from distca_hf.kernels.rows.merge_triton import merge_on_gpu

        merge_on_gpu(out_TNV, lse_TN, far_out_RNV, far_lse_NR, start)
        return
    out_RNV, lse_RN, far_lse_RN = out_TNV[start:stop], lse_TN[start:stop], far_lse_NR.t()
    total = torch.logaddexp(lse_RN, far_lse_RN)
    share, far_share = (x.sub(total).exp().unsqueeze(-1) for x in (lse_RN, far_lse_RN))
    out_RNV.copy_(share * out_RNV + far_share * far_out_RNV)
    lse_RN.copy_(total)
