"""Prepared calls: kernel calls and copies of rows that are prepared once for all layers that are alike.

The first of these layers finds out which rows and heads of each tensor a call reads and writes, and how rows to send
and received rows are copied. The other layers do the same without looking at their tensors again.

A row's keys and values are adjacent, `[G * H | G * V]`, as they are sent. So rows that were received in order are the
remote KV, and its gradients are sent as they were written. If head groups of one token must be adjacent as well, keys
and values are stored separately.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.pieces`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distca_hf.kernels.interface import (
    AddRows,
    AttentionSpec,
    CopyRows,
    Inputs,
    MergeRows,
    Room,
    Saved,
    before_queries,
    part,
    some_rows,
    transposed,
    view_of,
)
from distca_hf.kernels.rows import copy_rows, prepare_add, prepare_copy, prepare_merge
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting


def as_rows(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns each `[T, heads, D]` as `[T * groups, heads / groups, D]`, `[T, heads]` as `[T * groups, heads /
    groups]`."""
    if groups == 1:
        return tensors_TND
    return [x.view(x.shape[0] * groups, x.shape[1] // groups, *x.shape[2:]) for x in tensors_TND]


def rows_to_read(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns `as_rows`, or copies if the strides of a tensor forbid a view, as hooks of saved tensors may cause."""
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


class PreparedForward:
    """A call of forward.

    Args:
        spec: how these layers attend.
        rows: queries, outputs and log-sum-exps of one of them.
        of_keys: its keys and values, local ones or those of the remote KV.

    Attributes:
        spec: how the call attends.
    """

    def __init__(
        self,
        call: DeviceCall,
        spec: AttentionSpec,
        kv_heads: int,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        of_keys: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._call, self._kv_heads, self.spec = call, kv_heads, _spec_of_call(call, spec)
        q, out, lse = queries_of(call, kv_heads, *rows)
        self._q, self._out, self._lse_NT = map(view_of, (q, out, transposed(lse)), rows)
        self._k, self._v = map(view_of, keys_of(call, kv_heads, *of_keys), of_keys)
        self._merge: MergeRows | None = None

    def inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
        """Returns what the call reads."""
        return Inputs(self._q(q), self._k(k), self._v(v))

    def room(self, out: torch.Tensor, lse: torch.Tensor) -> Room:
        """Returns where the call writes."""
        return Room(self._out(out), self._lse_NT(lse))

    def merge(self, out: torch.Tensor, lse: torch.Tensor, prefix_out: torch.Tensor, prefix_lse: torch.Tensor) -> None:
        """Adds outputs and log-sum-exps over a prefix alone to those of the layer."""
        out, lse = heads_of(self._call, self._kv_heads, out, lse)
        if self._merge is None:
            self._merge = prepare_merge(out, lse, prefix_out, prefix_lse, self._call.queries.start)
        self._merge(out, lse, prefix_out, prefix_lse)


class QueryRows(NamedTuple):
    """What backward reads of query rows, local or remote: `[rows, heads, ...]`."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class PreparedBackward:
    """A call of backward.

    Args:
        spec: how these layers attend.
        rows, dq: of one of them.
        of_keys: its keys, values and their gradients, local ones or those of the remote KV.

    Attributes:
        call, spec: the call, and how it attends.
        dout, dq, dk, dv: return the call's part of such a tensor.
        dq_shape: of its part.
    """

    def __init__(
        self,
        call: DeviceCall,
        spec: AttentionSpec,
        kv_heads: int,
        rows: QueryRows,
        dq: torch.Tensor,
        of_keys: Sequence[torch.Tensor],
    ) -> None:
        self.call, self.spec = call, _spec_of_call(call, spec)
        *parts, lse = queries_of(call, kv_heads, rows.dout, rows.q, rows.out, dq, rows.lse)
        wholes = rows.dout, rows.q, rows.out, dq
        self.dout, self._q, self._out, self.dq = map(view_of, parts, wholes)
        self._lse_NT, self.dq_shape = view_of(transposed(lse), rows.lse), parts[-1].shape
        self._k, self._v, self.dk, self.dv = map(view_of, keys_of(call, kv_heads, *of_keys), of_keys)

    def saved(self, rows: QueryRows, k: torch.Tensor, v: torch.Tensor) -> Saved:
        """Returns what the call reads."""
        return Saved(self._q(rows.q), self._k(k), self._v(v), self._out(rows.out), self._lse_NT(rows.lse))


def _spec_of_call(call: DeviceCall, spec: AttentionSpec) -> AttentionSpec:
    """Returns how a call of layers attends that attend like this."""
    return before_queries(spec, call.window_tokens) if call.kind is CallKind.PREFIX else spec


class PreparedKV:
    """How rows of keys and values lie in alike layers, and the functions that copy and add them.

    Args:
        k, v: `[rows, G, H]`, `[rows, G, V]` of one of these layers.
        routing: of forward, or of backward.

    Attributes:
        width: elements of a row of keys and values side by side.
        are_side_by_side: whether calls read keys and values of a row side by side. Then the strides of all heads of a
            token must be alike.
        come_in_order: whether rows are the remote KV as they are received, chunk by chunk.
        kept_in_order: whether rows are the remote KV as they were kept.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> None:
        groups, dim = k.shape[1:]
        self.routing, self.width = routing, row_width(k, v)
        self.are_side_by_side = routing.rows_per_token == 1 or groups == 1
        self.come_in_order = routing.come_in_order and self.are_side_by_side
        self.kept_in_order = routing.kept_in_order and self.are_side_by_side
        self._groups, self._dim, self._value_dim = groups, dim, v.shape[2]
        self._num_sent = routing.send_rows.shape[0]
        self._send: CopyRows | None = None
        self._puts: dict[tuple[int, int], CopyRows] = {}
        self._put_kept: CopyRows | None = None
        self._adds: tuple[AddRows, AddRows] | None = None

    def apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the key part and the value part of rows side by side, shaped as rows of k and of v."""
        # row   | k0 k0 k1 k1 | v0 v0 v1 v1 |     two groups: strides within a row are those of k and v
        count, groups, dim, value_dim = rows.shape[0], self._groups, self._dim, self._value_dim
        values = rows.storage_offset() + groups * dim
        return (
            rows.as_strided((count, groups, dim), (self.width, dim, 1)),
            rows.as_strided((count, groups, value_dim), (self.width, value_dim, 1), values),
        )

    def to_send(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the rows that are sent, side by side."""
        sent = k.new_empty((self._num_sent, self.width))
        if self._send is None:
            self._send = prepare_copy((k, v), self.routing.send_rows, (sent,), None)
        self._send((k, v), (sent,))
        return sent

    def put(self, received: torch.Tensor, rows: slice, remote_kv: tuple[torch.Tensor, ...]) -> None:
        """Puts some received rows where calls read them, in the tensors of a remote KV."""
        came, bounds = some_rows(received, rows), (rows.start, rows.stop)
        copy = self._puts.get(bounds)
        if copy is None:
            places = some_rows(self.routing.received_to_remote_kv, rows)
            copy = self._puts[bounds] = prepare_copy((came,), None, remote_kv, places)
        copy((came,), remote_kv)

    def put_kept(self, kept: torch.Tensor, remote_kv: tuple[torch.Tensor, ...]) -> None:
        """Puts all rows that were received before where calls read them."""
        if self._put_kept is None:
            self._put_kept = prepare_copy((kept,), None, remote_kv, self.routing.kept_to_remote_kv)
        self._put_kept((kept,), remote_kv)

    def add(
        self, dk: torch.Tensor, dv: torch.Tensor, total_k: torch.Tensor, total_v: torch.Tensor, returned: torch.Tensor
    ) -> None:
        """Adds gradients to those of local keys and values.

        Args:
            dk, dv: contiguous, of local rows.
            total_k, total_v: of the remote KV.
            returned: `[sent rows, width]`, those that came back for rows that were sent.
        """
        sums = self.routing.sums
        if not sums.rows.shape[0]:
            return
        returned_k, returned_v = self.apart(returned)
        if self._adds is None:
            self._adds = prepare_add(dk, total_k, returned_k, sums), prepare_add(dv, total_v, returned_v, sums)
        add_k, add_v = self._adds
        add_k(dk, total_k, returned_k)
        add_v(dv, total_v, returned_v)


def side_by_side(k: torch.Tensor, v: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Returns some rows of `[rows, G, H]` and `[rows, G, V]` as `[chosen, G * H + G * V]`."""
    if isinstance(rows, slice):
        return torch.cat([k[rows].flatten(1), v[rows].flatten(1)], dim=1)
    both = k.new_empty((rows.shape[0], row_width(k, v)))
    copy_rows((k, v), rows, (both,), None)
    return both


def row_width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Returns the elements of one row of keys and values side by side."""
    return k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
