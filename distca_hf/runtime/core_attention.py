"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward     keys out ─┬─ own calls ─┬─ fill store ── store calls                             1 exchange
                          └── flying ───┘
    backward    keys out ─┬─ own calls ─┬─ fill store ── store calls ── gradients home ── sum    2 exchanges
                          └── flying ───┘                                                        1 if rows were kept

If queries move, too, they leave right behind the keys, and their outputs come back at the end: two exchanges more in
either direction.

Every rank makes the same exchanges in the same order, also with no tokens, no labels or nothing to send. Only a plan
in which no rank sends anything makes none, on all ranks alike.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included. Inside, tensors are `[rows,
heads, dim]`: a row is a token, or one group of heads of a token if the plan divides heads.
"""

from collections.abc import Iterable

import torch

from distca_hf.errors import PlanError
from distca_hf.kernels.interface import Kernel, accumulation_dtype
from distca_hf.runtime.combine import send_home, sum_at_home
from distca_hf.runtime.dispatch import apart, fill_store, row_width, start_keys
from distca_hf.runtime.finite import check_finite
from distca_hf.runtime.maps import DeviceCall, Maps
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.queries import bring_home, send_queries
from distca_hf.runtime.room import check_room


def attend(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, scale: float, plan: LivePlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every row to the causal prefix of its document, wherever that prefix is held.

    Returns:
        out: `[T, N, V]`, zero in padding rows.
        lse: `[T, N]` log-sum-exp of the scaled scores in max(fp32, dtype), zero in padding rows.
        received: `[elements]` keys and values that came from other ranks.

    Raises:
        PlanError: the tensors have other row counts than the plan, or heads that do not divide as it says, or what
            they need does not fit the device.
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    plan.agree()
    where, maps = plan.begin_forward(), plan.maps
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV)
    q, k, v = _as_rows((q_TNH, k_TGH, v_TGV), plan, where)
    check_finite(plan, where, query=q_TNH, key=k_TGH, value=v_TGV)
    if plan.forward_calls == 1:
        check_room(plan, where, q, k, v)
    k, v = _in_canonical_order(maps, k, v)
    exchange = start_keys(k, v, plan, where) if maps.exchanges else None
    flight = send_queries([q], maps.queries, plan.transport, where) if maps.queries is not None else None
    (q,) = _in_canonical_order(maps, q) if flight is None else flight.at_server

    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    out[maps.task_rows :] = 0
    lse[maps.task_rows :] = 0
    _attend_calls(maps.own_calls, kernel, q, k, v, scale, out, lse)
    if flight is not None:
        flight.land()
    received = exchange.wait() if exchange is not None else k.new_empty((0, row_width(k, v)))
    if maps.store_rows:
        _attend_calls(maps.store_calls, kernel, q, *fill_store(k, v, received, plan), scale, out, lse)
    if maps.queries is not None:
        out, lse = bring_home([out, lse], maps.num_rows, maps.queries, plan.transport, where)
    else:
        out, lse = _in_layout_order(maps, out, lse)
    out_TNV = out.view(*q_TNH.shape[:2], v.shape[2])
    check_finite(plan, where, output=out_TNV)
    return out_TNV, lse.view(q_TNH.shape[:2]), received.flatten()


def attend_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    received: torch.Tensor | None,
    scale: float,
    plan: LivePlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from those of the output; `received` None means: fetch the keys again."""
    where, maps = plan.begin_backward(), plan.maps
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV)
    q, k, v, dout, out = _as_rows((q_TNH, k_TGH, v_TGV, dout_TNV, out_TNV), plan, where)
    lse = lse_TN.view(q.shape[:2])
    check_finite(plan, where, output_gradient=dout_TNV)
    k, v = _in_canonical_order(maps, k, v)
    exchange = start_keys(k, v, plan, where) if maps.exchanges and received is None else None
    flight = None
    if maps.queries is not None:  # what is under way is filled in by flight.land()
        flight = send_queries([q, dout, out, lse], maps.queries, plan.transport, where)
        q, dout, out, lse = flight.at_server
    else:
        q, dout, out, lse = _in_canonical_order(maps, q, dout, out, lse)

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq[maps.task_rows :] = 0
    dk[maps.own_rows_stop :] = 0
    dv[maps.own_rows_stop :] = 0
    derive = _Derivation(kernel, dout, q, out, lse, dq, scale, plan.config.deterministic)
    for call in maps.own_calls:
        derive(call, k[call.keys], v[call.keys], dk[call.keys], dv[call.keys])
    if exchange is not None:
        received = exchange.wait()
    if flight is not None:
        flight.land()
    if maps.exchanges or maps.store_rows:
        come = k.new_empty(0) if received is None else received
        stores = fill_store(k, v, come.view(-1, row_width(k, v)), plan)
        dstores = _store_gradients(derive, *stores, maps)
        returned = send_home(*dstores, k.dtype, plan, where) if maps.exchanges else k.new_empty((0, row_width(k, v)))
        for gradient, dstore, part in zip((dk, dv), dstores, apart(returned, k, v), strict=True):
            sum_at_home(gradient, dstore, part, maps)
    if maps.queries is not None:
        (dq,) = bring_home([dq], maps.num_rows, maps.queries, plan.transport, where)
    else:
        (dq,) = _in_layout_order(maps, dq)
    dk, dv = _in_layout_order(maps, dk, dv)
    return dq.view(q_TNH.shape), dk.view(k_TGH.shape), dv.view(v_TGV.shape)


class _Derivation:
    """Backward of kernel calls whose queries are the rows of some canonical tensors."""

    def __init__(
        self,
        kernel: Kernel,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        scale: float,
        deterministic: bool,
    ) -> None:
        self._kernel, self._of_queries, self._lse, self._dq = kernel, (dout, q, out), lse, dq
        self._scale, self._deterministic = scale, deterministic

    def __call__(self, call: DeviceCall, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes the gradients of the call's queries, keys and values."""
        dout, q, out = (_heads_of_tokens(x[call.queries], call) for x in self._of_queries)
        lse, dq = _heads_of_tokens(self._lse[call.queries], call).T, _heads_of_tokens(self._dq[call.queries], call)
        k, v, dk, dv = (_heads_of_tokens(x, call) for x in (k, v, dk, dv))
        self._kernel.backward(dout, q, k, v, out, lse, call.spans, self._scale, self._deterministic, dq, dk, dv)


def _attend_calls(
    calls: Iterable[DeviceCall],
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Runs kernel calls whose keys are rows of `k` and `v`; writes their rows of `out` and `lse`."""
    for call in calls:
        call_q, call_out, call_lse = (_heads_of_tokens(x[call.queries], call) for x in (q, out, lse))
        call_k, call_v = (_heads_of_tokens(x[call.keys], call) for x in (k, v))
        kernel.forward(call_q, call_k, call_v, call.spans, scale, call_out, call_lse.T)


def _store_gradients(
    derive: _Derivation, store_k: torch.Tensor, store_v: torch.Tensor, maps: Maps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the stored keys and values, from all calls that read them."""
    if not maps.store_sums:
        dstore_k, dstore_v = torch.empty_like(store_k), torch.empty_like(store_v)
        for call in maps.store_calls:
            keys = call.keys
            derive(call, store_k[keys], store_v[keys], dstore_k[keys], dstore_v[keys])
        return dstore_k, dstore_v
    dtype = accumulation_dtype(store_k.dtype)
    dstore_k, dstore_v = torch.zeros_like(store_k, dtype=dtype), torch.zeros_like(store_v, dtype=dtype)
    for call in maps.store_calls:
        k, v = store_k[call.keys], store_v[call.keys]
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        derive(call, k, v, dk, dv)
        dstore_k[call.keys] += dk
        dstore_v[call.keys] += dv
    return dstore_k, dstore_v


def _heads_of_tokens(rows: torch.Tensor, call: DeviceCall) -> torch.Tensor:
    """`[rows, heads, ...]` as `[tokens, rows per token * heads, ...]`, a view."""
    if call.rows_per_token == 1:
        return rows
    return rows.view(rows.shape[0] // call.rows_per_token, call.rows_per_token * rows.shape[1], *rows.shape[2:])


def _as_rows(tensors: Iterable[torch.Tensor], plan: LivePlan, where: str) -> tuple[torch.Tensor, ...]:
    """`[T, heads, dim]` as `[rows, heads of a row, dim]`; views of contiguous tensors."""
    maps = plan.maps
    rows = []
    for x in tensors:
        if x.device != maps.send_rows.device:
            raise PlanError(
                f"rank {plan.transport.rank}, {where}: attention got tensors on {x.device}, the plan of this batch is "
                f"on {maps.send_rows.device}; keep the model where the loader puts batches (its argument device)"
            )
        if x.shape[0] * maps.rows_per_token != maps.num_rows:
            raise PlanError(
                f"rank {plan.transport.rank}, {where}: attention got {x.shape[0]} rows, the plan of this batch has "
                f"{maps.num_rows // maps.rows_per_token}; feed the batch to the model as the loader made it"
            )
        if x.shape[1] % maps.rows_per_token:
            raise PlanError(
                f"rank {plan.transport.rank}, {where}: the plan divides heads in {maps.rows_per_token} groups, the "
                f"model has {x.shape[1]} of them; plan with the number of its KV heads, or a divisor of it"
            )
        rows.append(x.reshape(maps.num_rows, x.shape[1] // maps.rows_per_token, x.shape[2]))
    return tuple(rows)


def _in_canonical_order(maps: Maps, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows in canonical order; the very tensors if they are so already."""
    if maps.row_order is None:
        return tensors
    return tuple(x.index_select(0, maps.row_order) for x in tensors)


def _in_layout_order(maps: Maps, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Canonical rows in layout order; the very tensors if they are so already."""
    if maps.canonical_of is None:
        return tensors
    return tuple(x.index_select(0, maps.canonical_of) for x in tensors)
