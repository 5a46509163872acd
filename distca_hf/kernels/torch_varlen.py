"""Torch's own varlen flash attention (FlashAttention 2 inside torch), through the operators below
`torch.nn.attention.varlen`.

Used directly, because `varlen_attn` hides its backward behind autograd, which is off inside our operator. Causal masks
are aligned bottom-right; log-sum-exps are `[N, T]` in fp32. Operators: `aten::_flash_attention_forward`,
`aten::_flash_attention_backward`.

Shape legend in `kernels.interface`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distca_hf.kernels.interface import AttentionSpec, Gradients, Saved, Spans, put


class TorchVarlenKernel:
    """Varlen flash attention that comes with torch (CUDA)."""

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_SGH: torch.Tensor,
        v_SGV: torch.Tensor,
        spans: Spans,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
        out_TNV: torch.Tensor | None = None,
        lse_NT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dropout, debug_mask = 0.0, False
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_TNH,
            k_SGH,
            v_SGV,
            spans.cu_seqlens_q,
            spans.cu_seqlens_k,
            spans.max_seqlen_q,
            spans.max_seqlen_k,
            dropout,
            spec.causal,
            debug_mask,
            scale=spec.scale,
        )
        return put(out, out_TNV), put(lse, lse_NT)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        dropout = 0.0
        rng_state = torch.empty(2, dtype=torch.uint64, device=dout_TNV.device)  # of dropout: there is none
        unused = rng_state.new_empty(0)
        with _deterministic_algorithms(spec.deterministic):
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout_TNV,
                *saved[:4],
                saved.lse_NT.contiguous(),
                spans.cu_seqlens_q,
                spans.cu_seqlens_k,
                spans.max_seqlen_q,
                spans.max_seqlen_k,
                dropout,
                spec.causal,
                rng_state,
                unused,
                scale=spec.scale,
            )
        for room, gradient in zip(gradients, (dq, dk, dv), strict=True):
            room.copy_(gradient)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Sets torch's own switch within: torch's kernel has no argument for determinism, and reads that."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
