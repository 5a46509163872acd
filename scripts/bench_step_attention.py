"""Attention functions of the modes that are not the product's; Transformers calls them once per layer.

    whole       q k v ── kernel ── out                                                        nothing exchanged
    heads       q k v ── tokens to heads ── kernel ── heads to tokens ── out                  Ulysses
    gathered    k v ── all-gather ── kernel ── out; dk dv are summed by a reduce-scatter      context parallelism

What belongs to a micro-batch travels as `bench_work` in the model's keywords.
"""

import math
from typing import Any

import torch
from bench_step_operators import Work, flash_attn, gather_tokens, heads_to_tokens, tokens_to_heads
from torch import nn
from transformers import AttentionInterface


def attend_whole(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    bench_work: Work,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """All keys are this rank's own, or made up."""
    q, k, v = (_rows(x) for x in (query, key, value))
    out, _ = flash_attn(q, k, v, _scale(query, scaling), bench_work.handle)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def attend_by_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    bench_work: Work,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Ulysses: some heads of all ranks' tokens. If ranks do not divide KV heads, these are repeated until they do."""
    q, k, v = (_rows(x) for x in (query, key, value))
    ranks, work = bench_work.ranks, bench_work.handle
    copies = ranks // math.gcd(k.shape[1], ranks)
    if q.shape[1] % (copies * k.shape[1]):
        raise SystemExit(f"ulysses: {ranks} ranks cannot divide {q.shape[1]} query and {k.shape[1]} KV heads")
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (tokens_to_heads(x, ranks, work) for x in (q, k, v))
    out, _ = flash_attn(q, k, v, _scale(query, scaling), work)
    return heads_to_tokens(out, ranks, work).unflatten(0, (query.shape[0], query.shape[2])), None


def attend_gathered(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    bench_work: Work,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Context parallelism: own queries, keys of all ranks."""
    q, k, v = (_rows(x) for x in (query, key, value))
    ranks, work = bench_work.ranks, bench_work.handle
    k, v = gather_tokens(k, ranks, work), gather_tokens(v, ranks, work)
    out, _ = flash_attn(q, k, v, _scale(query, scaling), work)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[B, N, T, D]` as `[B * T, N, D]`, contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


WAYS = {"bench_whole": attend_whole, "bench_heads": attend_by_heads, "bench_gathered": attend_gathered}


def register_ways() -> None:
    """Makes them known to Transformers. There is no mask of these names, so that none is made: calls say which
    documents there are."""
    for name, function in WAYS.items():
        AttentionInterface.register(name, function)
