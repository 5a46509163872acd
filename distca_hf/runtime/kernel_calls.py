"""Kernel calls of a layer whose queries are the rows of some tensors: own ones, or guests.

Shape legend in `kernels.interface`.
"""

from collections.abc import Iterable, Sequence

import torch

from distca_hf.kernels.interface import AttentionSpec, Kernel, accumulation_dtype, without_mask
from distca_hf.kernels.merge import merge
from distca_hf.runtime.maps import DeviceCall
from distca_hf.runtime.rows import heads_of, keys_of, queries_of
from distca_hf.runtime.store import Store, StoreGradients
from distca_hf.runtime.views import transposed


class ForwardCalls:
    """Forward."""

    def __init__(
        self, kernel: Kernel, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, spec: AttentionSpec, kv_heads: int
    ) -> None:
        self._kernel, self._q, self._out, self._lse = kernel, q, out, lse
        self._spec, self._without_mask, self._kv_heads = spec, without_mask(spec), kv_heads
        self._far: list[tuple[DeviceCall, tuple[torch.Tensor, torch.Tensor]]] = []

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            q, out, lse = queries_of(call, self._kv_heads, self._q, self._out, self._lse)
            call_k, call_v = keys_of(call, self._kv_heads, k, v)
            self._kernel.forward(q, call_k, call_v, call.spans, self._spec, out, transposed(lse))

    def attend_far(self, calls: Iterable[DeviceCall], store: Store, at_once: bool) -> None:
        """Attends to prefixes, and adds that `at_once` if own calls have written their parts."""
        for call in calls:
            [q] = queries_of(call, self._kv_heads, self._q)
            k, v = keys_of(call, self._kv_heads, store.k, store.v)
            self._far.append((call, self._kernel.forward(q, k, v, call.spans, self._without_mask)))
            if at_once:
                self.merge_far()

    def merge_far(self) -> None:
        """Adds attention to prefixes, once own calls have written their parts."""
        for call, far in self._far:
            out, lse = heads_of(call, self._kv_heads, self._out, self._lse)
            merge(out, lse, *far, call.queries.start)
        self._far.clear()


class BackwardCalls:
    """Backward."""

    def __init__(
        self,
        kernel: Kernel,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        spec: AttentionSpec,
        kv_heads: int,
    ) -> None:
        self._kernel, self._of_queries, self._dq = kernel, (dout, q, out, lse), dq
        self._spec, self._without_mask, self._kv_heads = spec, without_mask(spec), kv_heads
        self._far: list[tuple[DeviceCall, torch.Tensor]] = []

    def derive(
        self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Writes the gradients of the calls' queries, keys and values."""
        for call in calls:
            self._run(call, keys_of(call, self._kv_heads, k, v, dk, dv), self._dq_of(call))

    def derive_stored(self, calls: Iterable[DeviceCall], store: Store, gradients: StoreGradients) -> None:
        """The same with keys in the store."""
        for call in calls:
            self._run_stored(call, store, gradients, self._dq_of(call))

    def derive_far(self, calls: Iterable[DeviceCall], store: Store, gradients: StoreGradients) -> None:
        """The part of prefixes. Output and log-sum-exp of the whole row make it a part of the whole gradient; that of
        queries is added by `add_far`, once own calls have written theirs."""
        for call in calls:
            dq = torch.empty_like(self._dq_of(call), memory_format=torch.contiguous_format)
            self._run_stored(call, store, gradients, dq)
            self._far.append((call, dq))

    def add_far(self) -> None:
        """Adds what prefixes contribute to the gradients of queries: once, as backward has one leg."""
        for call, dq in self._far:
            self._dq_of(call).add_(dq)

    def _dq_of(self, call: DeviceCall) -> torch.Tensor:
        """Where the gradients of the call's queries belong."""
        [dq] = queries_of(call, self._kv_heads, self._dq)
        return dq

    def _run_stored(self, call: DeviceCall, store: Store, gradients: StoreGradients, dq: torch.Tensor) -> None:
        total = gradients.total
        k, v, dk, dv = keys_of(call, self._kv_heads, store.k, store.v, total.k, total.v)
        call_dk, call_dv = gradients.target(call, dk), gradients.target(call, dv)
        self._run(call, (k, v, call_dk, call_dv), dq)
        gradients.settle(call, call_dk, dk)
        gradients.settle(call, call_dv, dv)

    def _run(self, call: DeviceCall, of_keys: Sequence[torch.Tensor], dq: torch.Tensor) -> None:
        k, v, dk, dv = of_keys
        dout, q, out, lse = queries_of(call, self._kv_heads, *self._of_queries)
        spec = self._spec if call.kind.is_causal else self._without_mask
        self._kernel.backward(dout, q, k, v, out, transposed(lse), call.spans, spec, dq, dk, dv)


def empty_rows(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for outputs `[rows, heads, V]` and log-sum-exps `[rows, heads]`."""
    shape = q.shape[:2]
    return q.new_empty((*shape, v.shape[2])), q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
