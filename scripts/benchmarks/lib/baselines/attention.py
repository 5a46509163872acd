"""Attention functions of the modes that are not the product's; Transformers calls them once per layer.

    whole       q k v ── kernel ── out                                                        nothing exchanged
    heads       q k v ── tokens to heads ── kernel ── heads to tokens ── out                  Ulysses
    gathered    k v ── all-gather ── kernel ── out; dk dv are summed by a reduce-scatter      context parallelism
    package     q k v ── code of another project (`ring_code.py`, `peers.py`) ── out             theirs

The work of a micro-batch travels as `bench_work` in the model's keywords.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lib.baselines.operators import Work, flash_attn, gather_tokens, heads_to_tokens, tokens_to_heads
from lib.baselines.ring_code import RingWork


# From q `[T, N, H]`, k `[T, G, H]` and v `[T, G, V]` of this rank, the scale of scores, the tokens of a sliding window
# (0 without one), and the work of this micro-batch.
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int, Any], torch.Tensor]


def attend(
    way: Way,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    bench_work: Work | RingWork,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as Transformers asks: `[B, N, T, D]` in, `[B, T, N, D]` out; ways have `[B * T, N, D]`, contiguous.
    Exits if the layer asks for a softcap. Sinks are left out: steps are a little faster, and losses are others."""
    if kwargs.get("softcap"):
        raise SystemExit(f"softcap={kwargs['softcap']} is computed only by modes placed, given and moved")
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return way(q, k, v, scale, sliding_window or 0, bench_work).unflatten(0, (query.shape[0], query.shape[2])), None


def attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, work: Work
) -> torch.Tensor:
    """Returns attention `[T, N, V]` to keys that are all local, or made up."""
    return flash_attn(q, k, v, scale, window, work.handle)[0]


def attend_by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, work: Work
) -> torch.Tensor:
    """Returns attention `[T, N, V]` of Ulysses: some heads of all ranks' tokens. If ranks do not divide KV heads,
    these are repeated until they do."""
    copies = work.ranks // math.gcd(k.shape[1], work.ranks)
    if q.shape[1] % (copies * k.shape[1]):
        raise SystemExit(f"ulysses: {work.ranks} ranks cannot divide {q.shape[1]} query and {k.shape[1]} KV heads")
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (tokens_to_heads(x, work.ranks, work.handle) for x in (q, k, v))
    return heads_to_tokens(attend_whole(q, k, v, scale, window, work), work.ranks, work.handle)


def attend_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, work: Work
) -> torch.Tensor:
    """Returns attention `[T, N, V]` of local queries to keys of all ranks: context parallelism."""
    k, v = (gather_tokens(x, work.ranks, work.handle) for x in (k, v))
    return attend_whole(q, k, v, scale, window, work)


def attend_by_package(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, work: RingWork
) -> torch.Tensor:
    """Returns attention `[T, N, V]` as a package computes it, which knows no windows."""
    if window:
        raise SystemExit(f"layers have a window of {window} tokens: leave modes of other packages out")
    return work.attend(q, k, v, scale)


WAYS: dict[str, Way] = {
    "bench_whole": attend_whole,
    "bench_heads": attend_by_heads,
    "bench_gathered": attend_gathered,
    "bench_package": attend_by_package,
}


def register_ways() -> None:
    """Makes these ways known to Transformers. There is no mask of their names, so that none is made: calls say which
    documents there are."""
    for name, way in WAYS.items():
        AttentionInterface.register(name, partial(attend, way))
