"""Layers with different masks: one layout, and a routing for each mask."""

import numpy as np
import pytest
import torch

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.kernels.reference import ReferenceKernel
from distca_hf.layout import Layout
from distca_hf.planning.pieces import Tasks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.device_routing import PinnedRankPlan
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import attend_documents, rows_of_rank, run_ranks
from support.parity import live_plan


LAYOUT = Layout.from_segments([12, 5], [[(0, 0, 9)], [(0, 9, 12), (1, 0, 5)]])
FULL = AttentionSpec(scale=0.25)
WINDOW = FULL._replace(window_tokens=12)  # as long as the longest document: numbers are those of the causal mask


def plans() -> dict[Mask, Plan]:
    """Layers with the whole prefix compute in place. Those with the window have documents computed by other ranks."""
    documents = np.arange(2)
    elsewhere = Tasks.sort(documents, np.zeros_like(documents), LAYOUT.document_tokens, 1 - documents)
    return {CAUSAL_MASK: plan_in_place(LAYOUT), Mask(WINDOW.window_tokens): Plan(LAYOUT, elsewhere)}


def test_each_layer_takes_the_routing_of_its_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(17, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = attend_documents(*whole, [12, 5], FULL.scale)
    expected = [exact.detach(), *torch.autograd.grad(exact, whole, dout)]

    def run(transport: Transport) -> tuple[list[float], list[int]]:
        mine = {mask: rank_plan(plan, transport.rank) for mask, plan in plans().items()}
        routings = {mask: PinnedRankPlan.prepare(plan).to(torch.device("cpu")) for mask, plan in mine.items()}
        live = LivePlan(0, routings, mine[CAUSAL_MASK].facts, transport, DistCAConfig())
        live.kernel = lambda *given: ReferenceKernel()  # as it would with a kernel that knows windows
        rows = rows_of_rank(LAYOUT, transport.rank)
        errors, exchanges = [], []
        for spec in (FULL, WINDOW, FULL):  # layers one after the other
            before = transport.traffic.exchanges
            out, lse, kept = attend(q[rows], k[rows], v[rows], spec, live)
            gradients = attend_backward(dout[rows], Attended(q[rows], k[rows], v[rows], out, lse), kept, spec, live)
            errors += [
                float((got - want[rows]).abs().max()) for got, want in zip((out, *gradients), expected, strict=True)
            ]
            exchanges.append(transport.traffic.exchanges - before)
        return errors, exchanges

    for errors, (full, window, full_again) in run_ranks(2, run):
        assert max(errors) < 1e-10
        assert full == full_again < window  # queries and results are sent, too


def test_a_mask_that_was_not_planned_is_refused_by_name() -> None:
    live = live_plan(Layout.from_segments([5], [[(0, 0, 5)]]), LocalTransport(), DistCAConfig())

    assert live.kinds.of(FULL).plan.forward.num_rows == live.num_rows == 5
    with pytest.raises(PlanError, match=r"Mask\(window_tokens=12\).*routings for Mask\(window_tokens=None\)"):
        live.kinds.of(WINDOW)
