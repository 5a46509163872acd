"""Attention in a graph: local attention to documents that an operator finds inside a compiled graph.

How many documents, tokens and padded places there are is only known when the graph runs. No shape depends on it: rows
that attend are taken inside the operator. So one graph serves all lengths, and torch can record it as CUDA graphs
between the operators (`mode="reduce-overhead"`).

Shape legend in `kernels.interface`.
"""

from typing import Any, NamedTuple

import torch

from distca_hf.kernels.interface import AttentionSpec, Spans, empty_outputs, sink_gradients
from distca_hf.runtime.custom_op import define_op
from distca_hf.runtime.local_attention import attend, attend_backward


class DocumentsInGraph(NamedTuple):
    """Documents of queries and of keys, in tensors as long as they can get; places behind the last one count for
    nothing.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 offsets of queries and of keys.
        query_rows, key_rows: int64 `[B * T]` and `[B * S]`, rows of the batch that are tokens; None if all are.
        sizes: int64 `[5]` on the CPU: documents, queries and keys of the longest one, queries, keys.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None
    sizes: torch.Tensor


def _flash_attn_in_graph(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    query_rows: torch.Tensor | None,
    key_rows: torch.Tensor | None,
    sizes: torch.Tensor,
    spec: list[float],
    kernel: str,
    sinks_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention output and log-sum-exp, zero in rows that are no tokens."""
    spans, rows_q, rows_k = _read(DocumentsInGraph(cu_seqlens_q, cu_seqlens_k, query_rows, key_rows, sizes))
    q, k, v = _taken(q_TNH, rows_q), _taken(k_SGH, rows_k), _taken(v_SGV, rows_k)
    out, lse = attend(q, k, v, spans, spec, kernel, sinks_N)
    return _put_back(out, rows_q, len(q_TNH)), _put_back(lse, rows_q, len(q_TNH), dim=1)


def _shapes(
    q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_outputs(q_TNH, v_SGV)


def _flash_attn_in_graph_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_NT: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    query_rows: torch.Tensor | None,
    key_rows: torch.Tensor | None,
    sizes: torch.Tensor,
    spec: list[float],
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v, zero in rows that are no tokens."""
    spans, rows_q, rows_k = _read(DocumentsInGraph(cu_seqlens_q, cu_seqlens_k, query_rows, key_rows, sizes))
    dout, q, out = (_taken(x, rows_q) for x in (dout_TNV, q_TNH, out_TNV))
    k, v, lse = _taken(k_SGH, rows_k), _taken(v_SGV, rows_k), _taken(lse_NT, rows_q, dim=1)
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, spans, spec, kernel)
    return _put_back(dq, rows_q, len(q_TNH)), _put_back(dk, rows_k, len(k_SGH)), _put_back(dv, rows_k, len(v_SGV))


def _gradients(
    dout_TNV: torch.Tensor, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_TNH), torch.empty_like(k_SGH), torch.empty_like(v_SGV)


def _read(documents: DocumentsInGraph) -> tuple[Spans, torch.Tensor | None, torch.Tensor | None]:
    """Returns documents without the places behind the last one, and rows of queries and of keys; None for all rows."""
    number, max_seqlen_q, max_seqlen_k, queries, keys = documents.sizes.tolist()
    offsets = documents.cu_seqlens_q[: number + 1], documents.cu_seqlens_k[: number + 1]
    rows_q, rows_k = documents.query_rows, documents.key_rows
    spans = Spans(*offsets, max_seqlen_q, max_seqlen_k)
    return spans, None if rows_q is None else rows_q[:queries], None if rows_k is None else rows_k[:keys]


def _taken(x: torch.Tensor, rows: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return x if rows is None else x.index_select(dim, rows)


def _put_back(x: torch.Tensor, rows: torch.Tensor | None, size: int, dim: int = 0) -> torch.Tensor:
    """Returns `x` in its rows of `size`, and zero in the others."""
    if rows is None:
        return x
    shape = [*x.shape]
    shape[dim] = size
    return x.new_zeros(shape).index_copy_(dim, rows, x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, spec, kernel, sinks = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], sinks)
    ctx.how = spec, kernel


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, *documents, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = _backward_op(dout, q, k, v, out, lse, *documents, *ctx.how)
    return *gradients, *[None] * 7, None if sinks is None else sink_gradients(dout, out, lse.t(), sinks)


_op = define_op(_flash_attn_in_graph, _shapes, _backward, _save)
_backward_op = define_op(_flash_attn_in_graph_backward, _gradients)


def flash_attn_in_graph(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    documents: DocumentsInGraph,
    spec: AttentionSpec,
    kernel: str = "auto",
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention output `[T, N, V]`, which is differentiable, and log-sum-exp `[N, T]`; both zero in rows that
    are no tokens.

    Args:
        q_TNH, k_SGH, v_SGV: all rows of the batch.
        spec: gradients are deterministic, too, if torch is told to be so.
        kernel: name of one, or "auto".
        sinks_N: scores of the heads' sinks, differentiable. Only the reference kernel computes them yet.

    Raises:
        UnsupportedAttentionError: no kernel can attend like this; names the option.
    """
    output: tuple[torch.Tensor, torch.Tensor] = _op(q_TNH, k_SGH, v_SGV, *documents, [*spec], kernel, sinks_N)
    return output
