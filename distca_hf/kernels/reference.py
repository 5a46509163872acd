"""The reference: attention by its definition, for any dtype, head dimension and device, with windows and softcap.

Query rows of a task are computed in blocks, or memory would have to hold all scores of a long document. A block reads
the keys from the first to the last one that any of its rows attends to:

    keys      0 ...... first ........ place of the last row ...... end       window 3, block of 2 rows
    row 0                 x  x  x  .                                         place: index of the row's own key
    row 1                 .  x  x  x

It computes in max(fp32, input dtype). Shape legend in `kernels.interface`.

Other kernels are compared with it before they are used (`describe_error`): they are compiled when first used, and some
are wrong for some masks, head dimensions or GPUs. A wrong mask, or an ignored option, changes results by a fifth or
more. Rounding in bf16 changes them by a hundredth.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from distca_hf.kernels.interface import (
    NEW,
    AttentionSpec,
    Gradients,
    Inputs,
    Kernel,
    Outputs,
    Room,
    Saved,
    Spans,
    accumulation_dtype,
)


# Query rows of one block.
BLOCK_ROWS = 1024
# Query and key rows of the tasks: one of two tiles of 128, so kernels loop over keys, and one of one tile. Without a
# causal mask one task has fewer keys than queries.
CAUSAL_TASKS = (256, 256), (40, 200)
OTHER_TASKS = (256, 200), (40, 200)
# Window of all trials: shorter than the keys of every task.
WINDOW_TOKENS = 40
# Largest standard deviation of scores: kernels approximate tanh to a thousandth, and the error grows with the scores.
LARGEST_SPREAD = 12.0
# Calls of a trial: a kernel may compile in the first, record what it launches in the second, and repeat it.
CALLS = 3
# Largest distance from the reference, as a share of its length.
LARGEST_ERROR = 0.05


class ReferenceKernel:
    """Softmax(QKᵀ)V and its derivative written out: slow, and short enough to check by eye."""

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
    """Query rows of one task, the keys that they attend to, and the place of the first row relative to the first of
    these keys, which may be negative."""

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
    """Returns tensors with heads first. Repeats KV heads for the query heads that share them."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return q.to(dtype).transpose(0, 1), k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec, block: _Block) -> torch.Tensor:
    """Returns scaled and capped scores, minus infinity for keys that a query does not attend to."""
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


def describe_error(
    kernel: Kernel, spec: AttentionSpec, heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns which of a kernel's results is wrong, and by how much; None if all are right.

    Args:
        spec: its scale is not used. Scores are so large that a softcap matters.
        heads: query heads, KV heads, head dimension, value dimension.
    """
    num_heads, num_kv_heads, head_dim, value_dim = heads
    tasks = CAUSAL_TASKS if spec.causal else OTHER_TASKS
    spec = spec._replace(scale=min(max(1.0, spec.softcap / 4), LARGEST_SPREAD) * head_dim**-0.5)
    queries, keys = (sum(rows) for rows in zip(*tasks, strict=True))
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    of_queries, of_keys = zip(*tasks, strict=True)
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device) for x in (of_queries, of_keys))
    spans = Spans(cu_q, cu_k, max(of_queries), max(of_keys))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for _ in range(CALLS):
            q, dout = tensor(queries, num_heads, head_dim), tensor(queries, num_heads, value_dim)
            inputs = Inputs(q, tensor(keys, num_kv_heads, head_dim), tensor(keys, num_kv_heads, value_dim))
            got, expected = (_results(one, inputs, dout, spans, spec) for one in (kernel, ReferenceKernel()))
            for name, right in expected.items():
                error = float((got[name].double() - right.double()).norm() / right.double().norm())
                if not error <= LARGEST_ERROR:  # NaN, too
                    return f"its {name} has a relative error of {error:.2g}, on {queries} random tokens"
    return None


def _results(
    kernel: Kernel, inputs: Inputs, dout: torch.Tensor, spans: Spans, spec: AttentionSpec
) -> dict[str, torch.Tensor]:
    """Returns output, log-sum-exp and gradients by name."""
    out, lse = kernel.forward(inputs, spans, spec)
    gradients = Gradients(*(torch.empty_like(x) for x in inputs))
    kernel.backward(dout, Saved(*inputs, out, lse), gradients, spans, spec)
    names = "output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values"
    return dict(zip(names, (out, lse, *gradients), strict=True))
