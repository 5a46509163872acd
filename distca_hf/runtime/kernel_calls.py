"""Kernel calls of a layer: which rows and heads each one reads, when it is computed, and where its results go.

Calls name groups of heads, as the plan divides them; here they get the KV heads of a layer. Local calls are divided in
two parts, some heads of each call. The early one is computed before rows of other ranks are needed, the late one while
results are sent back. Nothing is computed twice or summed for that, and one long document can be divided as well as
many short ones.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included, R rows as in
`planning.pieces`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from distca_hf.kernels.host_cost import RowMerge, part, transposed, view_of
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, before_queries
from distca_hf.kernels.rows import row_merge
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients


# Members of an enumeration are slow to look up, and each call asks for two of them.
LOCAL, PREFIX, REMOTE_QUERIES = CallKind.LOCAL, CallKind.PREFIX, CallKind.REMOTE_QUERIES


class ForwardCalls:
    """Forward kernels for one set of query rows, local or remote; partial outputs are merged by log-sum-exps.

    Args:
        prepared: calls as alike layers make them; those that are not there yet are put there.
    """

    def __init__(
        self,
        kernel: Kernel,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
        kv_heads: int,
        prepared: "dict[DeviceCall, ForwardCall]",
    ) -> None:
        self._kernel, self._q, self._out, self._lse = kernel, q, out, lse
        self._spec, self._kv_heads, self._prepared = spec, kv_heads, prepared
        self._prefix_parts: list[tuple[ForwardCall, Outputs]] = []

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            one = self._as_prepared(call, k, v)
            room = one.room(self._out, self._lse)
            self._kernel.forward(one.inputs(self._q, k, v), call.spans, one.spec, room)

    def attend_prefixes(self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, at_once: bool) -> None:
        """Attends to prefixes, and merges the results `at_once` if local calls have written their parts."""
        for call in calls:
            one = self._as_prepared(call, remote_kv.k, remote_kv.v)
            part_of_prefix = self._kernel.forward(one.inputs(self._q, remote_kv.k, remote_kv.v), call.spans, one.spec)
            if at_once:
                one.merge(self._out, self._lse, *part_of_prefix)
            else:
                self._prefix_parts.append((one, part_of_prefix))

    def merge_prefixes(self) -> None:
        """Adds attention to prefixes, once local calls have written their parts."""
        for one, part_of_prefix in self._prefix_parts:
            one.merge(self._out, self._lse, *part_of_prefix)
        self._prefix_parts.clear()

    def _as_prepared(self, call: DeviceCall, k: torch.Tensor, v: torch.Tensor) -> "ForwardCall":
        """Returns a call on such keys and values as alike layers make it."""
        one = self._prepared.get(call)
        if one is None:
            rows = self._q, self._out, self._lse
            one = self._prepared[call] = ForwardCall(call, self._spec, self._kv_heads, rows, (k, v))
        return one


class ForwardCall:
    """A call of forward, as all layers that are alike make it: the first one finds out what it reads and writes.

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
        self._merge: RowMerge | None = None

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
            self._merge = row_merge(out, lse, prefix_out, prefix_lse, self._call.queries.start)
        self._merge(out, lse, prefix_out, prefix_lse)


def attend_whole(
    kernel: Kernel, call: DeviceCall, inputs: Inputs, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs and log-sum-exps `[T, N]` of a call on all rows and heads. The kernel makes room for them: it
    would look closely at room that it is given, or copy into it."""
    out, lse_NT = kernel.forward(inputs, call.spans, spec)
    return out, transposed(lse_NT)


class QueryRows(NamedTuple):
    """What backward reads of query rows, local or remote: `[rows, heads, ...]`."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class BackwardCalls:
    """Backward kernels for one set of query rows.

    Args:
        rows: of this layer.
        dq: room for the gradients of its queries.
        prepared: calls as alike layers make them on rows that lie like these; those that are not there yet are put
            there.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: QueryRows,
        dq: torch.Tensor,
        spec: AttentionSpec,
        kv_heads: int,
        prepared: "dict[DeviceCall, BackwardCall]",
    ) -> None:
        self._kernel, self._rows, self._dq = kernel, rows, dq
        self._spec, self._kv_heads, self._prepared = spec, kv_heads, prepared
        self._prefix_parts: list[tuple[BackwardCall, torch.Tensor]] = []

    def derive(
        self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Writes the gradients of the calls' queries, keys and values."""
        for call in calls:
            one = self._as_prepared(call, k, v, dk, dv)
            self._run(one, k, v, Gradients(one.dq(self._dq), one.dk(dk), one.dv(dv)))

    def derive_remote_queries(
        self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, gradients: RemoteKVGradients
    ) -> None:
        """Writes the gradients of remote queries, and those of the remote KV."""
        for call in calls:
            one = self._on_remote_kv(call, remote_kv, gradients)
            self._derive_on_remote_kv(one, remote_kv, gradients, one.dq(self._dq))

    def derive_prefixes(self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, gradients: RemoteKVGradients) -> None:
        """Writes the part of prefixes in the gradients. Output and log-sum-exp of the whole row make it a part of the
        whole. Gradients of queries are added by `add_prefixes`, once local calls have written theirs."""
        for call in calls:
            one = self._on_remote_kv(call, remote_kv, gradients)
            dq = self._dq.new_empty(one.dq_shape)
            self._derive_on_remote_kv(one, remote_kv, gradients, dq)
            self._prefix_parts.append((one, dq))

    def add_prefixes(self) -> None:
        """Adds the parts of prefixes to the gradients of queries; once, as backward has one chunk."""
        for one, dq in self._prefix_parts:
            one.dq(self._dq).add_(dq)

    def _as_prepared(self, call: DeviceCall, *of_keys: torch.Tensor) -> "BackwardCall":
        """Returns a call on such keys, values and gradients as alike layers make it."""
        one = self._prepared.get(call)
        if one is None:
            one = BackwardCall(call, self._spec, self._kv_heads, self._rows, self._dq, of_keys)
            self._prepared[call] = one
        return one

    def _on_remote_kv(self, call: DeviceCall, remote_kv: RemoteKV, gradients: RemoteKVGradients) -> "BackwardCall":
        return self._as_prepared(call, remote_kv.k, remote_kv.v, gradients.total.k, gradients.total.v)

    def _derive_on_remote_kv(
        self, one: "BackwardCall", remote_kv: RemoteKV, gradients: RemoteKVGradients, dq: torch.Tensor
    ) -> None:
        # A kernel writes gradients, and cannot add to some. Where another call writes the same rows, it gets room.
        call, dk, dv = one.call, one.dk(gradients.total.k), one.dv(gradients.total.v)
        call_dk, call_dv = gradients.target(call, dk), gradients.target(call, dv)
        self._run(one, remote_kv.k, remote_kv.v, Gradients(dq, call_dk, call_dv))
        gradients.settle(call, call_dk, dk)
        gradients.settle(call, call_dv, dv)

    def _run(self, one: "BackwardCall", k: torch.Tensor, v: torch.Tensor, gradients: Gradients) -> None:
        saved = one.saved(self._rows, k, v)
        self._kernel.backward(one.dout(self._rows.dout), saved, gradients, one.call.spans, one.spec)


class BackwardCall:
    """A call of backward, as all layers that are alike make it: the first one finds out what it reads and writes.

    Args:
        spec: how these layers attend.
        rows, dq: of one of them.
        of_keys: its keys, values and their gradients, local ones or those of the remote KV.

    Attributes:
        spec: how the call attends.
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
    return before_queries(spec, call.window_tokens) if call.kind is PREFIX else spec


@dataclass(frozen=True)
class CallsOfHeads:
    """Calls of a layer; their `heads` count KV heads, not groups.

    Attributes:
        early, late: local calls.
        prefix: of each chunk.
    """

    early: tuple[DeviceCall, ...]
    late: tuple[DeviceCall, ...]
    prefix: tuple[tuple[DeviceCall, ...], ...]


def calls_of_heads(routing: DeviceRouting, kv_heads: int, *, comes: bool, leaves: bool) -> CallsOfHeads:
    """Returns the calls of a layer with `kv_heads`; made once per micro-batch.

    Args:
        comes: rows of other ranks are in flight while local calls run.
        leaves: results are sent back after the other calls.
    """
    key = kv_heads, comes, leaves
    if key not in routing.calls_of_heads:
        per_group = kv_heads // routing.rows_per_token
        local = with_kv_heads(routing.local, per_group)
        share = routing.late_share / 2 if comes else routing.late_share
        early, late = divide_heads(local, share) if leaves else (local, ())
        routing.calls_of_heads[key] = CallsOfHeads(
            early, late, tuple(with_kv_heads(chunk.prefix, per_group) for chunk in routing.chunks)
        )
    calls: CallsOfHeads = routing.calls_of_heads[key]
    return calls


def with_kv_heads(calls: Iterable[DeviceCall], heads_per_group: int) -> tuple[DeviceCall, ...]:
    """Returns local and prefix calls whose `heads` count KV heads instead of groups."""
    return tuple(
        replace(call, heads=(call.heads[0] * heads_per_group, call.heads[1] * heads_per_group)) for call in calls
    )


def divide_heads(calls: Iterable[DeviceCall], share: float) -> tuple[tuple[DeviceCall, ...], tuple[DeviceCall, ...]]:
    """Returns local calls in two parts, the second with about a share of their work."""
    #     call 0   | head 0 | head 1 | head 2 | head 3 |     early
    #     call 1   | head 0 | head 1 | head 2 : head 3 |     the last heads of the last calls are late
    early: list[DeviceCall] = []
    late: list[DeviceCall] = []
    calls = tuple(calls)
    missing = share * sum(call.pairs for call in calls)
    for call in reversed(calls):
        first, stop = call.heads
        of_head = call.pairs / (stop - first)
        taken = min(stop - first, max(0, round(missing / of_head))) if of_head else 0
        missing -= taken * of_head
        for chosen, heads in ((early, (first, stop - taken)), (late, (stop - taken, stop))):
            if heads[0] < heads[1]:
                chosen.insert(0, replace(call, heads=heads, pairs=round(of_head * (heads[1] - heads[0]))))
    return tuple(early), tuple(late)


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
    if call.kind is REMOTE_QUERIES:
        return _as_tokens(_some_rows(tensors, call.queries), call.rows_per_token)
    return _some_rows(heads_of(call, kv_heads, *tensors), call.queries)


def keys_of(call: DeviceCall, kv_heads: int, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the call's part of each local `[T, heads, D]`, or of each remote `[R, heads, D]`."""
    if call.kind is LOCAL:
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
