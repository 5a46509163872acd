"""FlashAttention 4's calls on long prefixes: which heads a call has, and whether they are packed.

The package runs only on GPUs. Here functions of the same names note their calls, and compute by the reference.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.kernels.flash4 import (
    HEAD_DIM_HEADS_APART,
    LONG_CALL_HEAD_ROWS,
    MIN_QUERIES_HEADS_APART,
    SHORT_CALL_HEAD_ROWS,
    Flash4Kernel,
    kv_heads_of_short_calls,
    query_row_bytes,
)
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Saved, Spans, empty_outputs
from distca_hf.kernels.reference import ReferenceKernel


CAUSAL = AttentionSpec(0.5)
PREFIX = AttentionSpec(0.5, causal=False)
QUERIES = MIN_QUERIES_HEADS_APART


class Package:
    """The two functions of the package, on a device whose L2 cache has so many bytes."""

    def __init__(self, cache_bytes: int, computes: bool = False) -> None:
        self.computes = computes
        self.packed: list[bool | None] = []
        self.heads: list[tuple[int, int]] = []
        functions = SimpleNamespace(_flash_attn_fwd=self._forward, _flash_attn_bwd=self._backward)
        self.kernel = Flash4Kernel(functions, lambda device: cache_bytes)  # type: ignore[arg-type]

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> Any:
        self.packed.append(named.get("pack_gqa"))
        return empty_outputs(q, v)

    def _backward(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, dq: Any, dk: Any, dv: Any, **named: Any
    ) -> None:
        self.heads.append((q.shape[1], k.shape[1]))
        assert lse.is_contiguous()
        if not self.computes:
            return
        spans = Spans(*(named[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")))
        spec = PREFIX._replace(scale=named["softmax_scale"], causal=named["causal"])
        ReferenceKernel().backward(dout, Saved(q, k, v, out, lse), Gradients(dq, dk, dv), spans, spec)


def spans_of(queries: tuple[int, ...], keys: tuple[int, ...]) -> Spans:
    offsets = [torch.tensor([0, *rows]).cumsum(0).to(torch.int32) for rows in (queries, keys)]
    return Spans(*offsets, max(queries), max(keys))


@pytest.mark.parametrize(
    ("spec", "queries", "keys", "head_dim", "cache_bytes", "packed"),
    [
        (PREFIX, QUERIES, 1, HEAD_DIM_HEADS_APART, 1, False),
        (PREFIX, QUERIES - 1, 1, HEAD_DIM_HEADS_APART, 1, None),
        (PREFIX, QUERIES, 1, HEAD_DIM_HEADS_APART // 2, 1, None),
        (PREFIX, QUERIES, 1, HEAD_DIM_HEADS_APART, 0, None),
        (CAUSAL, QUERIES, 2 * QUERIES, HEAD_DIM_HEADS_APART, 1, False),
        (CAUSAL, QUERIES, 2 * QUERIES - 1, HEAD_DIM_HEADS_APART, 1, None),
        (CAUSAL, QUERIES - 1, 2 * QUERIES, HEAD_DIM_HEADS_APART, 1, None),
        (PREFIX._replace(window_tokens=8), QUERIES, 2 * QUERIES, HEAD_DIM_HEADS_APART, 1, None),
        (CAUSAL._replace(window_tokens=8), QUERIES, 2 * QUERIES, HEAD_DIM_HEADS_APART, 1, None),
    ],
)
def test_heads_are_packed_as_the_package_likes_but_on_long_prefixes(
    spec: AttentionSpec, queries: int, keys: int, head_dim: int, cache_bytes: int, packed: bool | None
) -> None:
    package = Package(cache_bytes)
    q, k = torch.zeros(queries + 1, 4, head_dim), torch.zeros(1 + keys, 2, head_dim)
    package.kernel.forward(Inputs(q, k, k), spans_of((1, queries), (1, keys)), spec)
    assert package.packed == [packed]


# Rows of a call that is long with 64 query heads.
KEYS = LONG_CALL_HEAD_ROWS // 64 + 1
ROW_BYTES = query_row_bytes(2, 2, 8)


@pytest.mark.parametrize(
    ("spec", "keys", "cache_bytes", "calls"),
    [
        # Three KV heads with their query heads are the most within SHORT_CALL_HEAD_ROWS.
        (PREFIX, KEYS, 1, [(12, 3)] * 5 + [(4, 1)]),
        (PREFIX, KEYS - 1, 1, [(64, 16)]),
        (PREFIX, KEYS, 2 * 3 * ROW_BYTES, [(64, 16)]),
        (PREFIX, KEYS, 2 * 3 * ROW_BYTES - 1, [(12, 3)] * 5 + [(4, 1)]),
        (PREFIX, KEYS, 0, [(64, 16)]),
        (PREFIX._replace(deterministic=True), KEYS, 1, [(64, 16)]),
        (PREFIX._replace(window_tokens=8), KEYS, 1, [(64, 16)]),
        (CAUSAL, KEYS, 1, [(64, 16)]),
    ],
)
def test_backward_of_a_long_prefix_has_some_heads_per_call(
    spec: AttentionSpec, keys: int, cache_bytes: int, calls: list[tuple[int, int]]
) -> None:
    tasks = spans_of((3, 2), (keys - 5, 5))
    q, k = torch.zeros(5, 64, 2, dtype=torch.float64), torch.zeros(keys, 16, 2, dtype=torch.float64)
    package = Package(cache_bytes)
    package.kernel.backward(q, Saved(q, k, k, q, q[:, :, 0].t()), Gradients(q, k, k), tasks, spec)
    assert package.heads == calls


def test_backward_of_heads_that_share_no_keys_is_one_call() -> None:
    q, k = torch.zeros(5, 64, 2), torch.zeros(KEYS, 64, 2)
    package = Package(1)
    package.kernel.backward(
        q, Saved(q, k, k, q, q[:, :, 0].t()), Gradients(q, k, k), spans_of((3, 2), (KEYS - 5, 5)), PREFIX
    )
    assert package.heads == [(64, 64)]


def test_gradients_of_short_calls_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = spans_of((3, 2), (KEYS - 5, 5))
    q, dout = (torch.randn(5, 64, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(KEYS, 16, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    saved = Saved(q, k, v, *ReferenceKernel().forward(Inputs(q, k, v), tasks, PREFIX))
    got, right = (Gradients(*(torch.full_like(x, 7.0) for x in (q, k, v))) for _ in range(2))

    package = Package(1, computes=True)
    package.kernel.backward(dout, saved, got, tasks, PREFIX)

    assert len(package.heads) == 6
    ReferenceKernel().backward(dout, saved, right, tasks, PREFIX)
    for gradient, expected in zip(got, right, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@given(st.integers(1, 2**24), st.integers(1, 16), st.integers(1, 64))
def test_short_calls_are_as_large_as_they_may(key_rows: int, per_kv_head: int, kv_heads: int) -> None:
    of_a_call = kv_heads_of_short_calls(key_rows, per_kv_head * kv_heads, kv_heads)
    of_a_head = key_rows * per_kv_head
    if of_a_call is None:
        assert kv_heads == 1 or of_a_head * kv_heads <= SHORT_CALL_HEAD_ROWS
    else:
        assert 1 <= of_a_call < kv_heads
        assert of_a_call == 1 or of_a_call * of_a_head <= SHORT_CALL_HEAD_ROWS < (of_a_call + 1) * of_a_head
