"""Attention kernels of torch (on GPUs and on the CPU) and of FlashAttention 2 and 3, as `kernels.interface.Kernel`.

On GPUs (FlashAttention 2 inside torch) the operators below `torch.nn.attention.varlen` are called directly.
`varlen_attn` itself has its backward in autograd, which is off inside our operator. Causal masks are aligned
bottom-right; log-sum-exps are `[N, T]` in fp32. Operators: `aten::_flash_attention_forward`,
`aten::_flash_attention_backward`.

On the CPU the kernel runs once per task, or twice for a causal task with more keys than queries. Operators:
`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward.

    keys    0 ........ prefix ....... end      The kernel's causal mask is aligned top-left, so it is used only for
    queries | no mask  | square, causal |      equally many queries and keys. The prefix is attended without mask.
                                               Both parts are merged by their log-sum-exps.

Packages of FlashAttention are imported when a kernel is chosen. Forward and backward run inside one operator of ours,
with autograd off, so they call the functions below each package's autograd:
`flash_attn_interface._flash_attn_forward/_flash_attn_backward` (3),
`flash_attn.flash_attn_interface._flash_attn_varlen_forward/_backward` (2). Both align causal masks bottom-right and
return log-sum-exps as `[N, T]` in fp32.

Sliding windows are computed by the functions themselves. `window_size_left` counts the keys before a query's place, so
it is one less than `window_tokens`. On the right, a window ends by `causal` or not at all. FlashAttention 2, including
torch's, takes an open right side as `max_seqlen_k` keys, too few if a task has more queries: see `_open_to_the_right`.

Shape legend in `kernels.interface`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans


class TorchVarlenKernel:
    """Torch's own varlen flash attention (CUDA)."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        dropout, debug_mask = 0.0, False
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *inputs,
            *_open_to_the_right(spans, spec),
            dropout,
            spec.causal,
            debug_mask,
            scale=spec.scale,
            **options_of_package(spec),
        )
        return room.filled(out, lse)

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
                *_open_to_the_right(spans, spec),
                dropout,
                spec.causal,
                rng_state,
                unused,
                scale=spec.scale,
                **options_of_package(spec),
            )
        for room, gradient in zip(gradients, (dq, dk, dv), strict=True):
            room.copy_(gradient)


@lru_cache(maxsize=256)
def options_of_package(spec: AttentionSpec) -> dict[str, float]:
    """Returns window and softcap by the names of varlen functions. Leaves out unused ones, which older versions of
    packages may lack."""
    options: dict[str, float] = {}
    if spec.window_tokens:
        options["window_size_left"] = spec.window_tokens - 1
    if spec.softcap:
        options["softcap"] = spec.softcap
    return options


def _open_to_the_right(spans: Spans, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Returns spans in order, with enough keys for windows that are open to the right.

    The first query of a task is up to `max_seqlen_q` places before its last key, and must attend to it.
    """
    if spec.causal or not spec.window_tokens or spans.max_seqlen_q <= spans.max_seqlen_k:
        return spans.in_order
    return spans.cu_seqlens_q, spans.cu_seqlens_k, spans.max_seqlen_q, spans.max_seqlen_q


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Sets torch's global switch in a `with` block: torch's kernel reads it, and has no argument for determinism. With
    `warn_only=True` that kernel warns and is not deterministic."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class CpuKernel:
    """Torch's flash attention for CPUs over the tasks of a call."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        q_TNH, k_SGH, v_SGV = inputs
        out_TNV, lse_NT = room.made(inputs)
        attend, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, spec.scale
        for rows, prefix, square in _tasks(spans, spec.causal):
            if rows.stop == rows.start:
                continue
            q = _batch(q_TNH[rows])
            out, lse = attend(q, _batch(k_SGH[square]), _batch(v_SGV[square]), 0.0, spec.causal, scale=scale)
            if prefix.stop > prefix.start:
                k, v = _batch(k_SGH[prefix]), _batch(v_SGV[prefix])
                prefix_out, prefix_lse = attend(q, k, v, 0.0, False, scale=scale)
                total = torch.logaddexp(lse, prefix_lse)
                share, prefix_share = (x.sub(total).exp().unsqueeze(-1) for x in (lse, prefix_lse))
                out, lse = share * out + prefix_share * prefix_out, total
            out_TNV[rows] = out[0].transpose(0, 1).to(out_TNV.dtype)
            lse_NT[:, rows] = lse[0]
        return out_TNV, lse_NT

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        derive = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q_TNH, k_SGH, v_SGV, out_TNV, lse_NT = saved
        dq_TNH, dk_SGH, dv_SGV = gradients
        for rows, prefix, square in _tasks(spans, spec.causal):
            if rows.stop == rows.start:  # keys without queries
                for keys in (prefix, square):
                    dk_SGH[keys], dv_SGV[keys] = 0, 0
                continue
            # With output and log-sum-exp of the whole row, each part's gradients are its part of the whole.
            dout, q, out = _batch(dout_TNV[rows]), _batch(q_TNH[rows]), _batch(out_TNV[rows])
            lse = lse_NT[:, rows].unsqueeze(0).contiguous()
            parts = ((square, spec.causal), *([(prefix, False)] if prefix.stop > prefix.start else []))
            dq_parts = []
            for keys, causal in parts:
                dq, dk, dv = derive(
                    dout, q, _batch(k_SGH[keys]), _batch(v_SGV[keys]), out, lse, 0.0, causal, scale=spec.scale
                )
                dq_parts.append(dq[0].transpose(0, 1))
                dk_SGH[keys] = dk[0].transpose(0, 1)
                dv_SGV[keys] = dv[0].transpose(0, 1)
            dq_TNH[rows] = dq_parts[0] if len(dq_parts) == 1 else dq_parts[0] + dq_parts[1]


def _tasks(spans: Spans, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yields query rows, key rows before the causal square, and key rows of the square: all of them without a mask."""
    for task in range(len(spans.queries) - 1):
        start, stop = spans.queries[task], spans.queries[task + 1]
        key_start, key_stop = spans.keys[task], spans.keys[task + 1]
        border = key_stop - (stop - start) if causal else key_start
        yield slice(start, stop), slice(key_start, border), slice(border, key_stop)


def _batch(x_TND: torch.Tensor) -> torch.Tensor:
    """Returns `[T, N, D]` as `[1, N, T, D]`. Copies only if elements of a row do not follow each other: torch's
    operators for CPUs assume that they do, and hooks of saved tensors may return a tensor with another layout."""
    rows = x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()
    return rows.transpose(0, 1).unsqueeze(0)


class Flash3Kernel:
    """FlashAttention 3 (Hopper)."""

    def __init__(self, interface: ModuleType) -> None:
        self._forward = interface._flash_attn_forward
        self._backward = interface._flash_attn_backward

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        out, lse, *_ = self._forward(
            *inputs, **spans.by_name, softmax_scale=spec.scale, causal=spec.causal, **options_of_package(spec)
        )
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
            **options_of_package(spec),
            deterministic=spec.deterministic,
        )


class Flash2Kernel:
    """FlashAttention 2."""

    def __init__(self, interface: ModuleType) -> None:
        self._forward = interface._flash_attn_varlen_forward
        self._backward = interface._flash_attn_varlen_backward

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        out, lse, *_ = self._forward(
            *inputs,
            *_open_to_the_right(spans, spec),
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=spec.causal,
            **options_of_package(spec),
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
            *_open_to_the_right(spans, spec),
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=spec.causal,
            alibi_slopes=None,
            deterministic=spec.deterministic,
            **{"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, **options_of_package(spec)},
        )
