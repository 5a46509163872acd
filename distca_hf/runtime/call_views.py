"""Call views: the rows and heads of a layer's tensors that a kernel call reads or writes.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.pieces`.
"""

from collections.abc import Sequence

import torch

from distca_hf.kernels.views import part
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.runtime.device_routing import DeviceCall


def as_rows(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns each `[T, heads, D]` as `[T * groups, heads / groups, D]`, `[T, heads]` as `[T * groups, heads /
    groups]`."""
    if groups == 1:
        return tensors_TND
    return [x.view(x.shape[0] * groups, x.shape[1] // groups, *x.shape[2:]) for x in tensors_TND]


def rows_to_read(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns `as_rows`, or copies where heads of a token lie too far apart: hooks of saved tensors may bring one back
    so."""
    if groups == 1:
        return tensors_TND
    return [x.reshape(x.shape[0] * groups, x.shape[1] // groups, *x.shape[2:]) for x in tensors_TND]


def queries_of(call: DeviceCall, kv_heads: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the call's part of each local `[T, heads, ...]`, or of each remote `[R, heads, ...]`."""
    if call.kind is CallKind.REMOTE_QUERIES:
        return _as_tokens(_some_rows(tensors, call.queries), call.rows_per_token)
    return _some_rows(heads_of(call, kv_heads, *tensors), call.queries)


def keys_of(call: DeviceCall, kv_heads: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the call's part of each local `[T, heads, D]`, or of each remote `[R, heads, D]`."""
    if call.kind is CallKind.LOCAL:
        return _some_rows(heads_of(call, kv_heads, *tensors), call.keys)
    return _as_tokens(_some_rows(tensors, call.keys), call.rows_per_token)


def heads_of(call: DeviceCall, kv_heads: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns all rows of each local `[T, heads, ...]`, with the heads that belong to the KV heads of the call."""
    first, stop = call.heads
    if (first, stop) == (0, kv_heads):
        return tensors_TND
    shared = [x.shape[1] // kv_heads for x in tensors_TND]
    return [x[:, first * n : stop * n] for x, n in zip(tensors_TND, shared, strict=True)]


def _some_rows(tensors: Sequence[torch.Tensor], rows: slice) -> Sequence[torch.Tensor]:
    """Returns `x[rows]` of each; all have as many rows."""
    return tensors if rows.stop - rows.start == tensors[0].shape[0] else [part(x, rows) for x in tensors]


def _as_tokens(tensors_RHD: Sequence[torch.Tensor], rows_per_token: int) -> Sequence[torch.Tensor]:
    """Returns each `[R, heads, D]` as `[tokens, rows per token * heads, D]`."""
    if rows_per_token == 1:
        return tensors_RHD
    return [x.view(x.shape[0] // rows_per_token, rows_per_token * x.shape[1], *x.shape[2:]) for x in tensors_RHD]
