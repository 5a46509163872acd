"""Sinks and softcap over ranks are exact in fp64: counted once per row, whatever is cut, moved, kept or served."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.layout import Layout
from distca_hf.servers.orders import DTYPES, CallOrder, Phase, PlanOrder
from distca_hf.servers.posted_plans import ServedTraces
from distca_hf.servers.served_plans import Servers, plan_to_integers
from distca_hf.servers.server import Service
from distca_hf.servers.speeds import Stopwatch
from distca_hf.testing import run_ranks
from support.layouts import plan_of_kind, random_layout
from support.parity import Case, Difference, compare


CPU = torch.device("cpu")


def check_exact(case: Case) -> None:
    """Outputs, gradients, and bytes are as they must be on all ranks; gradients of sinks are, summed over ranks."""
    differences = run_ranks(case.layout.num_ranks, lambda transport: compare(case, transport))
    for difference in differences:
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference
    of_sinks = sum(difference.of_sinks for difference in differences if difference.of_sinks is not None)
    torch.testing.assert_close(of_sinks, differences[0].of_sinks_expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("kv_residency", ["refetch", "keep"])
@pytest.mark.parametrize("kind", ["in place", "moved", "striped"])
@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 4),
    softcap=st.sampled_from([0.0, 0.7, 20.0]),
)
def test_sinks_count_once_on_all_ranks_together(
    kind: str,
    kv_residency: str,
    num_chunks: int,
    seed: int,
    num_ranks: int,
    softcap: float,
) -> None:
    rng = random.Random(seed)
    plan = plan_of_kind(kind, rng, num_ranks, rng.choice([1, 1, 2, 3]))
    case = Case.draw(seed, plan.layout, plan)

    check_exact(replace(case, kv_residency=kv_residency, num_chunks=num_chunks, softcap=softcap, has_sinks=True))


@pytest.mark.parametrize("trainers_attend", [True, False])
@pytest.mark.parametrize("kv_residency", ["refetch", "keep"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), num_trainers=st.integers(1, 3), num_servers=st.integers(1, 2))
def test_attention_servers_need_no_sinks(
    kv_residency: str, trainers_attend: bool, seed: int, num_trainers: int, num_servers: int
) -> None:
    """They get log-sum-exps that hold them."""
    rng = random.Random(seed)
    servers = Servers(tuple(rng.uniform(0.2, 1) for _ in range(num_servers)), trainers_attend)
    plan = servers.plan(random_layout(rng, num_trainers), rng.choice([1, 1, 2, 3]))
    case = replace(Case.draw(seed, plan.layout, plan), kv_residency=kv_residency, num_servers=num_servers)

    check_exact(replace(case, softcap=rng.choice([0.0, 0.7]), has_sinks=True))


@pytest.mark.parametrize("keeps", [True, False])
def test_orders_tell_servers_of_sinks(keeps: bool) -> None:
    """A server makes the calls of orders; its trainer compares what comes back."""
    plan = Servers((1.0,)).plan(Layout.from_packs([[90]]), 1)
    assert plan.pieces.moved.any()
    residency: Residency = "keep" if keeps else "refetch"
    case = replace(Case.draw(0, plan.layout, plan), kv_residency=residency, num_chunks=1, has_sinks=True)
    heads, kv_heads, dim, value_dim = case.heads
    integers = plan_to_integers(plan)

    def run(transport: Transport) -> Difference | None:
        if transport.rank == 0:
            return compare(case, transport)
        config = DistCAConfig(kernel="reference", kv_residency=residency)
        service = Service(transport, config, CPU, lambda reading: None, Stopwatch(CPU), ServedTraces(0, CPU, Path()))  # type: ignore[arg-type]
        service.take_plan(PlanOrder(1, 1, 0, 1, plan.fingerprint, integers))
        shapes = heads, kv_heads, dim, value_dim, DTYPES.index(torch.float64)
        for phase in Phase:
            service.call(CallOrder(1, phase, *shapes, int(keeps), True, tuple(case.spec)))
        return None

    [difference, _] = run_ranks(2, run)
    assert difference is not None
    assert difference.largest <= 1e-10
    assert difference.as_planned
