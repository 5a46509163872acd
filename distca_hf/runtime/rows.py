"""Rows: the same memory seen as tokens with all heads, or as rows of one group of heads each.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.ranges`.
"""

from collections.abc import Sequence

import torch

from distca_hf.runtime.maps import DeviceCall


def as_rows(x_TND: torch.Tensor, groups: int) -> torch.Tensor:
    """`[T, heads, D]` as `[T * groups, heads / groups, D]`; `[T, heads]` as `[T * groups, heads / groups]`."""
    if groups == 1:
        return x_TND
    tokens, heads = x_TND.shape[:2]
    return x_TND.view(tokens * groups, heads // groups, *x_TND.shape[2:])


def queries_of(call: DeviceCall, kv_heads: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The call's part of each of own `[T, heads, ...]`, or of guests' `[R, heads, ...]`."""
    if call.heads is None:
        return _stored_parts(tensors, call.queries, call.stored_rows_per_token)
    return _own_parts(tensors, call.queries, call.heads, kv_heads)


def keys_of(call: DeviceCall, kv_heads: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The call's part of each of own `[T, heads, D]`, or of the store's `[R, heads, D]`."""
    if call.stored_rows_per_token:
        return _stored_parts(tensors, call.keys, call.stored_rows_per_token)
    assert call.heads is not None
    return _own_parts(tensors, call.keys, call.heads, kv_heads)


def _own_parts(
    tensors_TND: Sequence[torch.Tensor], tokens: slice, heads: tuple[int, int], kv_heads: int
) -> Sequence[torch.Tensor]:
    """Some tokens of each `[T, heads, ...]`, and of their heads those that belong to KV heads [first, last)."""
    if heads == (0, kv_heads):
        return _some_rows(tensors_TND, tokens)
    shared = [x.shape[1] // kv_heads for x in tensors_TND]
    return [x[tokens, heads[0] * n : heads[1] * n] for x, n in zip(tensors_TND, shared, strict=True)]


def _stored_parts(tensors_RHD: Sequence[torch.Tensor], rows: slice, rows_per_token: int) -> Sequence[torch.Tensor]:
    """Some rows of each `[R, heads, D]` as `[tokens, rows per token * heads, D]`."""
    chosen = _some_rows(tensors_RHD, rows)
    if rows_per_token == 1:
        return chosen
    return [x.view(x.shape[0] // rows_per_token, rows_per_token * x.shape[1], *x.shape[2:]) for x in chosen]


def _some_rows(tensors: Sequence[torch.Tensor], rows: slice) -> Sequence[torch.Tensor]:
    """`x[rows]` of each; all have as many rows."""
    return tensors if rows == slice(0, tensors[0].shape[0]) else [x[rows] for x in tensors]
