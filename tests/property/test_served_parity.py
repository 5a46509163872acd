"""Core attention with attention servers is exact: ranks without tokens make the same calls as all others, on plans
that come to them as integers."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.comm.transport import Transport
from distca_hf.config import Residency
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.servers.served_plans import Servers, plan_from_integers, plan_to_integers
from distca_hf.testing import run_ranks
from support.layouts import packed_layout, random_layout, striped_layout
from support.parity import Case, Difference, compare
from support.thorough import is_thorough


def placed_layout(rng: random.Random, num_trainers: int) -> Layout:
    """Documents placed with equal work, rows padded."""
    lengths = [rng.randint(1, 30) for _ in range(rng.randint(0, 8))] + [rng.randint(60, 120)]
    layout = place(lengths, num_trainers, head_groups=4)
    return layout.padded(8, int(layout.rank_tokens.max()) + 8)


def layout_of(rng: random.Random, num_trainers: int) -> Layout:
    """Placed, packed by others, or as adversarial as may be."""
    make = rng.choice([placed_layout, placed_layout, random_layout, striped_layout, packed_layout])
    layout = make(rng, num_trainers, 60) if make is packed_layout else make(rng, num_trainers)
    return layout if layout.num_documents else Layout.from_packs([[9]] * num_trainers)


def run_all(case: Case, num_trainers: int) -> list[Difference]:
    """Runs a layer on all ranks; servers read the plan from integers."""
    integers = plan_to_integers(case.plan)

    def run(transport: Transport) -> Difference:
        if transport.rank < num_trainers:
            return compare(case, transport)
        plan = plan_from_integers(integers)
        return compare(replace(case, plan=plan, layout=plan.layout), transport)

    return run_ranks(case.layout.num_ranks, run)


@pytest.mark.parametrize("trainers_attend", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("kv_residency", ["refetch", "keep"])
@settings(max_examples=40 if is_thorough() else 6)
@given(seed=st.integers(0, 2**32 - 1), num_trainers=st.integers(1, 4), num_servers=st.integers(1, 3))
def test_outputs_and_gradients_equal_unsplit_attention(
    seed: int, num_trainers: int, num_servers: int, kv_residency: Residency, num_chunks: int, trainers_attend: bool
) -> None:
    rng = random.Random(seed)
    layout = layout_of(rng, num_trainers)
    servers = Servers(tuple(rng.uniform(0.2, 1) for _ in range(num_servers)), trainers_attend)
    plan = servers.plan(layout, rng.choice([1, 1, 2, 3, 4]))
    case = replace(
        Case.draw(seed, plan.layout, plan), kv_residency=kv_residency, num_chunks=num_chunks, num_servers=num_servers
    )
    differences = run_all(case, num_trainers)

    for difference in differences:
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference
    if not trainers_attend:
        assert [difference.pairs for difference in differences[:num_trainers]] == [(0, 0)] * num_trainers
