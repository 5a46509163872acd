"""Rows: the same memory seen as tokens with all heads, or as rows of one group of heads each.

Shape legend in `kernels.interface`; T counts tokens, padding included, R rows as in `planning.ranges`.
"""

import torch

from distca_hf.runtime.maps import DeviceCall


def as_rows(x_TND: torch.Tensor, groups: int) -> torch.Tensor:
    """`[T, heads, D]` as `[T * groups, heads / groups, D]`; `[T, heads]` as `[T * groups, heads / groups]`."""
    if groups == 1:
        return x_TND
    tokens, heads = x_TND.shape[:2]
    return x_TND.view(tokens * groups, heads // groups, *x_TND.shape[2:])


def own_part(x_TND: torch.Tensor, tokens: slice, heads: tuple[int, int] | None, groups: int) -> torch.Tensor:
    """Some tokens of `[T, heads, ...]`, and of their heads those of groups [first, last)."""
    if heads is None or heads == (0, groups):
        return x_TND[tokens]
    of_group = x_TND.shape[1] // groups
    return x_TND[tokens, heads[0] * of_group : heads[1] * of_group]


def stored_part(x_RHD: torch.Tensor, rows: slice, rows_per_token: int) -> torch.Tensor:
    """Some rows of `[R, heads, ...]` as `[tokens, rows per token * heads, ...]`."""
    chosen = x_RHD[rows]
    if rows_per_token == 1:
        return chosen
    return chosen.view(chosen.shape[0] // rows_per_token, rows_per_token * chosen.shape[1], *chosen.shape[2:])


def queries_part(x: torch.Tensor, call: DeviceCall, groups: int) -> torch.Tensor:
    """The call's part of own `[T, heads, ...]`, or of guests' `[R, heads, ...]`."""
    if call.heads is None:
        return stored_part(x, call.queries, call.stored_rows_per_token)
    return own_part(x, call.queries, call.heads, groups)


def keys_part(x: torch.Tensor, call: DeviceCall, groups: int) -> torch.Tensor:
    """The call's part of own `[T, heads, D]`, or of the store `[R, heads, D]`."""
    if call.stored_rows_per_token:
        return stored_part(x, call.keys, call.stored_rows_per_token)
    return own_part(x, call.keys, call.heads, groups)
