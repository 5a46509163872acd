"""Kernel calls of one layer: runs them on its tensors, and says where their results go.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Iterable

import torch

from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Outputs, transposed
from distca_hf.runtime.alike_layers import AlikeLayers
from distca_hf.runtime.device_routing import DeviceCall
from distca_hf.runtime.prepared_calls import PreparedBackward, PreparedForward, QueryRows
from distca_hf.runtime.remote_kv import RemoteKV, RemoteKVGradients


class ForwardCalls:
    """Forward kernels for one set of query rows, local or remote; partial outputs are merged by log-sum-exps.

    Args:
        layers: those that are like this one. Calls that no layer has prepared are prepared here.
        q: queries of this layer.
        out, lse: room for its outputs and log-sum-exps.
    """

    def __init__(self, layers: AlikeLayers, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._layers, self._kernel, self._prepared_calls = layers, layers.kernel, layers.prepared_forward
        self._q, self._out, self._lse = q, out, lse
        self._prefix_parts: list[tuple[PreparedForward, Outputs]] = []

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            prepared = self._prepared(call, k, v)
            room = prepared.room(self._out, self._lse)
            self._kernel.forward(prepared.inputs(self._q, k, v), call.spans, prepared.spec, room)

    def attend_prefixes(self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, at_once: bool) -> None:
        """Attends to prefixes, and merges the results `at_once` if local calls have written their parts."""
        for call in calls:
            prepared = self._prepared(call, remote_kv.k, remote_kv.v)
            part = self._kernel.forward(prepared.inputs(self._q, remote_kv.k, remote_kv.v), call.spans, prepared.spec)
            if at_once:
                prepared.merge(self._out, self._lse, *part)
            else:
                self._prefix_parts.append((prepared, part))

    def merge_prefixes(self) -> None:
        """Adds attention to prefixes, once local calls have written their parts."""
        for prepared, part in self._prefix_parts:
            prepared.merge(self._out, self._lse, *part)
        self._prefix_parts.clear()

    def _prepared(self, call: DeviceCall, k: torch.Tensor, v: torch.Tensor) -> PreparedForward:
        """Returns a call on such keys and values, prepared now if this layer is the first one."""
        prepared = self._prepared_calls.get(call)
        if prepared is None:
            layers, rows = self._layers, (self._q, self._out, self._lse)
            prepared = PreparedForward(call, layers.spec, layers.kv_heads, rows, (k, v))
            self._prepared_calls[call] = prepared
        return prepared


def attend_whole(
    kernel: Kernel, call: DeviceCall, inputs: Inputs, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs `[T, N, V]` and log-sum-exps `[T, N]` of a call on all rows and heads. The kernel makes room for
    them: it would look closely at room that it is given, or copy into it."""
    out, lse_NT = kernel.forward(inputs, call.spans, spec)
    return out, transposed(lse_NT)


class BackwardCalls:
    """Backward kernels for one set of query rows.

    Args:
        layers: those that are like this one. Calls that no layer has prepared are prepared here.
        rows: of this layer.
        dq: room for the gradients of its queries.
        spec: how backward attends.
    """

    def __init__(self, layers: AlikeLayers, rows: QueryRows, dq: torch.Tensor, spec: AttentionSpec) -> None:
        self._kernel, self._rows, self._dq = layers.kernel, rows, dq
        self._spec, self._kv_heads = spec, layers.kv_heads
        self._prepared_calls = layers.prepared_backward(rows, spec)
        self._prefix_parts: list[tuple[PreparedBackward, torch.Tensor]] = []

    def derive(
        self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Writes the gradients of the calls' queries, keys and values."""
        for call in calls:
            prepared = self._prepared(call, k, v, dk, dv)
            self._run(prepared, k, v, Gradients(prepared.dq(self._dq), prepared.dk(dk), prepared.dv(dv)))

    def derive_remote_queries(
        self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, gradients: RemoteKVGradients
    ) -> None:
        """Writes the gradients of remote queries, and those of the remote KV."""
        for call in calls:
            prepared = self._on_remote_kv(call, remote_kv, gradients)
            self._derive_on_remote_kv(prepared, remote_kv, gradients, prepared.dq(self._dq))

    def derive_prefixes(self, calls: Iterable[DeviceCall], remote_kv: RemoteKV, gradients: RemoteKVGradients) -> None:
        """Writes the part of prefixes in the gradients. Output and log-sum-exp of the whole row make it a part of the
        whole. Gradients of queries are added by `add_prefixes`, once local calls have written theirs."""
        for call in calls:
            prepared = self._on_remote_kv(call, remote_kv, gradients)
            dq = self._dq.new_empty(prepared.dq_shape)
            self._derive_on_remote_kv(prepared, remote_kv, gradients, dq)
            self._prefix_parts.append((prepared, dq))

    def add_prefixes(self) -> None:
        """Adds the parts of prefixes to the gradients of queries; once, as backward has one chunk."""
        for prepared, dq in self._prefix_parts:
            prepared.dq(self._dq).add_(dq)

    def _prepared(self, call: DeviceCall, *of_keys: torch.Tensor) -> PreparedBackward:
        """Returns a call on such keys, values and gradients, prepared now if this layer is the first one."""
        prepared = self._prepared_calls.get(call)
        if prepared is None:
            prepared = PreparedBackward(call, self._spec, self._kv_heads, self._rows, self._dq, of_keys)
            self._prepared_calls[call] = prepared
        return prepared

    def _on_remote_kv(self, call: DeviceCall, remote_kv: RemoteKV, gradients: RemoteKVGradients) -> PreparedBackward:
        return self._prepared(call, remote_kv.k, remote_kv.v, gradients.total.k, gradients.total.v)

    def _derive_on_remote_kv(
        self, prepared: PreparedBackward, remote_kv: RemoteKV, gradients: RemoteKVGradients, dq: torch.Tensor
    ) -> None:
        # A kernel writes gradients, and cannot add to some. Where another call writes the same rows, it gets room.
        call, dk, dv = prepared.call, prepared.dk(gradients.total.k), prepared.dv(gradients.total.v)
        call_dk, call_dv = gradients.target(call, dk), gradients.target(call, dv)
        self._run(prepared, remote_kv.k, remote_kv.v, Gradients(dq, call_dk, call_dv))
        gradients.settle(call, call_dk, dk)
        gradients.settle(call, call_dv, dv)

    def _run(self, prepared: PreparedBackward, k: torch.Tensor, v: torch.Tensor, gradients: Gradients) -> None:
        saved = prepared.saved(self._rows, k, v)
        self._kernel.backward(prepared.dout(self._rows.dout), saved, gradients, prepared.call.spans, prepared.spec)
