"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward     keys out ─┬─ own calls ─┬─ far calls ── merge                                    1 exchange
                          └── flying ───┘
    backward    keys out ─┬─ own, half ─┬─ far calls ── gradients home ─┬─ own, half ─┬─ sum     2 exchanges
                          └── flying ───┘                               └── flying ───┘          1 if rows were kept

If queries move, too, they leave right behind the keys, guest calls follow the far ones, and their results fly home
beside the second half of the own calls: two exchanges more in either direction.

Every rank makes the same exchanges in the same order, also with no tokens, no labels or nothing to send. Only a plan
in which no rank sends anything makes none, on all ranks alike. (`planning.routing` says what own, far and guests are.)

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from distca_hf.errors import PlanError
from distca_hf.kernels.interface import Kernel, accumulation_dtype
from distca_hf.kernels.merge import merge
from distca_hf.runtime.combine import start_gradients_home, sum_at_home
from distca_hf.runtime.dispatch import start_keys
from distca_hf.runtime.finite import check_finite
from distca_hf.runtime.guests import send_home, send_out
from distca_hf.runtime.maps import DeviceCall, Maps
from distca_hf.runtime.plans import LivePlan
from distca_hf.runtime.residency import Kept, keeps_received
from distca_hf.runtime.room import check_room
from distca_hf.runtime.rows import as_rows, keys_part, queries_part
from distca_hf.runtime.store import Store, StoreGradients, row_width


def attend(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, scale: float, plan: LivePlan
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """Attention of every row to the causal prefix of its document, wherever that prefix is held.

    Returns:
        out: `[T, N, V]`, zero in padding rows.
        lse: `[T, N]` log-sum-exp of the scaled scores in max(fp32, dtype), zero in padding rows.
        kept: what came from other ranks and is to be kept for backward.

    Raises:
        PlanError: the tensors have other row counts than the plan, or heads that do not divide as it says, or what
            they need does not fit the device.
        PlanMismatchError, PeerLostError, StepTimeoutError: from agreement and exchange.
    """
    plan.agree()
    where, maps, transport = plan.begin_forward(), plan.maps, plan.transport
    kernel = plan.kernel(q_TNH, k_TGH, v_TGV)
    for x in (q_TNH, k_TGH, v_TGV):
        _check_fit(x, plan, where)
    check_finite(plan, where, query=q_TNH, key=k_TGH, value=v_TGV)
    if plan.forward_calls == 1:
        check_room(plan, where, q_TNH, k_TGH, v_TGV)
    keeps, groups = keeps_received(plan, q_TNH, k_TGH, v_TGV), maps.rows_per_token
    k, v = as_rows(k_TGH, groups), as_rows(v_TGV, groups)
    keys = start_keys(k, v, plan, where) if maps.exchanges else None
    queries = send_out([as_rows(q_TNH, groups)], maps.queries, transport, where) if maps.queries is not None else None

    out, lse = _empty_outputs(q_TNH, v_TGV)
    _clear_padding(maps, out, lse)
    own = _Forward(kernel, q_TNH, out, lse, scale, groups)
    own.attend(maps.own if queries is None else maps.early, k_TGH, v_TGV)
    received = keys.wait() if keys is not None else k.new_empty((0, row_width(k, v)))
    if maps.store_rows:
        store = Store.fill(k, v, received, maps)
        own.attend_far(maps.far, store.k, store.v)
    if queries is not None and maps.queries is not None:
        (guest_q,) = queries.arrive()
        guest_out, guest_lse = _empty_outputs(guest_q, v)
        if maps.guests:
            _Forward(kernel, guest_q, guest_out, guest_lse, scale, groups).attend(maps.guests, store.k, store.v)
        home = send_home([guest_out, guest_lse], maps.queries, transport, where)
        own.attend(maps.late, k_TGH, v_TGV)
        own.merge_far()
        home.land([as_rows(out, groups), as_rows(lse, groups)])
        kept = Kept(received, guest_q, guest_out, guest_lse) if keeps else Kept.nothing(k)
    else:
        own.merge_far()
        kept = Kept.keys_alone(received) if keeps else Kept.nothing(k)
    check_finite(plan, where, output=out)
    return out, lse, kept


def attend_backward(
    dout_TNV: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGV: torch.Tensor,
    out_TNV: torch.Tensor,
    lse_TN: torch.Tensor,
    kept: Kept,
    scale: float,
    plan: LivePlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from those of the output; what was not kept is fetched again."""
    where, maps, transport = plan.begin_backward(), plan.maps, plan.transport
    kernel, keeps, groups = plan.kernel(q_TNH, k_TGH, v_TGV), plan.keeps_received is True, maps.rows_per_token
    check_finite(plan, where, output_gradient=dout_TNV)
    k, v = as_rows(k_TGH, groups), as_rows(v_TGV, groups)
    keys = start_keys(k, v, plan, where) if maps.exchanges and not keeps else None
    queries = None
    if maps.queries is not None:
        fetched = [dout_TNV] if keeps else [dout_TNV, q_TNH, out_TNV, lse_TN]
        queries = send_out([as_rows(x, groups) for x in fetched], maps.queries, transport, where)

    dq, dk, dv = _empty_gradients(q_TNH, k_TGH, v_TGV, maps)
    own = _Backward(kernel, dout_TNV, q_TNH, out_TNV, lse_TN, dq, scale, plan.config.deterministic, groups)
    flying = keys is not None or queries is not None
    for call in maps.early if flying else ():
        own.derive(call, k_TGH, v_TGV, dk, dv)
    received = keys.wait() if keys is not None else kept.keys.view(-1, row_width(k, v))
    gradients = StoreGradients(k, v, maps)
    if maps.store_rows:
        store = Store.fill(k, v, received, maps)
        own.derive_far(maps.far, store, gradients)
    dguest_q = None
    if queries is not None:
        dout, q, out, lse = queries.arrive() if not keeps else (*queries.arrive(), *kept.guests)
        dguest_q = torch.empty_like(q)
        guests = _Backward(kernel, dout, q, out, lse, dguest_q, scale, plan.config.deterministic, groups)
        for call in maps.guests:
            guests.derive_stored(call, store, gradients)
    home = start_gradients_home(gradients, plan, where) if maps.exchanges else None
    queries_home = None
    if dguest_q is not None and maps.queries is not None:
        queries_home = send_home([dguest_q], maps.queries, transport, where)
    for call in maps.late if flying else maps.own:
        own.derive(call, k_TGH, v_TGV, dk, dv)
    own.add_far()
    returned = home.wait() if home is not None else k.new_empty((0, row_width(k, v)))
    sum_at_home(as_rows(dk, groups), as_rows(dv, groups), gradients, returned, maps)
    if queries_home is not None:
        queries_home.land([as_rows(dq, groups)])
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _Forward:
    """Forward kernel calls whose queries are the rows of some tensors: own ones, or guests."""

    kernel: Kernel
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: float
    groups: int
    far: list[tuple[DeviceCall, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            q, out, lse = (queries_part(x, call, self.groups) for x in (self.q, self.out, self.lse))
            self._run(call, q, k, v, out, lse)

    def attend_far(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Attends to prefixes, in `k` and `v`."""
        for call in calls:
            q = queries_part(self.q, call, self.groups)
            out, lse = _empty_outputs(q, v)
            self._run(call, q, k, v, out, lse)
            self.far.append((call, out, lse))

    def merge_far(self) -> None:
        """Adds attention to prefixes, once own calls have written their parts."""
        for call, far_out, far_lse in self.far:
            out, lse = (queries_part(x, call, self.groups) for x in (self.out, self.lse))
            merge(out, lse, far_out, far_lse)
        self.far.clear()

    def _run(
        self,
        call: DeviceCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        k, v = keys_part(k, call, self.groups), keys_part(v, call, self.groups)
        self.kernel.forward(q, k, v, call.spans, self.scale, out, lse.T)


class _Backward:
    """Backward of kernel calls whose queries are the rows of some tensors: own ones, or guests."""

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
        groups: int,
    ) -> None:
        self._kernel, self._of_queries, self._lse, self._dq = kernel, (dout, q, out), lse, dq
        self._scale, self._deterministic, self._groups = scale, deterministic, groups
        self._far: list[tuple[DeviceCall, torch.Tensor]] = []

    def derive(self, call: DeviceCall, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Writes the gradients of the call's queries, keys and values."""
        k, v, dk, dv = (keys_part(x, call, self._groups) for x in (k, v, dk, dv))
        self._run(call, k, v, dk, dv, queries_part(self._dq, call, self._groups))

    def derive_stored(self, call: DeviceCall, store: Store, gradients: StoreGradients) -> None:
        """The same with keys in the store."""
        self._run_stored(call, store, gradients, queries_part(self._dq, call, self._groups))

    def derive_far(self, calls: Iterable[DeviceCall], store: Store, gradients: StoreGradients) -> None:
        """The part of prefixes. Output and log-sum-exp of the whole row make it a part of the whole gradient; that of
        queries is added by `add_far`, once own calls have written theirs."""
        for call in calls:
            dq = torch.empty_like(queries_part(self._dq, call, self._groups), memory_format=torch.contiguous_format)
            self._run_stored(call, store, gradients, dq)
            self._far.append((call, dq))

    def add_far(self) -> None:
        """Adds what prefixes contribute to the gradients of queries, in at least fp32."""
        for call, dq in self._far:
            queries_part(self._dq, call, self._groups).add_(dq)

    def _run_stored(self, call: DeviceCall, store: Store, gradients: StoreGradients, dq: torch.Tensor) -> None:
        total = gradients.total
        k, v, dk, dv = (keys_part(x, call, self._groups) for x in (store.k, store.v, total.k, total.v))
        call_dk, call_dv = gradients.target(dk), gradients.target(dv)
        self._run(call, k, v, call_dk, call_dv, dq)
        gradients.settle(call_dk, dk)
        gradients.settle(call_dv, dv)

    def _run(
        self,
        call: DeviceCall,
        k: torch.Tensor,
        v: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:
        dout, q, out = (queries_part(x, call, self._groups) for x in self._of_queries)
        lse = queries_part(self._lse, call, self._groups).T
        self._kernel.backward(dout, q, k, v, out, lse, call.spans, self._scale, self._deterministic, dq, dk, dv)


def _empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, heads, V]` and `[rows, heads]`."""
    shape = q.shape[:2]
    return q.new_empty((*shape, v.shape[2])), q.new_empty(shape, dtype=accumulation_dtype(q.dtype))


def _empty_gradients(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGV: torch.Tensor, maps: Maps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What own calls write, or what comes home; zero elsewhere. Keys whose queries moved get all theirs from
    elsewhere."""
    dq = torch.empty_like(q_TNH)
    make = torch.empty_like if maps.queries is None else torch.zeros_like
    dk, dv = make(k_TGH), make(v_TGV)
    _clear_padding(maps, dq, dk, dv)
    return dq, dk, dv


def _clear_padding(maps: Maps, *tensors_T: torch.Tensor) -> None:
    """Rows behind the last token become zero."""
    if maps.num_tokens * maps.rows_per_token < maps.num_rows:
        for x in tensors_T:
            x[maps.num_tokens :] = 0


def _check_fit(x: torch.Tensor, plan: LivePlan, where: str) -> None:
    maps = plan.maps
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
