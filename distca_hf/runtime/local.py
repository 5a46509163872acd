"""Local attention: the same kernels on this rank's own rows, without a plan and without an exchange.

"distca" computes it where a batch carries no plan: in evaluation, in generation with a KV cache, on one rank, and for
padded batches.

Shape legend in `kernels.interface`.
"""

from typing import Any, cast

import torch

from distca_hf.config import KernelName
from distca_hf.kernels.choose import choose_kernel
from distca_hf.kernels.interface import Job, Kernel, Spans, empty_gradients, empty_outputs
from distca_hf.runtime.define_op import define_op


def _flash_attn_local(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention output and log-sum-exp of varlen causal attention, aligned bottom-right.

    Args:
        kernel: name of one, or "auto".
        deterministic: gradients are bit-equal from run to run; so they are if torch is told to be deterministic.
    """
    if not len(q_TNH):  # a batch of padding alone has no work for a kernel
        return empty_outputs(q_TNH, v_SGV)
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _kernel(kernel, q_TNH, k_SGH, v_SGV).forward(q_TNH, k_SGH, v_SGV, spans, scale)


def _shapes(
    q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_outputs(q_TNH, v_SGV)


def _flash_attn_local_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_NT: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    kernel: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v."""
    dq, dk, dv = empty_gradients(dout_TNV, q_TNH, k_SGH, v_SGV)
    if not len(q_TNH):
        return dq, dk.zero_(), dv.zero_()
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    deterministic |= torch.are_deterministic_algorithms_enabled()
    of_output = dout_TNV, q_TNH, k_SGH, v_SGV, out_TNV, lse_NT
    _kernel(kernel, q_TNH, k_SGH, v_SGV).backward(*of_output, spans, scale, deterministic, dq, dk, dv)
    return dq, dk, dv


def _kernel(name: str, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor) -> Kernel:
    return choose_kernel(cast(KernelName, name), Job.of(q_TNH, k_SGH, v_SGV))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *how = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.lengths, ctx.how = (max_seqlen_q, max_seqlen_k), how


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = flash_attn_local_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.lengths, *ctx.how)
    return *gradients, *[None] * 7


flash_attn_local = define_op(_flash_attn_local, _shapes, _backward, _save)
flash_attn_local_backward = define_op(_flash_attn_local_backward, empty_gradients)
