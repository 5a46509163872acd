"""Core attention of one layer: dispatch, kernels, combine; forward and its explicit backward.

    forward     keys out ─┬─ own calls ─┬─ far calls ── merge                                     1 exchange
                          └── flying ───┘
    backward    keys out ─┬─ own, early ─┬─ far calls ── gradients home ─┬─ own, late ─┬─ sum     2 exchanges
                          └─── flying ───┘                               └── flying ───┘          1 if rows were kept

If queries move, too, they leave right behind the keys, guest calls follow the far ones, and their results fly home
beside late own calls: two exchanges more in either direction. With several legs far and guest calls of one are
computed while the next one flies; each leg is an exchange of its own.

Every rank makes the same exchanges in the same order, also with no tokens, no labels or nothing to send. Only a plan
in which no rank sends anything makes none, on all ranks alike. (`planning.routing` says what own, far and guests are.)

Shape legend in `kernels.interface`; T counts the tokens of this rank, padding included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from distca_hf.comm.transport import Exchange, Transport
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import Kernel, accumulation_dtype
from distca_hf.kernels.merge import merge
from distca_hf.runtime.dispatch import GradientFlight, KeyFlight
from distca_hf.runtime.finite import check_finite
from distca_hf.runtime.guests import Homeward, Outward
from distca_hf.runtime.heads import calls_of_heads
from distca_hf.runtime.maps import DeviceCall, LegMaps, Maps
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
    keys = KeyFlight(k, v, maps) if maps.exchanges else None
    guests = home = None
    if maps.queries is not None:
        guests = Outward([as_rows(q_TNH, groups)], maps.queries, maps.num_received_queries)
    flights = _Flights.start(maps, transport, where, keys, guests)

    out, lse = _empty_outputs(q_TNH, v_TGV)
    _clear_padding(maps, out, lse)
    kv_heads = k_TGH.shape[1]
    calls = calls_of_heads(maps, kv_heads, comes=True, leaves=guests is not None)
    own = _Forward(kernel, q_TNH, out, lse, scale, kv_heads)
    own.attend(calls.early, k_TGH, v_TGV)
    received = k.new_empty((0, row_width(k, v))) if keys is None else keys.received
    store = Store.open(k, v, received, maps)
    if guests is not None and maps.queries is not None:
        guest_out, guest_lse = _empty_outputs(guests.guests[0], v)
        of_guests = _Forward(kernel, guests.guests[0], guest_out, guest_lse, scale, kv_heads)
        home = Homeward([guest_out, guest_lse], maps.queries)
    for leg, far in zip(maps.legs, calls.far, strict=True):
        flights.arrive(leg, store, received, guests)
        own.attend_far(far, store, at_once=not calls.late)
        if home is not None and leg.queries is not None:
            of_guests.attend(leg.guests, store.k, store.v)
            home.start(leg.queries, transport, where)
    own.attend(calls.late, k_TGH, v_TGV)
    own.merge_far()
    if home is not None:
        home.land([as_rows(out, groups), as_rows(lse, groups)])
    check_finite(plan, where, output=out)
    if not keeps:
        return out, lse, Kept.nothing(k)
    if guests is None:
        return out, lse, Kept.keys_alone(received)
    return out, lse, Kept(received, guests.guests[0], guest_out, guest_lse)


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
    where, maps, transport = plan.begin_backward(), plan.backward_maps, plan.transport
    kernel, keeps, groups = plan.kernel(q_TNH, k_TGH, v_TGV), plan.keeps_received is True, maps.rows_per_token
    deterministic, kv_heads = plan.config.deterministic, k_TGH.shape[1]
    check_finite(plan, where, output_gradient=dout_TNV)
    k, v = as_rows(k_TGH, groups), as_rows(v_TGV, groups)
    keys = KeyFlight(k, v, maps) if maps.exchanges and not keeps else None
    guests = queries_home = None
    if maps.queries is not None:
        fetched = [dout_TNV] if keeps else [dout_TNV, q_TNH, out_TNV, lse_TN]
        guests = Outward([as_rows(x, groups) for x in fetched], maps.queries, maps.num_received_queries)
    flights = _Flights.start(maps, transport, where, keys, guests)

    dq, dk, dv = _empty_gradients(q_TNH, k_TGH, v_TGV, maps)
    own = _Backward(kernel, dout_TNV, q_TNH, out_TNV, lse_TN, dq, scale, deterministic, kv_heads)
    comes = keys is not None or guests is not None
    calls = calls_of_heads(maps, kv_heads, comes=comes, leaves=maps.exchanges)
    own.derive(calls.early, k_TGH, v_TGV, dk, dv)
    if keeps:
        received = kept.keys
        store = Store.of_kept(k, v, received, maps)
    else:
        received = k.new_empty((0, row_width(k, v))) if keys is None else keys.received
        store = Store.open(k, v, received, maps)
    gradients = StoreGradients(k, v, maps)
    keys_home = GradientFlight(gradients, k, v, maps)
    if guests is not None and maps.queries is not None:
        dout, q, out, lse = (*guests.guests, *kept.guests) if keeps else guests.guests
        dq_of_guests = torch.empty_like(q)
        of_guests = _Backward(kernel, dout, q, out, lse, dq_of_guests, scale, deterministic, kv_heads)
        queries_home = Homeward([dq_of_guests], maps.queries)
    for leg, far in zip(maps.legs, calls.far, strict=True):
        flights.arrive(leg, None if keeps else store, received, guests)
        own.derive_far(far, store, gradients)
        if queries_home is not None:
            of_guests.derive_stored(leg.guests, store, gradients)
        if maps.exchanges:
            keys_home.start(leg.keys, transport, where)
        if queries_home is not None and leg.queries is not None:
            queries_home.start(leg.queries, transport, where)
    own.derive(calls.late, k_TGH, v_TGV, dk, dv)
    own.add_far()
    keys_home.land(as_rows(dk, groups), as_rows(dv, groups))
    if queries_home is not None:
        queries_home.land([as_rows(dq, groups)])
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _Flights:
    """Legs of keys and of queries under way."""

    maps: Maps
    keys: list[Exchange]
    queries: list[Exchange]

    @classmethod
    def start(
        cls, maps: Maps, transport: Transport, where: str, keys: KeyFlight | None, guests: Outward | None
    ) -> "_Flights":
        """Starts all legs, one behind the other."""
        flights = cls(maps, [], [])
        for leg in maps.legs:
            if keys is not None:
                flights.keys.append(keys.start(leg.keys, transport, where))
            if guests is not None and leg.queries is not None:
                flights.queries.append(guests.start(leg.queries, transport, where))
        return flights

    def arrive(self, leg: LegMaps, store: Store | None, received: torch.Tensor, guests: Outward | None) -> None:
        """Waits for the next leg, and puts its rows where they are needed."""
        if self.keys:
            self.keys.pop(0).wait()
        if store is not None:
            store.arrive(received, leg.keys.receive, self.maps)
        if self.queries and guests is not None and leg.queries is not None:
            self.queries.pop(0).wait()
            guests.arrive(leg.queries)


class _Forward:
    """Forward kernel calls whose queries are the rows of some tensors: own ones, or guests."""

    def __init__(
        self, kernel: Kernel, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scale: float, kv_heads: int
    ) -> None:
        self._kernel, self._q, self._out, self._lse, self._scale = kernel, q, out, lse, scale
        self._kv_heads = kv_heads
        self._far: list[tuple[DeviceCall, torch.Tensor, torch.Tensor]] = []

    def attend(self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes outputs and log-sum-exps of calls on `k` and `v`."""
        for call in calls:
            q, out, lse = (queries_part(x, call, self._kv_heads) for x in (self._q, self._out, self._lse))
            self._run(call, q, k, v, out, lse)

    def attend_far(self, calls: Iterable[DeviceCall], store: Store, at_once: bool) -> None:
        """Attends to prefixes, and adds that `at_once` if own calls have written their parts."""
        for call in calls:
            q = queries_part(self._q, call, self._kv_heads)
            out, lse = _empty_outputs(q, store.v)
            self._run(call, q, store.k, store.v, out, lse)
            self._far.append((call, out, lse))
            if at_once:
                self.merge_far()

    def merge_far(self) -> None:
        """Adds attention to prefixes, once own calls have written their parts."""
        for call, far_out, far_lse in self._far:
            out, lse = (queries_part(x, call, self._kv_heads) for x in (self._out, self._lse))
            merge(out, lse, far_out, far_lse)
        self._far.clear()

    def _run(
        self,
        call: DeviceCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        k, v = keys_part(k, call, self._kv_heads), keys_part(v, call, self._kv_heads)
        self._kernel.forward(q, k, v, call.spans, self._scale, out, lse.T)


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
        kv_heads: int,
    ) -> None:
        self._kernel, self._of_queries, self._lse, self._dq = kernel, (dout, q, out), lse, dq
        self._scale, self._deterministic, self._kv_heads = scale, deterministic, kv_heads
        self._far: dict[tuple[int, int, tuple[int, int] | None], tuple[DeviceCall, torch.Tensor]] = {}

    def derive(
        self, calls: Iterable[DeviceCall], k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Writes the gradients of the calls' queries, keys and values."""
        for call in calls:
            parts = [keys_part(x, call, self._kv_heads) for x in (k, v, dk, dv)]
            self._run(call, parts, queries_part(self._dq, call, self._kv_heads))

    def derive_stored(self, calls: Iterable[DeviceCall], store: Store, gradients: StoreGradients) -> None:
        """The same with keys in the store."""
        for call in calls:
            self._run_stored(call, store, gradients, queries_part(self._dq, call, self._kv_heads))

    def derive_far(self, calls: Iterable[DeviceCall], store: Store, gradients: StoreGradients) -> None:
        """The part of prefixes. Output and log-sum-exp of the whole row make it a part of the whole gradient; that of
        queries is added by `add_far`, once own calls have written theirs."""
        for call in calls:
            of_call = queries_part(self._dq, call, self._kv_heads)
            dq = torch.empty_like(of_call, memory_format=torch.contiguous_format)
            self._run_stored(call, store, gradients, dq)
            rows = call.queries.start, call.queries.stop, call.heads
            if rows in self._far:  # of a leg before
                _, before = self._far[rows]
                dq = before.to(accumulation_dtype(before.dtype)).add_(dq)
            self._far[rows] = call, dq

    def add_far(self) -> None:
        """Adds what prefixes contribute to the gradients of queries, in at least fp32."""
        for call, dq in self._far.values():
            queries_part(self._dq, call, self._kv_heads).add_(dq)

    def _run_stored(self, call: DeviceCall, store: Store, gradients: StoreGradients, dq: torch.Tensor) -> None:
        total = gradients.total
        k, v, dk, dv = (keys_part(x, call, self._kv_heads) for x in (store.k, store.v, total.k, total.v))
        call_dk, call_dv = gradients.target(dk), gradients.target(dv)
        self._run(call, (k, v, call_dk, call_dv), dq)
        gradients.settle(call_dk, dk)
        gradients.settle(call_dv, dv)

    def _run(self, call: DeviceCall, of_keys: Sequence[torch.Tensor], dq: torch.Tensor) -> None:
        k, v, dk, dv = of_keys
        dout, q, out = (queries_part(x, call, self._kv_heads) for x in self._of_queries)
        lse = queries_part(self._lse, call, self._kv_heads).T
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
