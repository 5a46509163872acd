"""Prepared KV: rows of keys and values in layers that are alike.

How these rows lie is found out once. So is how they are copied where they are sent, and where they arrive. Either
costs the host more than the copies cost the device.

Keys and values of a row lie side by side, `[G * H | G * V]`, as they are sent. So rows that were received in order are
the remote KV, and its gradients are sent as they were written. Where groups of heads that belong to one token must lie
side by side, too, keys and values lie apart.

Shape legend in `kernels.interface`; rows are those of `planning.pieces`.
"""

import torch

from distca_hf.kernels.row_kinds import AddRows, CopyRows
from distca_hf.kernels.rows import copy_rows, prepare_add, prepare_copy
from distca_hf.kernels.views import some_rows
from distca_hf.runtime.device_routing import DeviceRouting


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
