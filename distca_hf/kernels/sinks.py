"""Sinks: a learned score for each head, without a key and a value. It is one more term of every row's softmax.

    lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

Kernels know nothing of sinks. They enter a row once, where its output and log-sum-exp are complete: at home, after all
parts are merged. Backward needs nothing else: kernels read out' and lse', and derive their part of the whole. The
gradient of sinks needs no kernel.

On a GPU one Triton kernel reads and writes every output once (`kernels.rows_triton`). Shape legend in
`kernels.interface`.
"""

import torch

from distca_hf.kernels.interface import has_fused_kernels


def add_sinks(out_TNV: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor) -> None:
    """Adds sinks to complete rows, in place.

    Args:
        sinks_N: in any floating dtype; sums are in that of log-sum-exps.
    """
    total_TN = torch.logaddexp(lse_TN, sinks_N.to(lse_TN.dtype))
    scale_rows(out_TNV, lse_TN, total_TN, out_TNV)
    lse_TN.copy_(total_TN)


def scale_rows(out_TNV: torch.Tensor, lse_TN: torch.Tensor, total_TN: torch.Tensor, target_TNV: torch.Tensor) -> None:
    """Writes outputs as parts of a softmax with more terms: out * exp(lse - total).

    Args:
        lse_TN, total_TN: log-sum-exps without these terms and with them, fp32 or fp64.
        target_TNV: where they are written; may be `out_TNV`.
    """
    if has_fused_kernels(out_TNV):
        from distca_hf.kernels.rows_triton import scale_rows_on_gpu

        scale_rows_on_gpu(out_TNV, lse_TN, total_TN, target_TNV)
        return
    target_TNV.copy_(out_TNV * (lse_TN - total_TN).exp().unsqueeze(-1))


def sink_gradients(
    dout_TNV: torch.Tensor, out_TNV: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor
) -> torch.Tensor:
    """Returns `[N]` gradients of sinks, whichever kernels attended.

    A sink has no value. Its share of a row, exp(sink - lse), only takes from the output: out * share for each unit of
    its score. Output and log-sum-exp are those of whole rows, with sinks, so each row counts once.

    Raises:
        NotImplementedError: autograd records this (`create_graph`). It would miss the part that log-sum-exps have.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError("gradients of sinks cannot be differentiated: no gradients of gradients")
    # A row that is no token has a log-sum-exp of 0 and no output: a share of infinity would make it NaN.
    share_TN = (sinks_N.to(lse_TN.dtype) - lse_TN).clamp(max=0).exp()
    return -(share_TN * _dot_rows(dout_TNV, out_TNV, lse_TN.dtype)).sum(0).to(sinks_N.dtype)


def _dot_rows(one_TNV: torch.Tensor, other_TNV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[T, N]` products of values, summed in `dtype`."""
    if has_fused_kernels(one_TNV):
        from distca_hf.kernels.rows_triton import dot_rows_on_gpu

        # Hooks of saved tensors may bring outputs back with other strides.
        return dot_rows_on_gpu(one_TNV.contiguous(), other_TNV.contiguous())
    return (one_TNV.to(dtype) * other_TNV.to(dtype)).sum(-1)
