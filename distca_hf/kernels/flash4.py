"""FlashAttention 4 as `kernels.interface.Kernel`; and ffpa-attn, for head dimensions above its 256.

`Flash4Kernel` calls `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`, or repeats what they launched
for an alike call (`kernels.launches`). Causal masks are aligned bottom-right; log-sum-exps are `[N, T]` in fp32.

If a document is longer than the tokens of a rank, most of its work is in calls of many queries against a long prefix.
On Hopper GPUs FlashAttention 4 gets these calls in a faster form (docs/benchmarks/kernels.md):

    forward     heads stay apart. By default the package packs the query heads of a KV head into the rows of one tile.
    backward    several calls of some heads each. Blocks of keys read all queries of a head at about the same time, and
                the L2 cache holds what they read. In one long call they drift apart, until each reads from memory.

Results are the same, bit by bit, except for the order in which backward adds the gradients of queries.

Shape legend in `kernels.interface`.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans
from distca_hf.kernels.launches import RecordedCalls
from distca_hf.kernels.varlen import options_of_package


HOPPER = 9  # compute capability

# Forward keeps heads apart if the longest task has at least this many queries, and with this head dimension. Fewer
# queries fill a tile only with several heads; with other dimensions it was not faster.
MIN_QUERIES_HEADS_APART, HEAD_DIM_HEADS_APART = 512, 128

# Backward, in key rows x query heads: above the first, blocks of one call drift apart; up to the second they do not.
LONG_CALL_HEAD_ROWS, SHORT_CALL_HEAD_ROWS = 2**22, 2**20


@lru_cache(maxsize=64)
def hopper_cache_bytes(device: torch.device) -> int:
    """Returns the bytes of the L2 cache of a Hopper GPU; 0 for other devices, on which calls were not measured."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.L2_cache_size if properties.major == HOPPER else 0


class Flash4Kernel:
    """FlashAttention 4, compiled when first used: about four seconds per variant. `cache_bytes` returns the bytes of a
    device's L2 cache; 0 leaves all calls as the package makes them."""

    def __init__(self, interface: ModuleType, cache_bytes: Callable[[torch.device], int] = hopper_cache_bytes) -> None:
        self._forward = interface._flash_attn_fwd
        self._backward = interface._flash_attn_bwd
        self._cache_bytes = cache_bytes
        self._recorded = RecordedCalls(interface)

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        # The package writes log-sum-exps of a head contiguously.
        in_place = room.lse_NT is None or room.lse_NT.stride(1) == 1
        out, lse = (room if in_place else room._replace(lse_NT=None)).made(inputs)

        def attend() -> None:
            self._forward(
                *inputs,
                **spans.by_name,
                softmax_scale=spec.scale,
                causal=spec.causal,
                **options_of_package(spec),
                **self._packing(inputs.q_TNH, spans, spec),
                return_lse=True,
                out=out,
                lse=lse,
            )

        self._recorded.run(attend, (*inputs, out, lse, *spans.offsets), "forward", spec, *spans.longest)
        return room.filled(out, lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        saved = saved._replace(lse_NT=saved.lse_NT.contiguous())
        kv_heads = self._kv_heads_of_a_call(saved, spans, spec)
        if kv_heads is None:
            self._backward_of_one_call(dout_TNV, saved, gradients, spans, spec)
            return
        q, k, v, out, lse_NT = saved
        dq, dk, dv = gradients
        shared = q.shape[1] // k.shape[1]
        for first in range(0, k.shape[1], kv_heads):
            stop = min(first + kv_heads, k.shape[1])
            heads, of_kv = slice(first * shared, stop * shared), slice(first, stop)
            self._backward_of_one_call(
                dout_TNV[:, heads],
                Saved(q[:, heads], k[:, of_kv], v[:, of_kv], out[:, heads], lse_NT[heads]),
                Gradients(dq[:, heads], dk[:, of_kv], dv[:, of_kv]),
                spans,
                spec,
            )

    def _backward_of_one_call(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        dq_TNH, dk_SGH, dv_SGV = gradients

        def derive() -> None:
            self._backward(
                *saved[:4],
                dout_TNV,
                saved.lse_NT,
                softmax_scale=spec.scale,
                causal=spec.causal,
                **options_of_package(spec),
                **spans.by_name,
                deterministic=spec.deterministic,
                dq=dq_TNH,
                dk=dk_SGH,
                dv=dv_SGV,
            )

        tensors = (*saved, dout_TNV, *gradients, *spans.offsets)
        self._recorded.run(derive, tensors, "backward", spec, *spans.longest)

    def _packing(self, q_TNH: torch.Tensor, spans: Spans, spec: AttentionSpec) -> dict[str, bool]:
        """Returns the package's option that keeps heads apart if that is faster; else nothing."""
        if spec.window_tokens or q_TNH.shape[2] != HEAD_DIM_HEADS_APART or not self._cache_bytes(q_TNH.device):
            return {}
        queries, keys = spans.max_seqlen_q, spans.max_seqlen_k
        has_long_prefix = not spec.causal or keys >= 2 * queries
        return {"pack_gqa": False} if has_long_prefix and queries >= MIN_QUERIES_HEADS_APART else {}

    def _kv_heads_of_a_call(self, saved: Saved, spans: Spans, spec: AttentionSpec) -> int | None:
        """Returns how many KV heads each call of backward has; None if one call computes all."""
        q_TNH, k_SGH, v_SGV = saved[:3]
        cache_bytes = self._cache_bytes(q_TNH.device)
        # A deterministic backward has another order, whose reads stay in the cache.
        if spec.causal or spec.window_tokens or spec.deterministic or not cache_bytes:
            return None
        heads, kv_heads = q_TNH.shape[1], k_SGH.shape[1]
        if heads == kv_heads:  # not measured: the package writes gradients of keys in another way
            return None
        query_bytes_of_a_head = spans.max_seqlen_q * query_row_bytes(
            q_TNH.shape[2], v_SGV.shape[2], q_TNH.element_size()
        )
        if len(k_SGH) * heads <= LONG_CALL_HEAD_ROWS or query_bytes_of_a_head <= cache_bytes / 2:
            return None
        return kv_heads_of_short_calls(len(k_SGH), heads, kv_heads)


def query_row_bytes(head_dim: int, value_dim: int, element_bytes: int) -> int:
    """Returns the bytes that a block of keys reads and adds to per query and head: the query, the gradient of its
    output, and the gradient of the query in fp32."""
    return (head_dim + value_dim) * element_bytes + head_dim * 4


def kv_heads_of_short_calls(key_rows: int, heads: int, kv_heads: int) -> int | None:
    """Returns the most KV heads of a call whose blocks of keys stay together; None if all of them may be in one call.

    A call has at least one KV head, with all of its query heads. Heads are of all calls together.
    """
    kv_heads_of_a_call = max(1, SHORT_CALL_HEAD_ROWS * kv_heads // (key_rows * heads))
    return None if kv_heads_of_a_call >= kv_heads else kv_heads_of_a_call


class FfpaKernel:
    """Attention of ffpa-attn for head dimensions of 320 to 512 on Hopper GPUs, compiled when first used.

    Forward and backward run inside one operator of ours, with autograd off, so they call the functions below the
    package's own operators: those that `ffpa_attn.cute._forward_impl_for_device` and `_backward_impl_for_device`
    choose for a GPU.

    On Hopper GPUs, up to a head dimension of 512, these functions align causal masks bottom-right, write to given
    tensors, and return log-sum-exps as `[N, T]` in fp32. With the log-sum-exps of a longer row, backward returns this
    task's share of the row's gradients. One kernel writes the gradients of queries, another one of keys and
    values. Neither adds atomically: gradients are always bit-equal from run to run.

    Elsewhere backward is another function, which leaves the gradients of a causal task zero if the task has more keys
    than queries. So `kernels.registry` takes this kernel on Hopper only.
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
