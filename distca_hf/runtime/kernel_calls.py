"""Kernel calls of one layer: finds the rows and heads that each call reads and writes, and runs its kernel.

The first of alike layers prepares each call: it finds out how the call's part of each tensor is laid out. The other
layers take the same parts without inspecting their tensors again. Each layer makes many views, and each costs
microseconds. So we make one only if it leaves something out. We always use `as_strided`: kernel functions fill the
processor's caches, and after one a torch function that was just used takes half the time of another.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.pieces`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Inputs,
    Kernel,
    MergeRows,
    Outputs,
    Room,
    Saved,
    before_queries,
    part,
)
from distca_hf.kernels.rows import prepare_merge
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.runtime.device_routing import DeviceCall
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients


def as_rows(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns each `[T, heads, D]` as `[T * groups, heads / groups, D]`, `[T, heads]` as `[T * groups, heads /
    groups]`."""
    if groups == 1:
        return tensors_TND
    return [x.view(x.shape[0] * groups, x.shape[1] // groups, *x.shape[2:]) for x in tensors_TND]


def rows_to_read(groups: int, *tensors_TND: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns `as_rows`, or copies if a tensor's strides forbid a view, which hooks of saved tensors may cause."""
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
    """Returns all rows of each local `[T, heads, ...]`, with the heads of the call's KV heads."""
    first, stop = call.heads
    if (first, stop) == (0, kv_heads):
        return tensors_TND
    shared = [x.shape[1] // kv_heads for x in tensors_TND]
    return [x[:, first * n : stop * n] for x, n in zip(tensors_TND, shared, strict=True)]


def _some_rows(tensors: Sequence[torch.Tensor], rows: slice) -> Sequence[torch.Tensor]:
    """Returns `x[rows]` of each; all have equally many rows."""
    return tensors if rows.stop - rows.start == tensors[0].shape[0] else [part(x, rows) for x in tensors]


def _as_tokens(tensors_RHD: Sequence[torch.Tensor], rows_per_token: int) -> Sequence[torch.Tensor]:
    """Returns each `[R, heads, D]` as `[tokens, rows per token * heads, D]`."""
    if rows_per_token == 1:
        return tensors_RHD
    return [x.view(x.shape[0] // rows_per_token, rows_per_token * x.shape[1], *x.shape[2:]) for x in tensors_RHD]


class PreparedForward:
    """A call of forward."""

    def __init__(
        self,
        call: DeviceCall,
        spec: AttentionSpec,
        kv_heads: int,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # queries, outputs and log-sum-exps of one alike layer
        of_keys: tuple[torch.Tensor, torch.Tensor],  # keys and values of that layer, local ones or the remote KV's
    ) -> None:
        self._call, self._kv_heads, self.spec = call, kv_heads, _spec_of_call(call, spec)
        q, out, lse = queries_of(call, kv_heads, *rows)
        self._q, self._out, self._lse_NT = map(view_of, (q, out, transposed(lse)), rows)
        self._k, self._v = map(view_of, keys_of(call, kv_heads, *of_keys), of_keys)
        self._has_some_heads = call.heads != (0, kv_heads)
        self._merge: MergeRows | None = None

    def inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
        return Inputs(self._q(q), self._k(k), self._v(v))

    def room(self, out: torch.Tensor, lse: torch.Tensor) -> Room:
        return Room(self._out(out), self._lse_NT(lse))

    def merge(self, out: torch.Tensor, lse: torch.Tensor, prefix_out: torch.Tensor, prefix_lse: torch.Tensor) -> None:
        """Merges outputs and log-sum-exps over a prefix into the layer's."""
        if self._has_some_heads:
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

    Attributes:
        dout, dq, dk, dv: functions that return the call's part of the tensor.
        dq_shape: shape of the part of dq.
    """

    def __init__(
        self,
        call: DeviceCall,
        spec: AttentionSpec,
        kv_heads: int,
        # Tensors of one alike layer.
        rows: QueryRows,
        dq: torch.Tensor,
        of_keys: Sequence[torch.Tensor],  # its keys, values and their gradients, local ones or the remote KV's
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
    """Returns how a call attends, in layers that attend like this."""
    return before_queries(spec, call.window_tokens) if call.kind is CallKind.PREFIX else spec


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.t()` of `[rows, columns]`."""
    (rows, columns), (of_row, of_column) = x.shape, x.stride()
    return x.as_strided((columns, rows), (of_column, of_row))


def view_of(part: torch.Tensor, whole: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function of tensors with the shape and strides of `whole`. It returns the same part of each that
    `part` is of `whole`."""
    if part is whole:
        return lambda x: x
    shape, strides, first = part.shape, part.stride(), part.storage_offset() - whole.storage_offset()
    return lambda x: x.as_strided(shape, strides, x.storage_offset() + first)


Prepared = TypeVar("Prepared", PreparedForward, PreparedBackward)


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCalls(Generic[Prepared]):
    """Calls of alike layers, forward or backward, that a layer has already prepared."""

    make: Callable[..., Prepared]
    kernel: Kernel
    spec: AttentionSpec
    kv_heads: int
    _made: dict[DeviceCall, Prepared] = field(default_factory=dict)

    def get(self, call: DeviceCall, *of_layer: object) -> Prepared:
        """Returns a call. The first layer to ask prepares it, with these tensors."""
        prepared = self._made.get(call)
        if prepared is None:
            prepared = self._made[call] = self.make(call, self.spec, self.kv_heads, *of_layer)
        return prepared


class ForwardCalls:
    """Forward kernels for one set of query rows, local or remote: queries, and room for outputs and log-sum-exps.
    Partial outputs are merged."""

    def __init__(
        self, prepared: PreparedCalls[PreparedForward], q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self._calls, self._kernel = prepared, prepared.kernel
        self._q, self._out, self._lse = q, out, lse
        self._prefix_parts: list[tuple[PreparedForward, Outputs]] = []

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            prepared = self._calls.get(call, (self._q, self._out, self._lse), (k, v))
            room = prepared.room(self._out, self._lse)
            self._kernel.forward(prepared.inputs(self._q, k, v), call.spans, prepared.spec, room)

    def attend_prefixes(self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, at_once: bool) -> None:
        """Attends to prefixes, and merges the results: `at_once` if local calls have written their parts, otherwise in
        `merge_prefixes`."""
        k, v = remote_kv.k, remote_kv.v
        for call in calls:
            prepared = self._calls.get(call, (self._q, self._out, self._lse), (k, v))
            inputs = prepared.inputs(self._q, k, v)
            results = self._kernel.forward(inputs, call.spans, prepared.spec)
            if at_once:
                prepared.merge(self._out, self._lse, *results)
            else:
                self._prefix_parts.append((prepared, results))

    def merge_prefixes(self) -> None:
        """Merges attention to prefixes, once local calls have written their parts."""
        for prepared, results in self._prefix_parts:
            prepared.merge(self._out, self._lse, *results)
        self._prefix_parts.clear()


def attend_whole(
    kernel: Kernel, call: DeviceCall, inputs: Inputs, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs `[T, N, V]` and log-sum-exps `[T, N]` of a call on all rows and heads. The kernel allocates
    them: it would inspect tensors that it is given, or copy into them."""
    out, lse_NT = kernel.forward(inputs, call.spans, spec)
    return out, transposed(lse_NT)


class BackwardCalls:
    """Backward kernels for one set of query rows, with room for the gradients of queries."""

    def __init__(self, prepared: PreparedCalls[PreparedBackward], rows: QueryRows, dq: torch.Tensor) -> None:
        self._calls, self._kernel, self._rows, self._dq = prepared, prepared.kernel, rows, dq
        self._prefix_parts: list[tuple[PreparedBackward, torch.Tensor]] = []

    def derive(
        self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Writes the gradients of the calls' queries, keys and values."""
        for call in calls:
            prepared = self._calls.get(call, self._rows, self._dq, (k, v, dk, dv))
            self._run(prepared, k, v, Gradients(prepared.dq(self._dq), prepared.dk(dk), prepared.dv(dv)))

    def derive_on_remote_kv(
        self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, gradients: RemoteKVGradients, adds: bool = False
    ) -> None:
        """Writes the calls' part of the gradients of queries, and of the remote KV. It is a part of the whole because
        output and log-sum-exp are from whole rows. If `adds`, `add_prefixes` adds gradients of queries later, when
        local calls have written theirs."""
        k, v, total_k, total_v = remote_kv.k, remote_kv.v, gradients.total.k, gradients.total.v
        for call in calls:
            prepared = self._calls.get(call, self._rows, self._dq, (k, v, total_k, total_v))
            dq = self._dq.new_empty(prepared.dq_shape) if adds else prepared.dq(self._dq)
            # A kernel writes gradients and cannot add. If another call writes the same rows, it gets its own memory.
            dk, dv = prepared.dk(total_k), prepared.dv(total_v)
            call_dk, call_dv = gradients.target(call, dk), gradients.target(call, dv)
            self._run(prepared, k, v, Gradients(dq, call_dk, call_dv))
            gradients.settle(call, call_dk, dk)
            gradients.settle(call, call_dv, dv)
            if adds:
                self._prefix_parts.append((prepared, dq))

    def add_prefixes(self) -> None:
        """Adds the parts of prefixes to the gradients of queries; called once, because backward has one chunk."""
        for prepared, dq in self._prefix_parts:
            prepared.dq(self._dq).add_(dq)

    def _run(self, prepared: PreparedBackward, k: torch.Tensor, v: torch.Tensor, gradients: Gradients) -> None:
        saved = prepared.saved(self._rows, k, v)
        self._kernel.backward(prepared.dout(self._rows.dout), saved, gradients, prepared.call.spans, prepared.spec)
