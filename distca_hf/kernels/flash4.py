"""FlashAttention 4 (CuTe), behind `kernels.interface.Kernel`.

Forward and backward run inside one operator of ours, where autograd is off. So the functions below the package's
autograd are called: `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`. They align causal masks
bottom-right, return log-sum-exps as `[N, T]` in fp32, and compute sliding windows themselves.

Where a document is longer than the tokens of a rank, most of its work is in calls of many queries against a long
prefix. On Hopper GPUs these calls are made in their own way, which is faster
(docs/benchmarks/kernels.md):

    forward     heads stay apart. By itself the package packs the query heads of a KV head into the rows of one tile.
    backward    several calls of some heads each. Blocks of keys read all queries of a head at about the same time, and
                the L2 cache holds what they read. In one long call they drift apart, until each reads from memory.

Results are the same, bit by bit, but for the order in which backward adds the gradients of queries.

Shape legend in `kernels.interface`.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType

import torch

from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Outputs, Room, Saved, Spans
from distca_hf.kernels.varlen import options_of_package


HOPPER = 9  # compute capability

# Forward keeps heads apart from so many queries of the longest task on, and with this head dimension. Fewer queries
# fill a tile only with several heads; with other dimensions it was no faster.
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
    """FlashAttention 4, compiled when first used: about four seconds per variant.

    Args:
        interface: the package's module `flash_attn.cute.interface`.
        cache_bytes: returns the bytes of a device's L2 cache; 0 where the package makes all calls by itself.
    """

    def __init__(self, interface: ModuleType, cache_bytes: Callable[[torch.device], int] = hopper_cache_bytes) -> None:
        self._forward = interface._flash_attn_fwd
        self._backward = interface._flash_attn_bwd
        self._cache_bytes = cache_bytes

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        room_out, room_lse = room
        if room_lse is not None and room_lse.stride(1) != 1:
            room_lse = None  # it writes rows of a head that follow each other
        out, lse, *_ = self._forward(
            *inputs,
            **spans.by_name,
            softmax_scale=spec.scale,
            causal=spec.causal,
            **options_of_package(spec),
            **self._packing(inputs.q_TNH, spans, spec),
            return_lse=True,
            out=room_out,
            lse=room_lse,
        )
        return room.filled(out if room_out is None else room_out, lse if room_lse is None else room_lse)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        saved = saved._replace(lse_NT=saved.lse_NT.contiguous())
        kv_heads = self._kv_heads_of_a_call(saved, spans, spec)
        if kv_heads is None:
            self._backward_of_one_call(dout_TNV, saved, gradients, spans, spec)
            return
        for heads, of_kv in _in_groups(saved.q_TNH.shape[1], saved.k_SGH.shape[1], kv_heads):
            q, k, v, out, lse_NT = saved
            dq, dk, dv = gradients
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
        q_TNH, k_SGH, v_SGV, out_TNV, lse_NT = saved
        dq_TNH, dk_SGH, dv_SGV = gradients
        self._backward(
            q_TNH,
            k_SGH,
            v_SGV,
            out_TNV,
            dout_TNV,
            lse_NT,
            softmax_scale=spec.scale,
            causal=spec.causal,
            **options_of_package(spec),
            **spans.by_name,
            deterministic=spec.deterministic,
            dq=dq_TNH,
            dk=dk_SGH,
            dv=dv_SGV,
        )

    def _packing(self, q_TNH: torch.Tensor, spans: Spans, spec: AttentionSpec) -> dict[str, bool]:
        """Returns the package's option that keeps heads apart, where that is faster; else nothing."""
        if spec.window_tokens or q_TNH.shape[2] != HEAD_DIM_HEADS_APART or not self._cache_bytes(q_TNH.device):
            return {}
        queries, keys = spans.max_seqlen_q, spans.max_seqlen_k
        has_long_prefix = not spec.causal or keys >= 2 * queries
        return {"pack_gqa": False} if has_long_prefix and queries >= MIN_QUERIES_HEADS_APART else {}

    def _kv_heads_of_a_call(self, saved: Saved, spans: Spans, spec: AttentionSpec) -> int | None:
        """Returns how many KV heads each call of backward has; None if one call computes all."""
        q_TNH, k_SGH, v_SGV = saved[:3]
        cache_bytes = self._cache_bytes(q_TNH.device)
        # A deterministic backward has its own order, which keeps to the cache.
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
    """Returns how many KV heads a call has at most, so that its blocks of keys stay together; None if all of them do.

    A call has at least one KV head, and then all of its query heads.

    Args:
        key_rows: of all tasks.
        heads, kv_heads: query heads and KV heads of all calls together.
    """
    kv_heads_of_a_call = max(1, SHORT_CALL_HEAD_ROWS * kv_heads // (key_rows * heads))
    return None if kv_heads_of_a_call >= kv_heads else kv_heads_of_a_call


def _in_groups(heads: int, kv_heads: int, kv_heads_of_a_call: int) -> Iterator[tuple[slice, slice]]:
    """Yields for each call its query heads among all, and its KV heads."""
    per_kv_head = heads // kv_heads
    for first in range(0, kv_heads, kv_heads_of_a_call):
        stop = min(first + kv_heads_of_a_call, kv_heads)
        yield slice(first * per_kv_head, stop * per_kv_head), slice(first, stop)
