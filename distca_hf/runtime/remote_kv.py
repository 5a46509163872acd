"""Remote KV: keys and values of the document prefixes that a rank reads, in the order of `planning.remote_kv`, their
gradients, and the exchanges of both.

    owner ranks   rows of k, v ── KVDispatch ──▶ received rows ──▶ remote KV            computing ranks
                  dk, dv, summed ◀── KVGradCombine ── gradients of the remote KV

A dispatch is started and received chunk by chunk. A combine is started chunk by chunk, and received and finished once.
Gradients of keys are summed in max(fp32, their dtype), and in a fixed order. Local calls come first, then local rows
of the remote KV, then the computing ranks in order, chunk by chunk.

Shape legend in `kernels.interface`; rows are from `planning.pieces`.
"""

from dataclasses import dataclass

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.kernels.interface import AddRows, CopyRows, accumulation_dtype, some_rows
from distca_hf.kernels.rows import copy_rows, prepare_add, prepare_copy
from distca_hf.runtime.device_routing import ChunkRouting, DeviceCall, DeviceRouting


class PreparedKV:
    """Layout of rows of keys and values in alike layers, and the functions that copy and add them. `k` and `v` are
    `[rows, G, H]` and `[rows, G, V]` of one of these layers."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, routing: DeviceRouting) -> None:
        groups, dim = k.shape[1:]
        self.routing = routing
        self.width = row_width(k, v)  # elements of a row with keys and values side by side
        # Whether calls read keys and values of a row side by side. Then all heads of a token must have equal strides.
        self.are_side_by_side = routing.rows_per_token == 1 or groups == 1
        # Whether received rows, chunk by chunk, already are the remote KV; and whether kept rows are.
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
        # row   | k0 k0 k1 k1 | v0 v0 v1 v1 |     two groups: strides within a row are from k and v
        count, groups, dim, value_dim = rows.shape[0], self._groups, self._dim, self._value_dim
        values = rows.storage_offset() + groups * dim
        return (
            rows.as_strided((count, groups, dim), (self.width, dim, 1)),
            rows.as_strided((count, groups, value_dim), (self.width, value_dim, 1), values),
        )

    def to_send(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the rows to send, side by side."""
        sent = k.new_empty((self._num_sent, self.width))
        if self._send is None:
            self._send = prepare_copy((k, v), self.routing.send_rows, (sent,), None)
        self._send((k, v), (sent,))
        return sent

    def put(self, received: torch.Tensor, rows: slice, remote_kv: tuple[torch.Tensor, ...]) -> None:
        """Puts some received rows into the tensors of a remote KV, where calls read them."""
        came, bounds = some_rows(received, rows), (rows.start, rows.stop)
        copy = self._puts.get(bounds)
        if copy is None:
            places = some_rows(self.routing.received_to_remote_kv, rows)
            copy = self._puts[bounds] = prepare_copy((came,), None, remote_kv, places)
        copy((came,), remote_kv)

    def put_kept(self, kept: torch.Tensor, remote_kv: tuple[torch.Tensor, ...]) -> None:
        """Puts all rows received before into the tensors of a remote KV."""
        if self._put_kept is None:
            self._put_kept = prepare_copy((kept,), None, remote_kv, self.routing.kept_to_remote_kv)
        self._put_kept((kept,), remote_kv)

    def add(
        self, dk: torch.Tensor, dv: torch.Tensor, total_k: torch.Tensor, total_v: torch.Tensor, returned: torch.Tensor
    ) -> None:
        """Adds gradients to gradients of local keys and values.

        Args:
            dk, dv: contiguous, of local rows.
            total_k, total_v: of the remote KV.
            returned: `[sent rows, width]`, gradients that came back for sent rows.
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


@dataclass(eq=False, slots=True)
class RemoteKV:
    """Keys and values that this rank's calls read."""

    # `[remote-KV rows, G, H]`, `[remote-KV rows, G, V]`.
    k: torch.Tensor
    v: torch.Tensor
    # `[remote-KV rows, G * H + G * V]`, the memory of k and v if their rows lie side by side.
    both: torch.Tensor | None = None

    @classmethod
    def open(cls, k: torch.Tensor, v: torch.Tensor, received: torch.Tensor, prepared: PreparedKV) -> "RemoteKV":
        """Returns a remote KV with its local rows of `k` and `v`; `received` rows follow."""
        if not prepared.routing.remote_kv_rows:  # no call reads any; views cost host time
            return cls(k, v, both=received)
        if prepared.come_in_order:
            return cls(*prepared.apart(received), both=received)
        return cls._with_local_rows(k, v, prepared)

    @classmethod
    def of_kept(cls, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, prepared: PreparedKV) -> "RemoteKV":
        """Returns the whole remote KV from rows received before."""
        if not prepared.routing.remote_kv_rows:
            return cls(k, v, both=kept)
        kept = kept.contiguous()  # restores strides, which hooks of saved tensors may change
        if prepared.kept_in_order:
            return cls(*prepared.apart(kept), both=kept)
        remote_kv = cls._with_local_rows(k, v, prepared)
        prepared.put_kept(kept, remote_kv._tensors)
        return remote_kv

    @classmethod
    def _with_local_rows(cls, k: torch.Tensor, v: torch.Tensor, prepared: PreparedKV) -> "RemoteKV":
        remote_kv, routing = cls.empty(k, v, prepared, k.dtype), prepared.routing
        if routing.local_rows.shape[0]:
            copy_rows((k, v), routing.local_rows, remote_kv._tensors, routing.local_to_remote_kv)
        return remote_kv

    def put_received(self, received: torch.Tensor, rows: slice, prepared: PreparedKV) -> None:
        """Puts some received rows where calls read them."""
        if self.both is not received:
            prepared.put(received, rows, self._tensors)

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold keys and values."""
        return (self.k, self.v) if self.both is None else (self.both,)

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, prepared: PreparedKV, dtype: torch.dtype) -> "RemoteKV":
        count = prepared.routing.remote_kv_rows
        if prepared.are_side_by_side:
            both = k.new_empty((count, prepared.width), dtype=dtype)
            return cls(*prepared.apart(both), both=both)
        k, v = (x.new_empty((count, *x.shape[1:]), dtype=dtype) for x in (k, v))
        return cls(k, v)

    def rows_to_send(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns some rows as they are sent."""
        if self.both is None:
            return side_by_side(self.k, self.v, rows).to(dtype)
        chosen = some_rows(self.both, rows) if isinstance(rows, slice) else self.both.index_select(0, rows)
        return chosen.to(dtype)


class RemoteKVGradients:
    """Gradients of a remote KV. If two calls read the same rows, the smaller one adds to the gradients that the larger
    one writes. If more calls read them, all add, in max(fp32, dtype)."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, prepared: PreparedKV) -> None:
        self._routing, self._dtype = prepared.routing, k.dtype
        self._to_add: list[tuple[torch.Tensor, torch.Tensor]] = []
        summed = self._routing.sums_remote_kv
        self.total = RemoteKV.empty(k, v, prepared, accumulation_dtype(k.dtype) if summed else k.dtype)
        if summed:
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
    """Dispatch of keys and values to the ranks that read them."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        prepared: PreparedKV,
        *,
        sends: bool,  # whether any rank sends keys; otherwise there is nothing to receive
        # Rows of an earlier dispatch, to put where calls read them; then nothing is sent.
        received: torch.Tensor | None = None,
    ) -> None:
        self.sends, self._prepared = sends and received is None, prepared
        self._started: list[Exchange] = []
        self._receives = sends
        if received is None:
            received = k.new_empty((prepared.routing.received_to_remote_kv.shape[0] if sends else 0, prepared.width))
        self.received = received  # `[received rows, G * H + G * V]`; complete chunk by chunk
        if self.sends:
            self._sent = prepared.to_send(k, v)

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        if self.sends:
            self._started.append(transport.exchange(chunk.keys.dispatch(self._sent, self.received, f"{where}, keys")))

    def receive(self, chunk: ChunkRouting, remote_kv: RemoteKV) -> None:
        """Waits for a chunk, and puts its rows where calls read them."""
        if self.sends:
            self._started.pop(0).wait()
            if not self._started:  # rows in flight keep the tensor that holds them
                del self._sent
        if self._receives:
            remote_kv.put_received(self.received, chunk.keys.receive, self._prepared)


class KVGradCombine:
    """Combine of key and value gradients on the owner ranks."""

    def __init__(self, gradients: RemoteKVGradients, k: torch.Tensor, prepared: PreparedKV) -> None:
        self._gradients, self._prepared = gradients, prepared
        self._started: list[Exchange] = []
        self._returned = k.new_empty((prepared.routing.send_rows.shape[0], prepared.width))

    def start(self, chunk: ChunkRouting, transport: Transport, where: str) -> None:
        """Sends the complete gradients of a chunk."""
        if self._prepared.routing.exchanges:
            rows = self._gradients.rows_to_send(chunk.keys.receive)
            asked = chunk.keys.combine(rows, self._returned, f"{where}, key gradients")
            self._started.append(transport.exchange(asked))

    def receive(self) -> None:
        while self._started:
            self._started.pop(0).wait()

    def finish(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds gradients of the remote KV and of other ranks to gradients of local rows."""
        #     dk, dv       local rows; local calls have written them
        #     + total      of the remote KV, at rows that this rank copied into it
        #     + returned   of each other rank, at rows that were sent to it
        total = self._gradients.total
        self._prepared.add(dk, dv, total.k, total.v, self._returned)
