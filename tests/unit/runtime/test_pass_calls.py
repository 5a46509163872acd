"""Dtypes and heads of later layers: shown before every call of a first pass, known after it."""

from collections.abc import Sequence

import pytest
import torch

from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Gather, LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError, PlanMismatchError
from distca_hf.layout import Layout
from distca_hf.runtime.attention import attend
from distca_hf.runtime.forward_pass import PassCalls
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import run_ranks
from support.layouts import SHARED
from support.parity import SPEC, live_plan


pytestmark = pytest.mark.usefixtures("one_core")

FEW, MANY = torch.float32, torch.float64
# Dtypes of the layers of a pass.
Layers = Sequence[torch.dtype]


class CountedGathers:
    """Another transport whose gathers are counted."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.world_size, self.traffic, self.grid = inner.rank, inner.world_size, inner.traffic, inner.grid
        self.exchange, self.close, self._inner = inner.exchange, inner.close, inner
        self.gathers = 0

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        self.gathers += 1
        return self._inner.gather(values, where, scope)


def run_pass(plan: LivePlan, layers: Layers, before: PassCalls | None = None, heads: int = 2) -> PassCalls:
    """Runs the forward calls of a pass, up to its end; returns them. The last layer has other heads."""
    plan.begin_forward_pass(None, {}, before=before)
    for number, dtype in enumerate(layers):
        kv_heads = heads if number == len(layers) - 1 else 2
        q, kv = (torch.randn(plan.kinds.num_rows, count, 8, dtype=dtype) for count in (4, kv_heads))
        attend(q, kv, kv, SPEC, plan)
    return plan.forward_pass.made


def plan_over(transport: Transport) -> LivePlan:
    return live_plan(SHARED, transport, DistCAConfig(kernel="reference"))


def words_of(plan: LivePlan, layers: Layers, before: PassCalls | None, heads: int) -> tuple[str, int]:
    """Words of a pass's error, and exchanges that came before it."""
    exchanges = plan.transport.traffic.exchanges
    with pytest.raises((PlanError, PlanMismatchError)) as caught:
        run_pass(plan, layers, before, heads)
    return str(caught.value), plan.transport.traffic.exchanges - exchanges


@pytest.mark.parametrize("heads", [2, 4])
def test_the_first_pass_names_a_later_layer_that_differs_before_its_rows_are_sent(heads: int) -> None:
    def run(transport: Transport) -> tuple[str, int]:
        differs = transport.rank == 1
        layers = (FEW, FEW, MANY if differs and heads == 2 else FEW)
        return words_of(plan_over(transport), layers, None, heads if differs else 2)

    for words, exchanges in run_ranks(2, run):
        if heads == 2:
            assert "dtypes that layer 2 attends in is torch.float32 on rank 0, torch.float64 on rank 1" in words
        else:
            assert "heads and their dimensions of layer 2 is q (4, 8), k (2, 8), v (2, 8) on rank 0, q (4, 8)" in words
        assert exchanges == 2


def test_layers_of_several_dtypes_are_shown_in_a_first_pass_and_known_in_a_second() -> None:
    def run(transport: Transport) -> list[int]:
        counted, gathers, made = CountedGathers(transport), [], None
        for layers in ((FEW, MANY, FEW), (FEW, MANY, FEW), (MANY, MANY, FEW), (MANY, MANY, FEW)):
            made, before = run_pass(plan_over(counted), layers, made), sum(gathers)
            gathers.append(counted.gathers - before)
        return gathers

    assert run_ranks(2, run) == [[3, 1, 3, 1]] * 2


def test_all_calls_are_shown_if_one_rank_knows_no_pass_before() -> None:
    def run(transport: Transport) -> int:
        made, counted = run_pass(plan_over(transport), (FEW, MANY)), CountedGathers(transport)
        run_pass(plan_over(counted), (FEW, MANY), None if transport.rank == 1 else made)
        return counted.gathers

    assert run_ranks(2, run) == [2, 2]


@pytest.mark.parametrize("heads", [2, 4])
def test_a_later_pass_refuses_a_layer_that_changed_before_its_rows_are_sent(heads: int) -> None:
    def run(transport: Transport) -> tuple[str, int]:
        made = run_pass(plan_over(transport), (FEW, FEW))
        return words_of(plan_over(transport), (FEW, FEW if heads == 4 else MANY), made, heads)

    for rank, (words, exchanges) in enumerate(run_ranks(2, run)):
        place = f"rank {rank}, micro-batch 0, layer 1, forward: the layer attends "
        if heads == 2:
            assert words.startswith(place + "in torch.float64, and in torch.float32 in the pass before")
        else:
            assert words.startswith(place + "with heads q (4, 8), k (4, 8), v (4, 8), and with q (4, 8), k (2, 8)")
        assert exchanges == 1


def test_a_rank_that_is_alone_may_change_its_layers() -> None:
    layout, made = Layout.from_segments([5], [[(0, 0, 5)]]), None
    for layers in ((FEW, FEW), (FEW, MANY)):
        made = run_pass(live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference")), layers, made)
