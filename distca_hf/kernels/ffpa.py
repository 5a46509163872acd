"""Attention of ffpa-attn for head dimensions of 320 to 512 on Hopper GPUs; FlashAttention stops at 256.

Forward and backward run inside one operator of ours, with autograd off, so they call the functions below the package's
own operators: those that `ffpa_attn.cute._forward_impl_for_device` and `_backward_impl_for_device` choose for a GPU.

On Hopper GPUs, up to a head dimension of 512, these functions align causal masks bottom-right, write to given tensors,
and return log-sum-exps as `[N, T]` in fp32. With the log-sum-exps of a longer row, backward returns
this task's share of the row's gradients. One kernel writes the gradients of queries, another one those of
keys and values. Neither adds atomically: gradients are always bit-equal from run to run.

Elsewhere backward is another function, which leaves the gradients of a causal task zero if the task has more keys than
queries. So `kernels.registry` takes this kernel on Hopper only.

Shape legend in `kernels.interface`.
"""

from types import ModuleType

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans


class FfpaKernel:
    """Attention of ffpa-attn, compiled when first used.

    Args:
        interface: the package's module `ffpa_attn.cute`.
    """

    def __init__(self, interface: ModuleType) -> None:
        self._forward_for = interface._forward_impl_for_device
        self._backward_for = interface._backward_impl_for_device

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        q, _, v = inputs
        out, lse = self._forward_for(q.device, q.shape[2], v.shape[2])(
            *inputs,
            **spans.by_name,
            softmax_scale=spec.scale,
            causal=spec.causal,
            return_lse=True,
            out=room.out_TNV,
            # The package writes the rows of a head one after the other.
            lse=room.lse_NT if room.lse_NT is not None and room.lse_NT.stride(1) == 1 else None,
        )
        return room.filled(out, lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        q, k, v, out, lse_NT = saved
        dq, dk, dv = gradients
        self._backward_for(q.device, q.shape[2], v.shape[2])(
            q,
            k,
            v,
            out,
            dout_TNV,
            lse_NT,
            **spans.by_name,
            softmax_scale=spec.scale,
            causal=spec.causal,
            dq=dq,
            dk=dk,
            dv=dv,
        )
