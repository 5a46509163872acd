"""Service: an attention server's end of one roster. It routes plans, and makes calls without rows of its own.

The operator of a trainer posts an order right before its own exchanges. Queries, keys and values arrive with these,
and results leave with them. Between two calls a server keeps plans, and received rows if they are kept for backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.kernels.interface import accumulation_dtype, spec_of
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.retention import Kept
from distca_hf.servers.orders import DTYPES, CallOrder, PassOrder, Phase, PlanOrder
from distca_hf.servers.posted_plans import MeasuredCalls
from distca_hf.servers.rosters import RosterTransport
from distca_hf.servers.served_plans import plan_from_integers
from distca_hf.servers.served_traces import ServedTraces
from distca_hf.servers.speeds import Reading, Stopwatch


class NoRows(NamedTuple):
    """Tensors of a layer without a token; all that is computed here belongs to other ranks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    kept: Kept

    @classmethod
    def of(cls, order: CallOrder, device: torch.device) -> "NoRows":
        """Returns tensors of the shapes in an order."""
        dtype = DTYPES[order.dtype]

        def none(heads: int, *dims: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(0, heads, *dims, device=device, dtype=dtype)

        k = none(order.kv_heads, order.query_dim)
        return cls(
            q=none(order.query_heads, order.query_dim),
            k=k,
            v=none(order.kv_heads, order.value_dim),
            out=none(order.query_heads, order.value_dim),
            lse=none(order.query_heads, dtype=accumulation_dtype(dtype)),
            kept=Kept.nothing(k),
        )


@dataclass(eq=False)
class Service:
    """The server's end of one roster.

    Attributes:
        config: settings of the trainers' plugin.
        report: shows trainers what was measured since the roster began.
        stopwatch: of this server's kernels.
        traces: of the passes that trainers report.
        plans: live plans by number, and rows that are kept for their backward passes, by slot.
    """

    transport: RosterTransport
    config: DistCAConfig
    device: torch.device
    report: Callable[[Reading], None]
    stopwatch: Stopwatch
    traces: ServedTraces
    plans: dict[int, tuple[LivePlan, dict[int, Kept]]] = field(default_factory=dict)
    rows: dict[tuple[int, ...], NoRows] = field(default_factory=dict)

    def take_plan(self, order: PlanOrder) -> None:
        """Routes a plan, and drops those that no trainer holds any more.

        Raises:
            PlanMismatchError: it is not the plan that the trainers made.
        """
        self.report(self.stopwatch.read())  # once per micro-batch, and not beside its calls
        self.traces.write_complete()
        plan = plan_from_integers(order.integers)
        if plan.fingerprint != order.fingerprint:
            raise PlanMismatchError(
                f"micro-batch {order.micro_batch}: the plan that arrived has fingerprint {plan.fingerprint}, trainers "
                f"made {order.fingerprint}; install one version of distca_hf on all nodes"
            )
        routed = RoutedKinds.of(plan, self.transport.rank, order.num_chunks)
        kinds = PinnedKinds.prepare(routed, pin=self.device.type == "cuda")
        self.plans = {number: plan for number, plan in self.plans.items() if number >= order.oldest}
        live = LivePlan(
            order.micro_batch,
            kinds.planned(self.device, plan.fingerprint, MeasuredCalls(self.transport.rank, self.stopwatch)),
            self.transport,
            self.config,
        )
        self.plans[order.plan] = live, {}

    def begin_pass(self, order: PassOrder) -> None:
        """Begins a pass that is traced.

        Raises:
            PlanError: there is no such plan.
        """
        self.traces.begin(self._plan(order.plan)[0], order.text)

    def end_forward(self, order: PassOrder) -> None:
        """Ends the forward pass of a traced pass.

        Raises:
            PlanError: there is no such plan.
        """
        self._plan(order.plan)[0].forward_pass.end(exchanges=False, backward_calls=order.backward_calls)

    def _plan(self, number: int) -> tuple[LivePlan, dict[int, Kept]]:
        """Returns the plan with a number, and the rows that are kept for it.

        Raises:
            PlanError: there is no such plan.
        """
        if number not in self.plans:
            raise PlanError(f"a call names plan {number}, this server holds {', '.join(map(str, self.plans))}")
        return self.plans[number]

    @torch.no_grad()
    def call(self, order: CallOrder) -> None:
        """Makes an attention call.

        Raises:
            PlanError: there is no such plan; or nothing was kept for it.
        """
        plan, kept = self._plan(order.plan)
        shapes = order[2:7]
        rows = self.rows.get(shapes)
        if rows is None:
            rows = self.rows[shapes] = NoRows.of(order, self.device)
        spec, slot = spec_of(*order.spec), order.slot
        plan.retention(spec).keeps = slot > 0
        if order.phase == Phase.FORWARD:
            _, _, received = attend(rows.q, rows.k, rows.v, spec, plan)
            kept.update({slot: received} if slot else {})
        elif slot and slot not in kept:
            raise PlanError(f"a call names slot {slot} of plan {order.plan}, and rows of {list(kept)} are kept here")
        else:
            attended = Attended(rows.q, rows.k, rows.v, rows.out, rows.lse)
            attend_backward(rows.out, attended, kept.pop(slot, rows.kept), spec, plan, order.has_sinks > 0)
