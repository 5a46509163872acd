"""Remote KV: keys and values of the document prefixes that a rank reads, in document order, their gradients, and the
exchanges of both.

    owner ranks   rows of k, v ── KVDispatch ──▶ received rows ──▶ remote KV            servers
                  dk, dv, summed ◀── KVGradCombine ── gradients of the remote KV

A dispatch is started chunk by chunk and received chunk by chunk. A combine is started chunk by chunk, and
received and finished once. Gradients of keys are summed in max(fp32, their dtype), and in a fixed order. First come
local calls, then local rows of the remote KV, then chunk by chunk the servers by rank.

Keys and values of a row lie side by side, `[G * H | G * V]`, as they are sent. So rows that were received in order are
the remote KV, and its gradients are sent as they were written. Where groups of heads that belong to one token must lie
side by side, too, keys and values lie apart.

Shape legend in `kernels.interface`; rows are those of `planning.pieces`.
"""

from dataclasses import dataclass

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.host_cost import some_rows
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.kernels.rows import add_rows, copy_rows
from distca_hf.runtime.device_routing import ChunkRouting, DeviceCall, DeviceRouting


@dataclass(eq=False, slots=True)
class RemoteKV:
    """`[remote-KV rows, G, H]` and `[remote-KV rows, G, V]`; `beside` holds both if they lie side by side."""

    k: torch.Tensor
    v: torch.Tensor
    beside: torch.Tensor | None = None

    @classmethod
    def open(cls, k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, routing: DeviceRouting) -> "RemoteKV":
        """Returns a remote KV with the local rows that it holds of `k` and `v`; `received` rows follow."""
        if not routing.remote_kv_rows:  # no call reads any; views cost the host
            return cls(k, v, beside=received)
        if routing.come_in_order and _side_by_side(k, routing):
            return cls(*apart(received, k, v), beside=received)
        return cls._with_local_rows(k, v, routing)

    @classmethod
    def of_kept(cls, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, routing: DeviceRouting) -> "RemoteKV":
        """Returns the whole remote KV from rows that were received before."""
        if not routing.remote_kv_rows:
            return cls(k, v, beside=kept)
        if routing.kept_in_order and _side_by_side(k, routing):
            return cls(*apart(kept, k, v), beside=kept)
        remote_kv = cls._with_local_rows(k, v, routing)
        remote_kv._put(routing.kept_to_remote_kv, kept)
        return remote_kv

    @classmethod
    def _with_local_rows(cls, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> "RemoteKV":
        remote_kv = cls.empty(k, v, routing, k.dtype)
        if len(routing.local_rows):
            copy_rows((k, v), routing.local_rows, remote_kv._tensors, routing.local_to_remote_kv)
        return remote_kv

    def put_received(self, received: torch.Tensor, rows: slice, routing: DeviceRouting) -> None:
        """Puts some received rows where they are read."""
        if self.beside is not received:
            self._put(some_rows(routing.received_to_remote_kv, rows), some_rows(received, rows))

    def _put(self, places: torch.Tensor, received: torch.Tensor) -> None:
        copy_rows((received,), None, self._tensors, places)

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold keys and values."""
        return (self.k, self.v) if self.beside is None else (self.beside,)

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting, dtype: torch.dtype) -> "RemoteKV":
        """Returns room for all remote-KV rows."""
        if _side_by_side(k, routing):
            beside = k.new_empty((routing.remote_kv_rows, row_width(k, v)), dtype=dtype)
            return cls(*apart(beside, k, v), beside=beside)
        k, v = (x.new_empty((routing.remote_kv_rows, *x.shape[1:]), dtype=dtype) for x in (k, v))
        return cls(k, v)

    def rows_to_send(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns some rows as they are sent."""
        if self.beside is None:
            return side_by_side(self.k, self.v, rows).to(dtype)
        chosen = some_rows(self.beside, rows) if isinstance(rows, slice) else self.beside.index_select(0, rows)
        return chosen.to(dtype)


class RemoteKVGradients:
    """Gradients of a remote KV. Where two calls read the same rows, the smaller one adds to the gradients that the
    larger one writes. Where more calls read them, all add, in max(fp32, dtype)."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> None:
        self._routing, self._dtype = routing, k.dtype
        self._to_add: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.total = RemoteKV.empty(k, v, routing, accumulation_dtype(k.dtype) if routing.sums_remote_kv else k.dtype)
        if routing.sums_remote_kv:
            self.total.k.zero_()
            self.total.v.zero_()

    def target(self, call: DeviceCall, total: torch.Tensor) -> torch.Tensor:
        """Returns where a call writes its part of some rows of the gradients."""
        if self._routing.sums_remote_kv or call.adds:
            return torch.empty(total.shape, dtype=self._dtype, device=total.device)
        return total

    def settle(self, call: DeviceCall, part: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the part that a call wrote, now or in `complete`."""
        if self._routing.sums_remote_kv:
            total += part
        elif call.adds:
            self._to_add.append((part, total))

    def complete(self) -> None:
        """Adds the parts that wait, once all calls have written theirs."""
        for part, total in self._to_add:
            total += part
        self._to_add.clear()

    def rows_to_send(self, rows: slice) -> torch.Tensor:
        """Returns the gradients of some received rows, in their order."""
        routing = self._routing
        if routing.come_in_order:
            return self.total.rows_to_send(rows, self._dtype)
        return self.total.rows_to_send(some_rows(routing.received_to_remote_kv, rows), self._dtype)


class KVDispatch:
    """Dispatch of keys and values to the servers that read them.

    Args:
        sends: whether any rank sends keys; otherwise there is nothing to receive.
        received: rows of an earlier dispatch; they are put where they are read, and nothing is sent.

    Attributes:
        sends: whether keys are sent now.
        received: `[received rows, G * H + G * V]`; complete chunk by chunk.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        routing: DeviceRouting,
        *,
        sends: bool,
        received: torch.Tensor | None = None,
    ) -> None:
        self.sends, self._routing = sends and received is None, routing
        self._started: list[Exchange] = []
        self._receives = sends
        if received is None:
            received = k.new_empty((routing.received_to_remote_kv.shape[0] if sends else 0, row_width(k, v)))
        self.received = received
        if self.sends:
            self._sent = side_by_side(k, v, routing.send_rows)

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Starts the exchange of a chunk."""
        if self.sends:
            self._started.append(transport.exchange(chunk.keys.dispatch(self._sent, self.received, f"{where}, keys")))

    def receive(self, chunk: ChunkRouting, remote_kv: RemoteKV) -> None:
        """Waits for a chunk, and puts its rows where they are read."""
        if self.sends:
            self._started.pop(0).wait()
        if self._receives:
            remote_kv.put_received(self.received, chunk.keys.receive, self._routing)


class KVGradCombine:
    """Combine of key and value gradients on the owner ranks."""

    def __init__(self, gradients: RemoteKVGradients, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> None:
        self._gradients, self._routing = gradients, routing
        self._started: list[Exchange] = []
        self._returned = k.new_empty((len(routing.send_rows), row_width(k, v)))

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the gradients of a chunk, which are complete."""
        if self._routing.exchanges:
            rows = self._gradients.rows_to_send(chunk.keys.receive)
            asked = chunk.keys.combine(rows, self._returned, f"{where}, key gradients")
            self._started.append(transport.exchange(asked))

    def receive(self) -> None:
        """Waits for all chunks."""
        for exchange in self._started:
            exchange.wait()

    def finish(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds gradients of the remote KV and of other servers to those of local rows."""
        #     dk, dv       local rows; local calls have written them
        #     + total      of the remote KV, at rows that this rank copied into it
        #     + returned   of each server, at rows that were sent to it
        total = self._gradients.total
        for gradient, local, part in zip((dk, dv), (total.k, total.v), apart(self._returned, dk, dv), strict=True):
            add_rows(gradient.flatten(1), local.flatten(1), part.flatten(1), self._routing.sums)


def _side_by_side(k: torch.Tensor, routing: DeviceRouting) -> bool:
    """Returns whether calls can read keys beside their values: heads of all groups of a token need one stride."""
    return routing.rows_per_token == 1 or k.shape[1] == 1


def side_by_side(k: torch.Tensor, v: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Returns some rows of `[rows, G, H]` and `[rows, G, V]` as `[chosen, G * H + G * V]`."""
    if isinstance(rows, slice):
        return torch.cat([k[rows].flatten(1), v[rows].flatten(1)], dim=1)
    both = k.new_empty((rows.shape[0], row_width(k, v)))
    copy_rows((k, v), rows, (both,), None)
    return both


def apart(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of the key part and the value part of rows, shaped as the rows of `k` and `v`."""
    # row   | k0 k0 k1 k1 | v0 v0 v1 v1 |     two groups: strides within a row are those of k and v
    (groups, dim), value_dim = k.shape[1:], v.shape[2]
    width, count = groups * dim, rows.shape[0]
    stride = rows.stride(0)
    return (
        rows.as_strided((count, groups, dim), (stride, dim, 1)),
        rows.as_strided((count, groups, value_dim), (stride, value_dim, 1), rows.storage_offset() + width),
    )


def row_width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Returns the elements of one row of keys and values side by side."""
    return k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
