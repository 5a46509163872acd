"""FlashAttention 4, 3 and 2 behind `kernels.interface.Kernel`. Their packages are imported when a kernel is chosen.

Forward and backward run inside one operator of ours, where autograd is off. So the functions below each package's
autograd are called: `flash_attn.cute.interface._flash_attn_fwd/_flash_attn_bwd` (FlashAttention 4),
`flash_attn_interface._flash_attn_forward/_flash_attn_backward` (3),
`flash_attn.flash_attn_interface._flash_attn_varlen_forward/_backward` (2). All three align causal masks bottom-right
and return log-sum-exps as `[N, T]` in fp32.

Shape legend in `kernels.interface`.
"""

from types import ModuleType

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans


class Flash4Kernel:
    """FlashAttention 4 (CuTe), compiled when first used: about four seconds per variant."""

    def __init__(self, interface: ModuleType) -> None:
        self._forward = interface._flash_attn_fwd
        self._backward = interface._flash_attn_bwd

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        out, lse, *_ = self._forward(
            *inputs[:3],
            **spans.by_name,
            softmax_scale=spec.scale,
            causal=spec.causal,
            return_lse=True,
            out=room.out_TNV,
        )
        return room.filled(out if room.out_TNV is None else room.out_TNV, lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        q_TNH, k_SGH, v_SGV, out_TNV, lse_NT = saved
        dq_TNH, dk_SGH, dv_SGV = gradients
        self._backward(
            q_TNH,
            k_SGH,
            v_SGV,
            out_TNV,
            dout_TNV,
            lse_NT.contiguous(),
            softmax_scale=spec.scale,
            causal=spec.causal,
            **spans.by_name,
            deterministic=spec.deterministic,
            dq=dq_TNH,
            dk=dk_SGH,
            dv=dv_SGV,
        )


class Flash3Kernel:
    """FlashAttention 3 (Hopper)."""

    def __init__(self, interface: ModuleType) -> None:
        self._forward = interface._flash_attn_forward
        self._backward = interface._flash_attn_backward

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        out, lse, *_ = self._forward(*inputs[:3], **spans.by_name, softmax_scale=spec.scale, causal=spec.causal)
        return room.filled(out, lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        used_q, used_k = None, None
        self._backward(
            dout_TNV,
            *saved[:4],
            saved.lse_NT.contiguous(),
            spans.cu_seqlens_q,
            spans.cu_seqlens_k,
            used_q,
            used_k,
            spans.max_seqlen_q,
            spans.max_seqlen_k,
            *gradients,
            spec.scale,
            spec.causal,
            deterministic=spec.deterministic,
        )


class Flash2Kernel:
    """FlashAttention 2."""

    def __init__(self, interface: ModuleType) -> None:
        self._forward = interface._flash_attn_varlen_forward
        self._backward = interface._flash_attn_varlen_backward

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        out, lse, *_ = self._forward(
            *inputs[:3], *spans.in_order, dropout_p=0.0, softmax_scale=spec.scale, causal=spec.causal
        )
        return room.filled(out, lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        self._backward(
            dout_TNV,
            *saved[:4],
            saved.lse_NT.contiguous(),
            *gradients,
            *spans.in_order,
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=spec.deterministic,
        )
