"""Layers of a micro-batch that are alike: what the host finds out for the first of them holds for all.

A model has few kinds of layers, and each of them makes a call in every pass. Looking things up, comparing shapes and
choosing how rows are copied costs the host more than these copies cost the device.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from distca_hf.kernels.interface import AttentionSpec, Kernel
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting
from distca_hf.runtime.kernel_calls import (
    BackwardCall,
    CallsOfHeads,
    ForwardCall,
    QueryRows,
    calls_of_heads,
    rows_to_read,
)
from distca_hf.runtime.layer_kinds import LayerKind
from distca_hf.runtime.remote_kv import KeyRows


# Dtypes, shapes, strides and devices of queries, keys and values; how they attend.
LayerKey = Hashable


@dataclass(frozen=True, eq=False, slots=True)
class AlikeLayers:
    """Layers whose tensors have the same dtypes, shapes, strides and devices, and that attend alike.

    Attributes:
        spec: how they attend; without a window that no document of the micro-batch is longer than.
        kernel: attends.
        kind: the layers with their mask.
        calls: kernel calls of forward.
        whole: the only local call of forward, if it reads and writes all rows and heads, and no results come from
            other ranks.
        forward_rows, backward_rows: rows of keys and values that travel.
        forward_calls: calls of forward, put here by the first layer.
        backward_calls: those of backward, by how they attend and how query rows lie.
    """

    spec: AttentionSpec
    kernel: Kernel
    kind: LayerKind
    calls: CallsOfHeads
    whole: DeviceCall | None
    forward_rows: KeyRows
    backward_rows: KeyRows
    forward_calls: dict[DeviceCall, ForwardCall] = field(default_factory=dict)
    backward_calls: dict[Hashable, dict[DeviceCall, BackwardCall]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, kernel: Kernel, kind: LayerKind
    ) -> "AlikeLayers":
        """Returns the layers that are like one with these tensors."""
        forward, backward = kind.plan.forward, kind.plan.backward
        rows, kv_heads, _ = k_TGH.shape
        calls = calls_of_heads(forward, kv_heads, comes=True, leaves=forward.queries is not None)
        whole = calls.early[0] if len(calls.early) == 1 and forward.queries is None else None
        all_rows = slice(0, rows)
        if whole is not None and (whole.queries, whole.keys, whole.heads) != (all_rows, all_rows, (0, kv_heads)):
            whole = None
        forward_rows = _key_rows(k_TGH, v_TGV, forward)
        backward_rows = forward_rows if backward is forward else _key_rows(k_TGH, v_TGV, backward)
        return cls(spec, kernel, kind, calls, whole, forward_rows, backward_rows)

    def backward_calls_on(self, rows: QueryRows, spec: AttentionSpec) -> dict[DeviceCall, BackwardCall]:
        """Returns the calls of backward on rows that lie like these. Outputs that were saved for backward may lie
        otherwise than forward left them: hooks of saved tensors and compiled graphs bring them back as they like."""
        key = spec, *[x.stride() for x in rows]
        return self.backward_calls.setdefault(key, {})


def _key_rows(k_TGH: torch.Tensor, v_TGV: torch.Tensor, routing: DeviceRouting) -> KeyRows:
    k, v = rows_to_read(routing.rows_per_token, k_TGH, v_TGV)
    return KeyRows(k, v, routing)
