"""The deterministic mode: fifty runs of the same attention are equal bit by bit, whatever flies in how many legs."""

import random

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.planning.planner import plan_in_place
from distca_hf.runtime.op import flash_attn
from distca_hf.testing.loopback import run_ranks
from support.layouts import random_layout, random_plan, striped_layout
from support.parity import SCALE, live_plan


NUM_RANKS, REPEATS = 3, 50
HEADS, KV_HEADS, DIM = 8, 4, 8


@pytest.mark.parametrize(("num_legs", "kv_residency"), [(1, "refetch"), (3, "keep")])
@pytest.mark.parametrize("kind", ["keys move", "queries move", "stripes"])
def test_fifty_repeats_are_bit_equal(kind: str, num_legs: int, kv_residency: str) -> None:
    rng = random.Random(5)
    layout = striped_layout(rng, NUM_RANKS) if kind == "stripes" else random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout, KV_HEADS) if kind == "queries move" else plan_in_place(layout, KV_HEADS)
    config = DistCAConfig(deterministic=True, kv_residency=kv_residency)

    def run(transport: Transport) -> tuple[int, int]:
        live = live_plan(layout, transport, config, plan=plan, num_legs=num_legs)
        tokens = live.maps.num_rows // live.maps.rows_per_token
        generator = torch.Generator().manual_seed(transport.rank)
        widths = HEADS, KV_HEADS, KV_HEADS, HEADS
        q, k, v, dout = (torch.randn(tokens, heads, DIM, generator=generator).bfloat16() for heads in widths)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        first: list[torch.Tensor] | None = None
        equal = 0
        for _ in range(REPEATS):
            out, lse, *_ = flash_attn(*inputs, SCALE, live.handle)
            results = [out, lse, *torch.autograd.grad(out, inputs, dout)]
            first = results if first is None else first
            equal += all(torch.equal(now, before) for now, before in zip(results, first, strict=True))
        return equal, transport.traffic.exchanges

    for equal, exchanges in run_ranks(NUM_RANKS, run):
        assert equal == REPEATS
        assert exchanges >= 2 * REPEATS  # something did fly
