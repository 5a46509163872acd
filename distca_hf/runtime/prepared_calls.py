"""Prepared calls: a kernel call as all layers that are alike make it.

The first of these layers finds out which part of each tensor the call reads and writes. The others take the same part
of theirs, and do not look at their tensors again.

Shape legend in `kernels.interface`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distca_hf.kernels.interface import AttentionSpec, Inputs, Room, Saved, before_queries
from distca_hf.kernels.row_kinds import MergeRows
from distca_hf.kernels.rows import prepare_merge
from distca_hf.kernels.views import transposed, view_of
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.runtime.call_views import heads_of, keys_of, queries_of
from distca_hf.runtime.device_routing import DeviceCall


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
