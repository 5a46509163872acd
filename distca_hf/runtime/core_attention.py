"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward     keys out ─┬─ own calls ─┬─ fill store ── store calls                             1 exchange
                          └── flying ───┘
    backward    keys out ─┬─ own calls ─┬─ fill store ── store calls ── gradients home ── sum    2 exchanges
                          └── flying ───┘                                                        1 if rows were kept

If queries move, too, they leave right behind the keys, and their outputs come back at the end: two exchanges more in
either direction.

Every rank makes the same exchanges in the same order, also with no tokens, no labels or nothing to send. Only a plan
in which no rank sends anything makes none, on all ranks alike.

Shape legend in `kernels.interface`; T counts the rows of this rank, padding included.
"""

from collections.abc import Callable

import torch

from distca_hf.errors import PlanError
from distca_hf.kernels.interface import Spans, accumulation_dtype
from distca_hf.runtime.combine import send_home, sum_at_home
from distca_hf.runtime.dispatch import fill_store, start_keys, unpack_rows
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.queries import bring_home, send_queries


# Gradients of one kernel call: query rows, keys, values, spans, and where the gradients of keys and values go.
Derive = Callable[[slice, torch.Tensor, torch.Tensor, Spans, torch.Tensor, torch.Tensor], None]


def attend(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, scale: float, plan: LivePlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every row to the causal prefix of its document, wherever that prefix is held.

    Returns:
        out: `[T, N, V]`, zero in padding rows.
        lse: `[N, T]` log-sum-exp of the scaled scores in max(fp32, dtype), zero in padding rows.
        received: `[received, G * (H + V)]` keys and values that came from other ranks.

    Raises:
        PlanError: the tensors have other row counts than the plan.
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    plan.agree()
    where, maps = plan.begin_forward(), plan.maps
    _check_rows(q_TNH, plan, where)
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV)
    k_TGH, v_TGV = _in_canonical_order(maps, k_TGH, v_TGV)
    exchange = start_keys(k_TGH, v_TGV, plan, where) if maps.exchanges else None
    flight = send_queries([q_TNH], maps.queries, plan.transport, where) if maps.queries is not None else None
    (q_TNH,) = _in_canonical_order(maps, q_TNH) if flight is None else flight.at_server

    out_TNV = q_TNH.new_empty((*q_TNH.shape[:2], v_TGV.shape[2]))
    lse_NT = q_TNH.new_empty((q_TNH.shape[1], q_TNH.shape[0]), dtype=accumulation_dtype(q_TNH.dtype))
    out_TNV[maps.task_rows :] = 0
    lse_NT[:, maps.task_rows :] = 0
    for call in maps.calls:
        if not call.from_store:
            rows = call.queries
            kernel.forward(q_TNH[rows], k_TGH[rows], v_TGV[rows], call.spans, scale, out_TNV[rows], lse_NT[:, rows])
    if flight is not None:
        flight.land()
    received = exchange.wait() if exchange is not None else k_TGH.new_empty((0, _row_width(k_TGH, v_TGV)))
    if maps.store_rows:
        store_k, store_v = unpack_rows(fill_store(k_TGH, v_TGV, received, plan), k_TGH.shape[1:], v_TGV.shape[1:])
        for call in maps.calls:
            if call.from_store:
                rows, keys = call.queries, call.keys
                kernel.forward(
                    q_TNH[rows], store_k[keys], store_v[keys], call.spans, scale, out_TNV[rows], lse_NT[:, rows]
                )
    if maps.queries is not None:
        out_TNV, lse_TN = bring_home([out_TNV, lse_NT.T], maps.num_rows, maps.queries, plan.transport, where)
        return out_TNV, lse_TN.T.contiguous(), received
    if maps.canonical_of is not None:
        out_TNV, lse_NT = out_TNV.index_select(0, maps.canonical_of), lse_NT.index_select(1, maps.canonical_of)
    return out_TNV, lse_NT, received


def attend_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_NT: torch.Tensor,
    received: torch.Tensor | None,
    scale: float,
    plan: LivePlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from those of the output; `received` None means: fetch the keys again."""
    where, maps = plan.begin_backward(), plan.maps
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV)
    k_TGH, v_TGV = _in_canonical_order(maps, k_TGH, v_TGV)
    exchange = start_keys(k_TGH, v_TGV, plan, where) if maps.exchanges and received is None else None
    flight = None
    if maps.queries is not None:  # what is under way is filled in by flight.land()
        flight = send_queries([q_TNH, dout_TNV, out_TNV, lse_NT.T], maps.queries, plan.transport, where)
        q_TNH, dout_TNV, out_TNV, lse_TN = flight.at_server
    else:
        q_TNH, dout_TNV, out_TNV = _in_canonical_order(maps, q_TNH, dout_TNV, out_TNV)
        (lse_TN,) = _in_canonical_order(maps, lse_NT.T)
    lse_NT = lse_TN.T.contiguous()

    dq_TNH, dk_TGH, dv_TGV = torch.empty_like(q_TNH), torch.empty_like(k_TGH), torch.empty_like(v_TGV)
    own_rows = max((call.queries.stop for call in maps.calls if not call.from_store), default=0)
    dq_TNH[maps.task_rows :] = 0
    dk_TGH[own_rows:] = 0
    dv_TGV[own_rows:] = 0

    def derive(
        rows: slice, k: torch.Tensor, v: torch.Tensor, spans: Spans, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        dout, q, out, lse, dq = dout_TNV[rows], q_TNH[rows], out_TNV[rows], lse_NT[:, rows], dq_TNH[rows]
        kernel.backward(dout, q, k, v, out, lse, spans, scale, plan.config.deterministic, dq, dk, dv)

    for call in maps.calls:
        if not call.from_store:
            rows = call.queries
            derive(rows, k_TGH[rows], v_TGV[rows], call.spans, dk_TGH[rows], dv_TGV[rows])
    if received is None or not maps.exchanges:
        received = exchange.wait() if exchange is not None else k_TGH.new_empty((0, _row_width(k_TGH, v_TGV)))
    if flight is not None:
        flight.land()
        lse_NT = flight.at_server[3].T.contiguous()
    if maps.exchanges or maps.store_rows:
        dstore = _store_gradients(derive, k_TGH, v_TGV, received, plan)
        returned = send_home(dstore, k_TGH.dtype, plan, where) if maps.exchanges else received
        sum_at_home(dk_TGH, dv_TGV, dstore, returned, plan)
    if maps.queries is not None:
        (dq_TNH,) = bring_home([dq_TNH], maps.num_rows, maps.queries, plan.transport, where)
    elif maps.canonical_of is not None:
        dq_TNH = dq_TNH.index_select(0, maps.canonical_of)
    if maps.canonical_of is not None:
        dk_TGH, dv_TGV = dk_TGH.index_select(0, maps.canonical_of), dv_TGV.index_select(0, maps.canonical_of)
    return dq_TNH, dk_TGH, dv_TGV


def _store_gradients(
    derive: Derive, k_TGH: torch.Tensor, v_TGV: torch.Tensor, received: torch.Tensor, plan: LivePlan
) -> torch.Tensor:
    """`[store rows, G * (H + V)]` gradients of the stored rows, from all calls that read them."""
    maps = plan.maps
    key_shape, value_shape = k_TGH.shape[1:], v_TGV.shape[1:]
    store = fill_store(k_TGH, v_TGV, received, plan)
    store_k, store_v = unpack_rows(store, key_shape, value_shape)
    if not maps.store_sums:
        dstore = torch.empty_like(store)
        dstore_k, dstore_v = unpack_rows(dstore, key_shape, value_shape)
        for call in maps.calls:
            if call.from_store:
                keys = call.keys
                derive(call.queries, store_k[keys], store_v[keys], call.spans, dstore_k[keys], dstore_v[keys])
        return dstore
    dstore = torch.zeros_like(store, dtype=accumulation_dtype(store.dtype))
    for call in maps.calls:
        if call.from_store:
            keys = call.keys
            part = torch.empty_like(store[keys])
            derive(call.queries, store_k[keys], store_v[keys], call.spans, *unpack_rows(part, key_shape, value_shape))
            dstore[keys] += part
    return dstore


def _in_canonical_order(maps: Maps, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows `[T, ...]` in canonical order; the very tensors if they are so already."""
    if maps.row_order is None:
        return tensors
    return tuple(x.index_select(0, maps.row_order) for x in tensors)


def _row_width(k_TGH: torch.Tensor, v_TGV: torch.Tensor) -> int:
    return k_TGH.shape[1] * k_TGH.shape[2] + v_TGV.shape[1] * v_TGV.shape[2]


def _check_rows(q_TNH: torch.Tensor, plan: LivePlan, where: str) -> None:
    if q_TNH.shape[0] != plan.maps.num_rows:
        raise PlanError(
            f"rank {plan.transport.rank}, {where}: attention got {q_TNH.shape[0]} rows, the plan of this batch has "
            f"{plan.maps.num_rows}; feed the batch to the model as the loader made it"
        )
