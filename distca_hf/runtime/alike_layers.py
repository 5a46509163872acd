"""Layers of a micro-batch that are alike: what the host finds out for the first of them holds for all.

A model has few kinds of layers, and each of them makes a call in every pass. Looking things up, comparing shapes and
choosing how rows are copied costs the host more than these copies cost the device.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from distca_hf.kernels.interface import AttentionSpec, Kernel
from distca_hf.runtime.call_views import rows_to_read
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting
from distca_hf.runtime.layer_calls import LayerCalls
from distca_hf.runtime.layer_kinds import LayerKind
from distca_hf.runtime.prepared_calls import PreparedBackward, PreparedForward, QueryRows
from distca_hf.runtime.prepared_kv import PreparedKV


# Dtypes, shapes, strides and devices of queries, keys and values; how they attend.
LayerKey = Hashable


@dataclass(frozen=True, eq=False, slots=True)
class AlikeLayers:
    """Layers whose tensors have the same dtypes, shapes, strides and devices, and that attend alike.

    Attributes:
        spec: how they attend; without a window that no document of the micro-batch is longer than.
        kernel: attends.
        kind: the layers with their mask.
        kv_heads: heads of keys and values.
        calls: kernel calls of forward.
        whole_call: the only local call of forward, if it reads and writes all rows and heads, and no results come from
            other ranks; else None.
        forward_kv, backward_kv: how rows of keys and values travel.
        prepared_forward: kernel calls of forward, prepared by the first layer.
    """

    spec: AttentionSpec
    kernel: Kernel
    kind: LayerKind
    kv_heads: int
    calls: LayerCalls
    whole_call: DeviceCall | None
    forward_kv: PreparedKV
    backward_kv: PreparedKV
    prepared_forward: dict[DeviceCall, PreparedForward] = field(default_factory=dict)
    _prepared_backward: dict[Hashable, dict[DeviceCall, PreparedBackward]] = field(default_factory=dict)
    _backward_calls: dict[bool, LayerCalls] = field(default_factory=dict)

    @classmethod
    def of(
        cls, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, kernel: Kernel, kind: LayerKind
    ) -> "AlikeLayers":
        """Returns the layers that are like one with these tensors."""
        forward, backward = kind.plan.forward, kind.plan.backward
        rows, kv_heads, _ = k_TGH.shape
        calls = LayerCalls.of(forward, kv_heads, rows_come=True, results_leave=forward.queries is not None)
        whole_call = calls.early[0] if len(calls.early) == 1 and forward.queries is None else None
        everything = slice(0, rows), slice(0, rows), (0, kv_heads)
        if whole_call is not None and (whole_call.queries, whole_call.keys, whole_call.heads) != everything:
            whole_call = None
        forward_kv = _prepared_kv(k_TGH, v_TGV, forward)
        backward_kv = forward_kv if backward is forward else _prepared_kv(k_TGH, v_TGV, backward)
        return cls(spec, kernel, kind, kv_heads, calls, whole_call, forward_kv, backward_kv)

    def backward_calls(self, rows_come: bool) -> LayerCalls:
        """Returns the kernel calls of backward.

        Args:
            rows_come: whether rows of other ranks are in flight while early calls run.
        """
        calls = self._backward_calls.get(rows_come)
        if calls is None:
            routing = self.kind.plan.backward
            calls = LayerCalls.of(routing, self.kv_heads, rows_come=rows_come, results_leave=routing.exchanges)
            self._backward_calls[rows_come] = calls
        return calls

    def prepared_backward(self, rows: QueryRows, spec: AttentionSpec) -> dict[DeviceCall, PreparedBackward]:
        """Returns the kernel calls of backward on rows that lie like these, prepared by the first layer. Outputs may
        have other strides than forward gave them: hooks of saved tensors and compiled graphs do not keep strides.

        Args:
            spec: how backward attends.
        """
        key = spec, *[x.stride() for x in rows]
        return self._prepared_backward.setdefault(key, {})


def _prepared_kv(k_TGH: torch.Tensor, v_TGV: torch.Tensor, routing: DeviceRouting) -> PreparedKV:
    k, v = rows_to_read(routing.rows_per_token, k_TGH, v_TGV)
    return PreparedKV(k, v, routing)
