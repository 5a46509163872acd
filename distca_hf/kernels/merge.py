"""Merge: attention over two sets of keys from attention over each, by their log-sum-exps.

Shape legend in `kernels.interface`.
"""

import torch

from distca_hf.kernels.interface import has_fused_kernels


def merge(out_TNV: torch.Tensor, lse_TN: torch.Tensor, far_out_TNV: torch.Tensor, far_lse_TN: torch.Tensor) -> None:
    """Adds to attention over some keys (`out` and `lse`, in place) that over other ones, in the dtype of the
    log-sum-exps: max(fp32, dtype). Rows may lie apart; heads and values of a row follow each other."""
    if has_fused_kernels(out_TNV):
        from distca_hf.kernels.merge_triton import merge_on_gpu

        merge_on_gpu(out_TNV, lse_TN, far_out_TNV, far_lse_TN)
        return
    total = torch.logaddexp(lse_TN, far_lse_TN)
    share, far_share = (x.sub(total).exp().unsqueeze(-1) for x in (lse_TN, far_lse_TN))
    out_TNV.copy_(share * out_TNV + far_share * far_out_TNV)
    lse_TN.copy_(total)
