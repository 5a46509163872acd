"""Rows: the same memory seen as tokens with all heads, or as rows of one group of heads each.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.ranges`.
"""

import torch

from distca_hf.runtime.maps import DeviceCall
from distca_hf.runtime.views import some_rows


def as_rows(x_TND: torch.Tensor, groups: int) -> torch.Tensor:
    """`[T, heads, D]` as `[T * groups, heads / groups, D]`; `[T, heads]` as `[T * groups, heads / groups]`."""
    if groups == 1:
        return x_TND
    tokens, heads = x_TND.shape[:2]
    return x_TND.view(tokens * groups, heads // groups, *x_TND.shape[2:])


def queries_part(x: torch.Tensor, call: DeviceCall, kv_heads: int) -> torch.Tensor:
    """The call's part of own `[T, heads, ...]`, or of guests' `[R, heads, ...]`."""
    if call.heads is None:
        return _stored_part(x, call.queries, call.stored_rows_per_token)
    return _own_part(x, call.queries, call.heads, kv_heads)


def keys_part(x: torch.Tensor, call: DeviceCall, kv_heads: int) -> torch.Tensor:
    """The call's part of own `[T, heads, D]`, or of the store `[R, heads, D]`."""
    if call.stored_rows_per_token:
        return _stored_part(x, call.keys, call.stored_rows_per_token)
    assert call.heads is not None
    return _own_part(x, call.keys, call.heads, kv_heads)


def _own_part(x_TND: torch.Tensor, tokens: slice, heads: tuple[int, int], kv_heads: int) -> torch.Tensor:
    """Some tokens of `[T, heads, ...]`, and of their heads those that belong to KV heads [first, last)."""
    if heads == (0, kv_heads):
        return some_rows(x_TND, tokens)
    shared = x_TND.shape[1] // kv_heads
    return x_TND[tokens, heads[0] * shared : heads[1] * shared]


def _stored_part(x_RHD: torch.Tensor, rows: slice, rows_per_token: int) -> torch.Tensor:
    """Some rows of `[R, heads, D]` as `[tokens, rows per token * heads, D]`."""
    chosen = some_rows(x_RHD, rows)
    if rows_per_token == 1:
        return chosen
    return chosen.view(chosen.shape[0] // rows_per_token, rows_per_token * chosen.shape[1], *chosen.shape[2:])
