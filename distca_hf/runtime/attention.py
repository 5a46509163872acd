"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward    send keys ─┬─ local calls ─┬─ prefix calls ── merge                                  1 exchange
                          └── exchange ───┘
    backward   send keys ─┬─ early local ─┬─ prefix calls ── send gradients ─┬─ late local ─┬─ sum  2 exchanges, or
                          └── exchange ───┘                                  └── exchange ──┘       1 if rows were kept

If queries move, too, they are sent right after the keys. Remote-query calls follow the prefix calls, and their
results are sent back during late local calls: two exchanges more in either direction. With several chunks, prefix and
remote-query calls of one are computed while the next one is in flight; each chunk is an exchange.

Every rank makes the same exchanges in the same order, even without tokens or labels, or with nothing to send. If no
rank of a plan sends anything, no rank makes any. `planning.routing` defines the kinds of calls.

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from typing import NamedTuple

import torch

from distca_hf.errors import NotFiniteError, PlanError
from distca_hf.kernels.interface import (
    AttentionSpec,
    CallTensors,
    Inputs,
    accumulation_dtype,
    empty_gradients,
    empty_layer_outputs,
    made_deterministic,
    mask_of,
)
from distca_hf.kernels.rows import add_sinks
from distca_hf.runtime.alike_layers import AlikeLayers
from distca_hf.runtime.device_routing import DeviceRouting
from distca_hf.runtime.kernel_calls import BackwardCalls, ForwardCalls, QueryRows, as_rows, attend_whole, rows_to_read
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.posted import AnnouncedCall
from distca_hf.runtime.remote_kv import KVDispatch, KVGradCombine, RemoteKV, RemoteKVGradients
from distca_hf.runtime.remote_queries import BackwardRemoteQueries, ForwardRemoteQueries
from distca_hf.runtime.retention import Kept, Received
from distca_hf.traces import Spent


# Members of an enumeration are slow to look up.
SEND, LOCAL, WAIT, REMOTE, COMBINE = Spent.SEND, Spent.LOCAL, Spent.WAIT, Spent.REMOTE, Spent.COMBINE


def attend(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    spec: AttentionSpec,
    plan: LivePlan,
    received: Received | None = None,
    sinks_N: torch.Tensor | None = None,
    is_differentiated: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """Attends from every row to the causal prefix of its document, wherever that prefix is held.

    Args:
        received: rows of other ranks from an earlier run of the same layer; they are not sent again.
        sinks_N: scores of the heads' sinks, which are added once per row.
        is_differentiated: whether a backward pass may follow.

    Returns:
        out: `[T, N, V]`, zero in padding rows.
        lse: `[T, N]` log-sum-exp of the scaled scores and sinks in max(fp32, dtype), zero in padding rows.
        kept: rows of other ranks that are kept for backward.

    Raises:
        PlanError: the tensors have other row counts than the plan, or heads that it cannot divide; or the device lacks
            memory.
        UnsupportedAttentionError: no kernel supports this.
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    where, layers = _begin(q_TNH, k_TGH, v_TGV, spec, plan, sinks_N is not None)
    trace, transport, lookup = plan.forward_pass.trace, plan.transport, plan.lookup
    spec, kind = layers.spec, layers.kind
    routing, retention = kind.plan.forward, kind.retention
    keeps, groups = retention.keeps, routing.rows_per_token
    if keeps is None:
        keeps = retention.keeps_received(q_TNH, k_TGH, v_TGV)
    slot = 0
    if lookup.posted is not None:
        call = AnnouncedCall(q_TNH, k_TGH, v_TGV, spec, kind.plan.facts)
        slot = lookup.posted.forward(call, keeps and is_differentiated)
    # 1. Send keys, and queries that move, in all chunks: they are in flight while local calls run.
    k, v = (k_TGH, v_TGV) if groups == 1 else rows_to_read(groups, k_TGH, v_TGV)
    received_keys = None if received is None else received.keys
    if received is None and not routing.exchanges and not routing.remote_kv_rows:  # no call reads any
        received_keys = layers.nothing.keys
    keys = KVDispatch(k, v, layers.forward_kv, sends=routing.exchanges, received=received_keys)
    remote_queries = None
    if routing.queries is not None:
        [q], received_q = rows_to_read(groups, q_TNH), None if received is None else received.remote_q
        remote_queries = ForwardRemoteQueries(layers, q, v, routing.queries, received_q)
    for chunk in routing.chunks:
        keys.start(chunk, transport, where)
        if remote_queries is not None:
            remote_queries.start(chunk, transport, where)
    trace.spent(SEND)

    # 2. Early local calls, then prefixes and remote queries of each chunk on arrival.
    calls, whole = layers.calls, layers.whole_call
    if whole is not None:
        out, lse = attend_whole(layers.kernel, whole, Inputs(q_TNH, k_TGH, v_TGV), layers.forward_calls.spec)
    else:
        out, lse = empty_layer_outputs(q_TNH, v_TGV, head_by_head=routing.queries is None)
        _clear_padding(routing, out, lse)
    local = ForwardCalls(layers.forward_calls, q_TNH, out, lse)
    if whole is None:
        local.attend(calls.early, k_TGH, v_TGV)
    remote_kv = RemoteKV.open(k, v, keys.received, layers.forward_kv)
    trace.spent(LOCAL)
    for chunk, prefixes in zip(routing.chunks, calls.prefix, strict=True):
        keys.receive(chunk, remote_kv)
        trace.spent(WAIT)
        local.attend_prefixes(prefixes, remote_kv, at_once=not calls.late)
        trace.spent(REMOTE)
        if remote_queries is not None:
            remote_queries.receive(chunk)
            trace.spent(WAIT)
            remote_queries.attend(chunk, remote_kv, transport, where)
            trace.spent(REMOTE)
    kept = layers.nothing
    if keeps:
        none = kept.remote_q, kept.remote_out, kept.remote_lse
        of_queries = none if remote_queries is None else remote_queries.kept
        kept = Kept(keys.received, *of_queries, kept.keys.new_empty((slot, 0)) if slot else kept.slot)
    del keys, remote_kv  # frees rows that nothing reads any more
    local.attend(calls.late, k_TGH, v_TGV)  # 3. while results go back to their owner ranks
    trace.spent(LOCAL)
    local.merge_prefixes()
    if remote_queries is not None:
        trace.spent(COMBINE)
        remote_queries.receive_results()
        trace.spent(WAIT)
        remote_queries.finish(*as_rows(groups, out, lse))
    if sinks_N is not None:  # only now is every row complete
        tokens = slice(routing.num_tokens)
        add_sinks(out[tokens], lse[tokens], sinks_N)
    trace.spent(COMBINE)
    if plan.checks_finite:
        check_finite(plan, where, output=out)
    return out, lse, kept


def _begin(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, spec: AttentionSpec, plan: LivePlan, has_sinks: bool
) -> tuple[str, AlikeLayers]:
    """Agrees on a forward call and checks it; returns its place, and the layers alike to its own."""
    if plan.agreement is not None:
        plan.agree()
    dtypes, heads = (q_TNH.dtype, k_TGH.dtype, v_TGV.dtype), (q_TNH.shape[1:], k_TGH.shape[1:], v_TGV.shape[1:])
    tensors = CallTensors(dtypes, heads)
    if not plan.forward_pass.calls or plan.forward_pass.compares_calls:
        plan.forward_pass.agree_to_attend(plan.fingerprint, tensors)
    where = plan.forward_pass.begin_forward(mask_of(spec), (spec.scale, spec.softcap, has_sinks), tensors)
    layers = plan.lookup.alike(q_TNH, k_TGH, v_TGV, spec, where)
    if plan.checks_finite:
        check_finite(plan, where, query=q_TNH, key=k_TGH, value=v_TGV)
    if not layers.kind.has_room:
        check_room(plan, layers.kind.plan.backward, where, q_TNH, k_TGH, v_TGV)
        layers.kind.has_room = True
    return where, layers


class Attended(NamedTuple):
    """Tensors of a layer's forward pass that its backward pass reads."""

    q_TNH: torch.Tensor
    k_TGH: torch.Tensor
    v_TGV: torch.Tensor
    out_TNV: torch.Tensor
    lse_TN: torch.Tensor


def attend_backward(
    dout_TNV: torch.Tensor,
    attended: Attended,
    kept: Kept,
    spec: AttentionSpec,
    plan: LivePlan,
    has_sinks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradients of q, k and v from the output's gradient; fetches rows that were not kept again. With
    `has_sinks`, output and log-sum-exp include sinks.

    Raises:
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    q_TNH, k_TGH, v_TGV, out_TNV, lse_TN = attended
    where, transport, trace = plan.forward_pass.begin_backward(), plan.transport, plan.forward_pass.trace
    lookup = plan.lookup
    layers = lookup.alike(q_TNH, k_TGH, v_TGV, spec, where)
    spec, kind, prepared = layers.spec, layers.kind, layers.backward_kv
    routing, keeps = kind.plan.backward, kind.retention.keeps is True
    if plan.config.deterministic or torch.are_deterministic_algorithms_enabled():
        spec = made_deterministic(spec)
    if plan.checks_finite:
        check_finite(plan, where, output_gradient=dout_TNV)
    if lookup.posted is not None:
        call = AnnouncedCall(q_TNH, k_TGH, v_TGV, spec, kind.plan.facts)
        keeps = lookup.posted.backward(call, kept.slot, has_sinks, keeps)
    groups = routing.rows_per_token
    # 1. Send rows of forward that were not kept again, together with output gradients of queries that moved.
    k, v = (k_TGH, v_TGV) if groups == 1 else rows_to_read(groups, k_TGH, v_TGV)
    keys = KVDispatch(k, v, prepared, sends=routing.exchanges and not keeps, received=kept.keys if keeps else None)
    remote_queries = None
    if routing.queries is not None:
        to_read = QueryRows(*rows_to_read(groups, dout_TNV, q_TNH, out_TNV, lse_TN))
        kept_rows = kept if keeps else None
        remote_queries = BackwardRemoteQueries(layers, to_read, kept_rows, routing.queries, spec, has_sinks)
    [chunk] = routing.chunks  # kept rows are available at once
    keys.start(chunk, transport, where)
    if remote_queries is not None:
        remote_queries.start(chunk, transport, where)
    trace.spent(SEND)

    # 2. Early local calls write gradients; prefixes and remote queries write the remote KV's. These are sent as
    #    soon as they are complete.
    dq, dk, dv = empty_gradients(dout_TNV, q_TNH, k_TGH, v_TGV)
    if routing.queries is not None:  # if queries moved, their keys get all gradients from other ranks
        dk.zero_()
        dv.zero_()
    _clear_padding(routing, dq, dk, dv)
    calls = layers.backward_calls(rows_come=keys.sends or routing.queries is not None)
    [prefixes] = calls.prefix
    rows = QueryRows(dout_TNV, q_TNH, out_TNV, lse_TN)
    local = BackwardCalls(layers.prepared_backward(rows, spec), rows, dq)
    local.derive(calls.early, k_TGH, v_TGV, dk, dv)
    remote_kv = RemoteKV.of_kept(k, v, kept.keys, prepared) if keeps else RemoteKV.open(k, v, keys.received, prepared)
    gradients = RemoteKVGradients(k, v, prepared)
    trace.spent(LOCAL)
    keys.receive(chunk, remote_kv)
    trace.spent(WAIT)
    local.derive_on_remote_kv(prefixes, remote_kv, gradients, adds=True)
    if remote_queries is not None:
        trace.spent(REMOTE)
        remote_queries.receive(chunk)
        trace.spent(WAIT)
        remote_queries.derive(chunk, remote_kv, gradients)
    del keys, remote_kv  # frees rows that nothing reads any more
    gradients.complete()
    trace.spent(REMOTE)
    combine = KVGradCombine(gradients, k, prepared)
    combine.start(chunk, transport, where)
    if remote_queries is not None:
        remote_queries.send_results(chunk, transport, where)
    trace.spent(SEND)
    # 3. Late local calls, while gradients go back. Sums come last, and in one order: all that they add to is written.
    local.derive(calls.late, k_TGH, v_TGV, dk, dv)
    local.add_prefixes()
    trace.spent(LOCAL)
    combine.receive()
    trace.spent(WAIT)
    combine.finish(*as_rows(groups, dk, dv))
    if remote_queries is not None:
        trace.spent(COMBINE)
        remote_queries.receive_results()
        trace.spent(WAIT)
        remote_queries.finish(*as_rows(groups, dq))
    trace.spent(COMBINE)
    return dq, dk, dv


def _clear_padding(routing: DeviceRouting, *tensors_T: torch.Tensor) -> None:
    """Sets the rows after the last token to zero."""
    if routing.num_tokens * routing.rows_per_token < routing.num_rows:
        for x in tensors_T:
            x[routing.num_tokens :].zero_()


def check_room(
    plan: LivePlan, routing: DeviceRouting, where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Compares the memory that backward of this layer needs in addition to its inputs with the free memory, before
    anything is sent: if this rank ran out of memory within a step, all others would wait until the deadline.

    A document's keys gather on the rank that computes its last queries, which may need more memory than its tokens
    suggest.

    Raises:
        PlanError: the memory does not suffice; names both numbers, and settings to change.
    """
    free, needed = free_bytes(q.device), needed_bytes(routing, q, k, v)
    if free is not None and needed > free:
        raise PlanError(
            f"{plan.transport.grid.name}, {where}: attention needs {needed} bytes for keys, values and gradients (of "
            f"{routing.remote_kv_rows // routing.rows_per_token} tokens of documents that span ranks, among "
            f"others), but {free} bytes are free on {q.device}; nothing was sent. Lower tokens_per_rank, train on "
            "more ranks, or save memory elsewhere (activation checkpointing, sharding, a fused loss)"
        )


def needed_bytes(routing: DeviceRouting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Returns the bytes of one layer's backward: gradients, rows under way, remote keys and values with gradients.

    Args:
        routing: routing of backward, which has one chunk.
        q, k, v: `[T, heads, dim]`.
    """
    groups = routing.rows_per_token
    elements = k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2]
    summed = accumulation_dtype(k.dtype).itemsize if routing.sums_remote_kv else k.element_size()
    stored = routing.remote_kv_rows * elements * (k.element_size() + summed)
    on_store = [call for chunk in routing.chunks for call in (*chunk.prefix, *chunk.remote_queries)]
    stored += sum(call.keys.stop - call.keys.start for call in on_store if call.adds) * elements * k.element_size()
    # Keys fetched again; they are freed before as many gradients are sent back, some first in a larger dtype.
    at_once = 2 if routing.sums_remote_kv else 1
    under_way = at_once * (len(routing.send_rows) + len(routing.received_to_remote_kv)) * elements * k.element_size()
    gradients = sum(x.numel() * x.element_size() for x in (q, k, v))
    prefix = 0  # query gradients to add to the ones of local calls
    for call in routing.chunks[0].prefix:
        tokens, heads = call.queries.stop - call.queries.start, q.shape[1] * call.rows_per_token // groups
        prefix += tokens * heads * q.shape[2]
    remote_queries = 0
    if routing.queries is not None:  # queries, outputs, both gradients and log-sum-exps, in flight and at the target
        heads, query, value = q.shape[1], q.shape[2] * q.element_size(), v.shape[2] * q.element_size()
        lse, sent = accumulation_dtype(q.dtype).itemsize, len(routing.queries.send_rows)
        remote_queries = heads * (
            routing.queries.num_rows * (3 * query + 4 * value + 2 * lse) + sent * (2 * query + 2 * value + lse)
        )
    return (stored + under_way + remote_queries) // groups + gradients + prefix * q.element_size()


def free_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of a GPU, including torch's reserve; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_finite(plan: LivePlan, where: str, **tensors: torch.Tensor) -> None:
    """Checks that `[T, ...]` tensors are finite; waits for the device. Raises NotFiniteError, which names the tensor
    and the document of the first wrong row."""
    for name, rows in tensors.items():
        wrong = ~torch.isfinite(rows).flatten(1).all(dim=1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise NotFiniteError(
                f"{plan.transport.grid.name}, {where}: {name} is not finite in row {row}, "
                f"{plan.kinds.held.name_of(row)}; {int(wrong.sum())} of {len(rows)} rows are not"
            )
