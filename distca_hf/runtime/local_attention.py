"""Local attention: the same kernels on this rank's local rows, without a plan and without an exchange.

"distca" uses it for batches without a plan: in evaluation, in generation with a KV cache, on one rank, and for padded
batches.

Numbers of documents, tokens and padded places are in tensors, and no shape depends on them: the operator itself
selects the rows that attend. So one compiled graph serves all lengths, and torch can record CUDA graphs between the
operators (`mode="reduce-overhead"`).

Shape legend in `kernels.interface`.
"""

from typing import Any, NamedTuple, Protocol, cast

import torch

from distca_hf.config import KernelName
from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Inputs,
    Kernel,
    Saved,
    Spans,
    empty_gradients,
    empty_outputs,
    made_deterministic,
    spec_of,
    without_window,
)
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.kernels.rows import add_sinks, sink_gradients
from distca_hf.runtime.custom_op import SavedForBackward, define_op, kept_in_regions, noted_in_tiles


class Documents(NamedTuple):
    """Documents of queries and of keys, one after the other; a document's last query stands at its last key.

    In a compiled graph tensors have their maximum length; places after the last document are ignored.
    """

    # int32 `[documents + 1]` offsets of queries and of keys.
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    # int64 `[5]` on the CPU: number of documents, most queries and most keys of one, query rows, key rows.
    sizes: torch.Tensor
    # int64, rows of the batch that are tokens, in order; None if all are.
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None

    @classmethod
    def of(
        cls, spans: Spans, query_rows: torch.Tensor | None = None, key_rows: torch.Tensor | None = None
    ) -> "Documents":
        """Returns documents with tensors exactly as long as needed."""
        rows = [0 if rows is None else len(rows) for rows in (query_rows, key_rows)]
        documents = len(spans.cu_seqlens_q) - 1
        sizes = torch.tensor([documents, spans.max_seqlen_q, spans.max_seqlen_k, *rows], device="cpu")
        return cls(spans.cu_seqlens_q, spans.cu_seqlens_k, sizes, query_rows, key_rows)


class _Context(SavedForBackward, Protocol):
    spec: list[float]
    kernel: str
    trains_sinks: bool


def _flash_attn_local(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    sizes: torch.Tensor,
    query_rows: torch.Tensor | None,
    key_rows: torch.Tensor | None,
    spec: list[float],
    kernel: str,
    sinks_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention output and log-sum-exp of varlen attention, zero in rows that are not tokens."""
    spans, rows_q, rows_k = _read(Documents(cu_seqlens_q, cu_seqlens_k, sizes, query_rows, key_rows))
    q, k, v, how = _taken(q_TNH, rows_q), _taken(k_SGH, rows_k), _taken(v_SGV, rows_k), _spec(spec, spans)
    if len(q):
        out, lse = _kernel(kernel, q, k, v, how).forward(Inputs(q, k, v), spans, how)
        if sinks_N is not None:
            add_sinks(out, lse.t(), sinks_N)
    else:  # a batch of only padding has no work for a kernel
        out, lse = empty_outputs(q, v)
    return _put_back(out, rows_q, len(q_TNH)), _put_back(lse, rows_q, len(q_TNH), dim=1)


def _shapes(
    q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, *others: object
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
    sizes: torch.Tensor,
    query_rows: torch.Tensor | None,
    key_rows: torch.Tensor | None,
    spec: list[float],
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes gradients of q, k and v, zero in rows that are not tokens; deterministic if torch is set so."""
    spans, rows_q, rows_k = _read(Documents(cu_seqlens_q, cu_seqlens_k, sizes, query_rows, key_rows))
    dout, q, out = (_taken(x, rows_q) for x in (dout_TNV, q_TNH, out_TNV))
    k, v, lse, how = _taken(k_SGH, rows_k), _taken(v_SGV, rows_k), _taken(lse_NT, rows_q, dim=1), _spec(spec, spans)
    if torch.are_deterministic_algorithms_enabled():
        how = made_deterministic(how)
    dq, dk, dv = empty_gradients(dout, q, k, v)
    if len(q):
        saved = Saved(q, k, v, out, lse)
        _kernel(kernel, q, k, v, how).backward(dout, saved, Gradients(dq, dk, dv), spans, how)
    else:
        dk.zero_()
        dv.zero_()
    return _put_back(dq, rows_q, len(q_TNH)), _put_back(dk, rows_k, len(k_SGH)), _put_back(dv, rows_k, len(v_SGV))


flash_attn_local_backward = define_op(_flash_attn_local_backward, empty_gradients)


def _kernel(name: str, q_TNH: torch.Tensor, k_SGH: torch.Tensor, v_SGV: torch.Tensor, spec: AttentionSpec) -> Kernel:
    return choose_kernel(cast(KernelName, name), Operands.of(q_TNH, k_SGH, v_SGV), spec)


def _spec(numbers: list[float], spans: Spans) -> AttentionSpec:
    """Returns the spec of a call. Drops a window at least as long as every document, because more kernels support
    that."""
    spec = spec_of(*numbers)
    return without_window(spec) if spec.window_tokens >= spans.max_seqlen_k else spec


def _read(documents: Documents) -> tuple[Spans, torch.Tensor | None, torch.Tensor | None]:
    """Returns documents without the places after the last one, and rows of queries and of keys; None for all rows."""
    offsets_q, offsets_k, sizes, query_rows, key_rows = documents
    number, max_seqlen_q, max_seqlen_k, queries, keys = sizes.tolist()
    if len(offsets_q) != number + 1:  # a view costs the host more than this check
        offsets_q, offsets_k = offsets_q[: number + 1], offsets_k[: number + 1]
    spans = Spans(offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
    return spans, None if query_rows is None else query_rows[:queries], None if key_rows is None else key_rows[:keys]


def _taken(x: torch.Tensor, rows: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return x if rows is None else x.index_select(dim, rows)


def _put_back(x: torch.Tensor, rows: torch.Tensor | None, size: int, dim: int = 0) -> torch.Tensor:
    """Returns `x` in its rows of `size`, and zero in the others."""
    if rows is None:
        return x
    shape = [*x.shape]
    shape[dim] = size
    return x.new_zeros(shape).index_copy_(dim, rows, x)


def _save(ctx: _Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *documents, spec, kernel, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, *documents, sinks)
    ctx.spec, ctx.kernel = spec, kernel
    ctx.trains_sinks = sinks is not None and sinks.requires_grad


def _backward(ctx: _Context, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, *documents, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    gradients = flash_attn_local_backward(dout, q, k, v, out, lse, *Documents(*documents), ctx.spec, ctx.kernel)
    return *gradients, *[None] * 7, sink_gradients(dout, out, lse.t(), sinks) if ctx.trains_sinks else None


_local = noted_in_tiles(define_op(kept_in_regions(_flash_attn_local), _shapes, _backward, _save))


def flash_attn_local(
    q_TNH: torch.Tensor,
    k_SGH: torch.Tensor,
    v_SGV: torch.Tensor,
    documents: Documents,
    spec: AttentionSpec,
    kernel: str = "auto",
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention output `[T, N, V]`, differentiable, and log-sum-exp `[N, T]`; both zero in rows that are not
    tokens. Raises UnsupportedAttentionError if no kernel supports this; names the option.

    Args:
        q_TNH, k_SGH, v_SGV: all rows of the batch.
        spec: how to attend; gradients are also deterministic if torch is set so.
        sinks_N: scores of the heads' sinks, differentiable.
    """
    return _local(q_TNH, k_SGH, v_SGV, *documents, [*spec], kernel, sinks_N)
