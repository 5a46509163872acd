"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward     keys out ─┬─ own calls ─┬─ far calls ── merge                                     1 exchange
                          └── flying ───┘
    backward    keys out ─┬─ own, early ─┬─ far calls ── gradients home ─┬─ own, late ─┬─ sum     2 exchanges
                          └─── flying ───┘                               └── flying ───┘          1 if rows were kept

If queries move, too, they leave right behind the keys, guest calls follow the far ones, and their results return
beside late own calls: two exchanges more in either direction. With several legs far and guest calls of one are
computed while the next one is on its way; each leg is an exchange of its own.

Every rank makes the same exchanges in the same order, also with no tokens, no labels or nothing to send. Only a plan
in which no rank sends anything makes none, on all ranks alike. (`planning.routing` says what own, far and guests are.)

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

import torch

from distca_hf.kernels.interface import AttentionSpec, made_deterministic
from distca_hf.runtime.combine import GradientFlight
from distca_hf.runtime.dispatch import KeyFlight
from distca_hf.runtime.finite import check_finite
from distca_hf.runtime.guest_calls import BackwardGuests, ForwardGuests
from distca_hf.runtime.heads import calls_of_heads
from distca_hf.runtime.kernel_calls import BackwardCalls, ForwardCalls, empty_rows
from distca_hf.runtime.maps import Maps
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.residency import Kept, Received
from distca_hf.runtime.room import check_room
from distca_hf.runtime.rows import as_rows
from distca_hf.runtime.store import Store, StoreGradients


def attend(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    spec: AttentionSpec,
    plan: LivePlan,
    received: Received | None = None,
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """Attends from every row to the causal prefix of its document, wherever that prefix is held.

    Args:
        received: what came from other ranks before, when the same was computed; it does not travel again.
        sinks_N: scores of the heads' sinks.

    Returns:
        out: `[T, N, V]`, zero in padding rows.
        lse: `[T, N]` log-sum-exp of the scaled scores in max(fp32, dtype), zero in padding rows.
        kept: what came from other ranks and is to be kept for backward.

    Raises:
        PlanError: the tensors have other row counts than the plan, or heads that do not divide as it says, or what
            they need does not fit the device.
        UnsupportedAttentionError: no kernel can attend like this.
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    plan.agree()
    if not plan.forward_calls:
        plan.forward_pass.agree_to_attend(q_TNH, k_TGH, v_TGV)
    where, maps, transport = plan.forward_pass.begin_forward(), plan.maps, plan.transport
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV, spec, where, sinks_N)
    check_finite(plan, where, query=q_TNH, key=k_TGH, value=v_TGV)
    if plan.forward_calls == 1:
        check_room(plan, where, q_TNH, k_TGH, v_TGV)
    keeps, groups = plan.retention.keeps_received(q_TNH, k_TGH, v_TGV), maps.rows_per_token
    kv_heads = k_TGH.shape[1]
    k, v = as_rows(groups, k_TGH, v_TGV)
    keys = KeyFlight(k, v, maps, travels=maps.exchanges, received=None if received is None else received.keys)
    guests = None
    if maps.queries is not None:
        [q], came = as_rows(groups, q_TNH), None if received is None else received.guest_q
        guests = ForwardGuests(kernel, q, v, maps.queries, spec, kv_heads, came)
    for leg in maps.legs:
        keys.start(leg, transport, where)
        if guests is not None:
            guests.start(leg, transport, where)

    out, lse = empty_rows(q_TNH, v_TGV)
    _clear_padding(maps, out, lse)
    calls = calls_of_heads(maps, kv_heads, comes=True, leaves=maps.queries is not None)
    own = ForwardCalls(kernel, q_TNH, out, lse, spec, kv_heads)
    own.attend(calls.early, k_TGH, v_TGV)
    store = Store.open(k, v, keys.received, maps)
    for leg, far in zip(maps.legs, calls.far, strict=True):
        keys.arrive(leg, store)
        own.attend_far(far, store, at_once=not calls.late)
        if guests is not None:
            guests.attend(leg, store, transport, where)
    own.attend(calls.late, k_TGH, v_TGV)
    own.merge_far()
    if guests is not None:
        guests.land(*as_rows(groups, out, lse))
    check_finite(plan, where, output=out)
    if keeps and guests is not None:
        return out, lse, Kept(keys.received, *guests.kept)
    nothing = plan.retention.nothing(k)
    return out, lse, Kept(keys.received, *nothing.guests) if keeps else nothing


def attend_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    kept: Kept,
    spec: AttentionSpec,
    plan: LivePlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradients of q, k and v from those of the output; what was not kept is fetched again.

    Raises:
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    plan.agree()
    where, maps, transport = plan.forward_pass.begin_backward(), plan.backward_maps, plan.transport
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV, spec, where)
    keeps, groups = plan.retention.keeps is True, maps.rows_per_token
    if plan.config.deterministic or torch.are_deterministic_algorithms_enabled():
        spec = made_deterministic(spec)
    how = spec, k_TGH.shape[1]
    check_finite(plan, where, output_gradient=dout_TNV)
    k, v = as_rows(groups, k_TGH, v_TGV)
    keys = KeyFlight(k, v, maps, travels=maps.exchanges and not keeps)
    guests = None
    if maps.queries is not None:
        of_queries = as_rows(groups, dout_TNV, q_TNH, out_TNV, lse_TN)
        guests = BackwardGuests(kernel, of_queries, kept if keeps else None, maps.queries, *how)
    for leg in maps.legs:
        keys.start(leg, transport, where)
        if guests is not None:
            guests.start(leg, transport, where)

    dq, dk, dv = _empty_gradients(q_TNH, k_TGH, v_TGV, maps)
    comes = keys.travels or maps.queries is not None
    calls = calls_of_heads(maps, k_TGH.shape[1], comes=comes, leaves=maps.exchanges)
    own = BackwardCalls(kernel, dout_TNV, q_TNH, out_TNV, lse_TN, dq, *how)
    own.derive(calls.early, k_TGH, v_TGV, dk, dv)
    store = Store.of_kept(k, v, kept.keys, maps) if keeps else Store.open(k, v, keys.received, maps)
    gradients = StoreGradients(k, v, maps)
    home = GradientFlight(gradients, k, v, maps)
    for leg, far in zip(maps.legs, calls.far, strict=True):
        keys.arrive(leg, store)
        own.derive_far(far, store, gradients)
        if guests is not None:
            guests.derive(leg, store, gradients)
        gradients.complete()
        home.start(leg, transport, where)
        if guests is not None:
            guests.send_home(leg, transport, where)
    own.derive(calls.late, k_TGH, v_TGV, dk, dv)
    own.add_far()
    home.land(*as_rows(groups, dk, dv))
    if guests is not None:
        guests.land(*as_rows(groups, dq))
    return dq, dk, dv


def _empty_gradients(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, maps: Maps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns room for gradients, zero where neither own calls write nor gradients come home. Keys whose queries moved
    get all theirs from elsewhere."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_TNH, k_TGH, v_TGV))
    if maps.queries is not None:
        dk.zero_()
        dv.zero_()
    _clear_padding(maps, dq, dk, dv)
    return dq, dk, dv


def _clear_padding(maps: Maps, *tensors_T: torch.Tensor) -> None:
    """Rows behind the last token become zero."""
    if maps.num_tokens * maps.rows_per_token < maps.num_rows:
        for x in tensors_T:
            x[maps.num_tokens :] = 0
