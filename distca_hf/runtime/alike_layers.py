"""Alike layers: lets alike layers of a micro-batch share what the host finds out for the first of them.

A model has few kinds of layers, and every layer makes a call in each pass. Looking things up, comparing shapes and
choosing how to copy rows would take the host longer than the copies take the device.

The local calls of a layer are divided into two parts by heads. The early part runs before rows of other ranks are
needed, the late part while results are sent back. This needs no repeated work and no sums, and divides one long
document as well as many short ones.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import torch

from distca_hf.config import KernelName
from distca_hf.kernels.interface import AttentionSpec, Kernel, cut_at_chunks
from distca_hf.kernels.registry import Operands, choose_kernel, kernel_name
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting
from distca_hf.runtime.kernel_calls import PreparedBackward, PreparedCalls, PreparedForward, QueryRows, rows_to_read
from distca_hf.runtime.layer_kinds import LayerKind, LayerKinds
from distca_hf.runtime.posted import Posted
from distca_hf.runtime.remote_kv import PreparedKV
from distca_hf.runtime.retention import Kept


@dataclass(frozen=True)
class LayerCalls:
    """Local and prefix calls of a layer. Their `heads` count KV heads; calls of a routing count head groups."""

    early: tuple[DeviceCall, ...]
    late: tuple[DeviceCall, ...]
    prefix: tuple[tuple[DeviceCall, ...], ...]  # prefix calls of each chunk

    @classmethod
    def of(cls, routing: DeviceRouting, kv_heads: int, *, rows_come: bool, results_leave: bool) -> "LayerCalls":
        """Returns the calls of a layer with `kv_heads` KV heads.

        Args:
            rows_come: whether rows of other ranks are in flight while early calls run.
            results_leave: whether results are sent back after the prefix calls; only then are some calls late.
        """
        per_group = kv_heads // routing.rows_per_token
        local = with_kv_heads(routing.local, per_group)
        share = routing.late_share / 2 if rows_come else routing.late_share
        early, late = divide_calls(local, share) if results_leave else (local, ())
        return cls(early, late, tuple(with_kv_heads(chunk.prefix, per_group) for chunk in routing.chunks))


def with_kv_heads(calls: Iterable[DeviceCall], heads_per_group: int) -> tuple[DeviceCall, ...]:
    """Returns local and prefix calls with `heads` in KV heads instead of groups."""
    return tuple(
        replace(call, heads=(call.heads[0] * heads_per_group, call.heads[1] * heads_per_group)) for call in calls
    )


def divide_calls(calls: Iterable[DeviceCall], share: float) -> tuple[tuple[DeviceCall, ...], tuple[DeviceCall, ...]]:
    """Divides local calls into two parts, the second with about `share` of their work."""
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


# Dtypes, shapes, strides and devices of queries, keys and values; how they attend.
LayerKey = Hashable


@dataclass(frozen=True, eq=False, slots=True)
class AlikeLayers:
    """Layers whose tensors have the same dtypes, shapes, strides and devices, and that attend alike."""

    spec: AttentionSpec  # how they attend; without a window if no document of the micro-batch is longer than it
    kernel: Kernel
    kind: LayerKind
    kv_heads: int
    calls: LayerCalls  # kernel calls of forward
    # The only local call of forward if it reads and writes all rows and heads, and no results come from other ranks;
    # otherwise None.
    whole_call: DeviceCall | None
    # How rows of keys and values travel.
    forward_kv: PreparedKV
    backward_kv: PreparedKV
    forward_calls: PreparedCalls[PreparedForward]  # kernel calls of forward, prepared by the first layer
    nothing: Kept  # empty tensors, for a layer that keeps nothing from other ranks
    _prepared_backward: dict[Hashable, PreparedCalls[PreparedBackward]] = field(default_factory=dict)
    _backward_calls: dict[bool, LayerCalls] = field(default_factory=dict)

    @classmethod
    def of(
        cls, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, kernel: Kernel, kind: LayerKind
    ) -> "AlikeLayers":
        """Returns the layers alike to one with these tensors."""
        forward, backward = kind.plan.forward, kind.plan.backward
        rows, kv_heads, _ = k_TGH.shape
        calls = LayerCalls.of(forward, kv_heads, rows_come=True, results_leave=forward.queries is not None)
        whole_call = calls.early[0] if len(calls.early) == 1 and forward.queries is None else None
        everything = slice(0, rows), slice(0, rows), (0, kv_heads)
        if whole_call is not None and (whole_call.queries, whole_call.keys, whole_call.heads) != everything:
            whole_call = None
        forward_kv = _prepared_kv(k_TGH, v_TGV, forward)
        backward_kv = forward_kv if backward is forward else _prepared_kv(k_TGH, v_TGV, backward)
        forward_calls = PreparedCalls(PreparedForward, kernel, cut_at_chunks(spec), kv_heads)
        nothing = kind.retention.nothing(k_TGH)
        return cls(spec, kernel, kind, kv_heads, calls, whole_call, forward_kv, backward_kv, forward_calls, nothing)

    def backward_calls(self, rows_come: bool) -> LayerCalls:
        """Returns the kernel calls of backward, see `LayerCalls.of`."""
        calls = self._backward_calls.get(rows_come)
        if calls is None:
            routing = self.kind.plan.backward
            calls = LayerCalls.of(routing, self.kv_heads, rows_come=rows_come, results_leave=routing.exchanges)
            self._backward_calls[rows_come] = calls
        return calls

    def prepared_backward(self, rows: QueryRows, spec: AttentionSpec) -> PreparedCalls[PreparedBackward]:
        """Returns the kernel calls of backward on rows laid out like these, prepared by the first layer. Outputs may
        have other strides than in forward: hooks of saved tensors and compiled graphs do not keep strides."""
        key = spec, *[x.stride() for x in rows]
        prepared = self._prepared_backward.get(key)
        if prepared is None:
            prepared = self._prepared_backward[key] = PreparedCalls(
                PreparedBackward, self.kernel, cut_at_chunks(spec), self.kv_heads
            )
        return prepared


def _prepared_kv(k_TGH: torch.Tensor, v_TGV: torch.Tensor, routing: DeviceRouting) -> PreparedKV:
    k, v = rows_to_read(routing.rows_per_token, k_TGH, v_TGV)
    return PreparedKV(k, v, routing)


class LayerLookup:
    """Kinds of layers, kernels and alike layers of one planned micro-batch."""

    def __init__(self, kinds: LayerKinds, kernel: KernelName, rank_name: str, posted: Posted | None = None) -> None:
        self.kinds, self.posted = kinds, posted
        self._kernel, self._rank_name = kernel, rank_name
        self._alike: dict[LayerKey, AlikeLayers] = {}
        self._kernels: dict[torch.dtype, Kernel] = {}

    def alike(
        self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, where: str
    ) -> AlikeLayers:
        """Checks that these tensors fit the plan, and returns the layers alike to one with them.

        Raises:
            PlanError, UnsupportedAttentionError: as `kernel`; or the batch was planned without their mask.
        """
        q, k, v = q_TNH, k_TGH, v_TGV
        shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
        key = q.dtype, k.dtype, v.dtype, shapes, strides, q.device, k.device, v.device, spec
        layers = self._alike.get(key)
        if layers is None:
            spec = self.kinds.spec(spec)
            kernel = self.kernel(q, k, v, spec, where)
            layers = self._alike[key] = AlikeLayers.of(k, v, spec, kernel, self.kinds.of(spec))
        return layers

    def kernel(
        self,
        q_TNH: torch.Tensor,
        k_TGH: torch.Tensor,
        v_TGV: torch.Tensor,
        spec: AttentionSpec,
        where: str = "no layer yet",
    ) -> Kernel:
        """Checks that these tensors fit the plan, and returns the kernel for them. Raises PlanError if they do not
        fit; UnsupportedAttentionError if no kernel exists for them."""
        q, k, v = q_TNH, k_TGH, v_TGV
        for x in (q, k, v):
            self.kinds.check_fit(x, f"{self._rank_name}, {where}")
        kernel = choose_kernel(self._kernel, Operands.of(q, k, v), cut_at_chunks(spec))
        self._kernels.setdefault(q.dtype, kernel)
        return kernel if self.posted is None else self.posted.measured(kernel, spec)

    @property
    def attention_dtype(self) -> torch.dtype | None:
        """Dtype that attention computes in; None before the first call."""
        return next(iter(self._kernels), None)

    @property
    def kernel_name(self) -> str:
        """Name of the kernel that attends; "none" before the first call."""
        return next((kernel_name(kernel) for kernel in self._kernels.values()), "none")
