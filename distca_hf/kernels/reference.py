"""The reference: attention by its definition, for any dtype, head dimension and device, with windows and softcap.

Query rows of a task are computed in blocks, so that scores of a long document need not be held at once. A block reads
the keys from the first to the last one that one of its rows attends to:

    keys      0 ...... first ........ place of the last row ...... end       window 3, block of 2 rows
    row 0                 x  x  x  .                                         place: where the row stands among the keys
    row 1                 .  x  x  x

It computes in max(fp32, input dtype). Shape legend in `kernels.interface`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from distca_hf.kernels.interface import (
    NEW,
    AttentionSpec,
    Gradients,
    Inputs,
    Outputs,
    Room,
    Saved,
    Spans,
    accumulation_dtype,
)


# Query rows of one block.
BLOCK_ROWS = 1024


class ReferenceKernel:
    """Softmax(QKᵀ)V and its derivative written out; slow, and short enough to be checked by eye."""

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        q_TNH, k_SGH, v_SGV = inputs
        out_TNV, lse_NT = room.made(inputs)
        precise = accumulation_dtype(q_TNH.dtype)
        for block in _blocks(spans, spec):
            rows, keys, _ = block
            q, k, v = _heads_first(q_TNH[rows], k_SGH[keys], v_SGV[keys], precise)
            scores = _scores(q, k, spec, block)
            lse = scores.logsumexp(-1)
            out_TNV[rows] = torch.matmul((scores - lse.unsqueeze(-1)).exp(), v).transpose(0, 1).to(out_TNV.dtype)
            lse_NT[:, rows] = lse
        return out_TNV, lse_NT

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        q_TNH, k_SGH, v_SGV, out_TNV, lse_NT = saved
        dq_TNH, dk_SGH, dv_SGV = gradients
        precise = accumulation_dtype(q_TNH.dtype)
        dk_sum, dv_sum = torch.zeros_like(dk_SGH, dtype=precise), torch.zeros_like(dv_SGV, dtype=precise)
        groups = k_SGH.shape[1]
        for block in _blocks(spans, spec):
            rows, keys, _ = block
            q, k, v = _heads_first(q_TNH[rows], k_SGH[keys], v_SGV[keys], precise)
            dout, out = dout_TNV[rows].to(precise).transpose(0, 1), out_TNV[rows].to(precise).transpose(0, 1)
            scores = _scores(q, k, spec, block)
            probabilities = (scores - lse_NT[:, rows].to(precise).unsqueeze(-1)).exp()
            dprobabilities = torch.matmul(dout, v.transpose(-1, -2))
            dscores = probabilities * (dprobabilities - (dout * out).sum(-1, keepdim=True)) * spec.scale
            if spec.softcap:  # derivative of tanh; hidden scores are minus infinity and have none
                dscores *= 1 - (scores.clamp(min=-spec.softcap) / spec.softcap).square()
            dq_TNH[rows] = torch.matmul(dscores, k).transpose(0, 1).to(dq_TNH.dtype)
            dk_sum[keys] += _sum_groups(torch.matmul(dscores.transpose(-1, -2), q), groups)
            dv_sum[keys] += _sum_groups(torch.matmul(probabilities.transpose(-1, -2), dout), groups)
        dk_SGH.copy_(dk_sum)
        dv_SGV.copy_(dv_sum)


class _Block(NamedTuple):
    """Query rows of one task, the keys that they attend to, and where the first row stands, counted from the first of
    these keys. It may stand before it."""

    rows: slice
    keys: slice
    place: int


def _blocks(spans: Spans, spec: AttentionSpec) -> Iterator[_Block]:
    for task in range(len(spans.queries) - 1):
        query_start, query_stop = spans.queries[task], spans.queries[task + 1]
        key_start, key_stop = spans.keys[task], spans.keys[task + 1]
        for start in range(query_start, query_stop, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, query_stop)
            place, last_place = (key_stop - (query_stop - row) for row in (start, stop - 1))
            first = max(key_start, place - spec.window_tokens + 1) if spec.window_tokens else key_start
            yield _Block(slice(start, stop), slice(first, last_place + 1 if spec.causal else key_stop), place - first)


def _heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tensors with heads in front, KV heads repeated for the query heads that share them."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return q.to(dtype).transpose(0, 1), k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec, block: _Block) -> torch.Tensor:
    """Returns scaled and capped scores, minus infinity where a query does not attend."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if spec.causal:
        seen = seen.tril(block.place)
    if spec.window_tokens:
        seen = seen.triu(block.place - spec.window_tokens + 1)
    return scores.masked_fill(~seen, float("-inf"))


def _sum_groups(gradient_NSD: torch.Tensor, groups: int) -> torch.Tensor:
    """Sums over the query heads that share a KV head: `[N, S, D]` to `[S, G, D]`."""
    return gradient_NSD.unflatten(0, (groups, -1)).sum(1).transpose(0, 1)
