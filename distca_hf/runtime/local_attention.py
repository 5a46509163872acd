"""Local attention: the same kernels on this rank's local rows, without a plan and without an exchange.

"distca" computes it where a batch carries no plan: in evaluation, in generation with a KV cache, on one rank, and for
padded batches.

Shape legend in `kernels.interface`.
"""

from typing import Any, cast

import torch

from distca_hf.config import KernelName
from distca_hf.kernels.capabilities import Job
from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Kernel,
    Saved,
    Spans,
    empty_gradients,
    empty_outputs,
    made_deterministic,
    sink_gradients,
    spec_of,
)
from distca_hf.kernels.registry import choose_kernel
from distca_hf.runtime.custom_op import define_op


def attend(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    spans: Spans,
    spec: list[float],
    kernel: str,
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention output `[T, N, V]` and log-sum-exp `[N, T]`, for operators: nothing is recorded.

    Args:
        spec: fields of an `AttentionSpec`.
        kernel: name of one, or "auto".
    """
    if not len(q_TNH):  # a batch of padding alone has no work for a kernel
        return empty_outputs(q_TNH, v_SGV)
    how = spec_of(*spec)
    return _kernel(kernel, q_TNH, k_SGH, v_SGV, how, sinks_N).forward(q_TNH, k_SGH, v_SGV, spans, how, sinks_N)


def attend_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_NT: torch.Tensor,
    spans: Spans,
    spec: list[float],
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v, deterministic ones if torch is told to be so."""
    dq, dk, dv = empty_gradients(dout_TNV, q_TNH, k_SGH, v_SGV)
    if not len(q_TNH):
        return dq, dk.zero_(), dv.zero_()
    how = spec_of(*spec)
    if torch.are_deterministic_algorithms_enabled():
        how = made_deterministic(how)
    saved = Saved(q_TNH, k_SGH, v_SGV, out_TNV, lse_NT)
    _kernel(kernel, q_TNH, k_SGH, v_SGV, how).backward(dout_TNV, saved, Gradients(dq, dk, dv), spans, how)
    return dq, dk, dv


def _kernel(
    name: str,
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    spec: AttentionSpec,
    sinks_N: torch.Tensor | None = None,
) -> Kernel:
    return choose_kernel(cast(KernelName, name), Job.of(q_TNH, k_SGH, v_SGV, sinks_N), spec)


def _flash_attn_local(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    spec: list[float],
    kernel: str,
    sinks_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention output and log-sum-exp of varlen attention."""
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q_TNH, k_SGH, v_SGV, spans, spec, kernel, sinks_N)


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
    spec: list[float],
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v."""
    spans = Spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend_backward(dout_TNV, q_TNH, k_SGH, v_SGV, out_TNV, lse_NT, spans, spec, kernel)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, spec, kernel, sinks = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sinks)
    ctx.how = max_seqlen_q, max_seqlen_k, spec, kernel


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = flash_attn_local_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.how)
    return *gradients, *[None] * 6, None if sinks is None else sink_gradients(dout, out, lse.t(), sinks)


_local = define_op(_flash_attn_local, _shapes, _backward, _save)
flash_attn_local_backward = define_op(_flash_attn_local_backward, empty_gradients)


def flash_attn_local(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    spec: AttentionSpec,
    kernel: str = "auto",
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention output `[T, N, V]`, which is differentiable, and log-sum-exp `[N, T]` of varlen attention.

    Args:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: documents, see `Spans`.
        spec: gradients are deterministic, too, if torch is told to be so.
        kernel: name of one, or "auto".
        sinks_N: scores of the heads' sinks, differentiable. Only the reference kernel computes them yet.

    Raises:
        UnsupportedAttentionError: no kernel can attend like this; names the option.
    """
    spans = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    output: tuple[torch.Tensor, torch.Tensor] = _local(q_TNH, k_SGH, v_SGV, *spans, [*spec], kernel, sinks_N)
    return output
