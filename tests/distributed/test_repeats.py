"""The deterministic mode: fifty runs of the same attention are equal bit by bit, whatever flies in how many chunks."""

import random

import pytest

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.planning.plan import plan_in_place
from distca_hf.testing import run_ranks
from support.layouts import random_layout, random_plan, striped_layout
from support.repeats import equal_repeats


NUM_RANKS, REPEATS = 3, 50
WIDTHS = _, KV_HEADS, _ = 8, 4, 8  # query heads, KV heads, head dimension


@pytest.mark.parametrize(
    ("kind", "num_chunks", "kv_residency"),
    [("keys move", 3, "keep"), ("queries move", 3, "keep"), ("stripes", 1, "refetch")],
)
def test_fifty_repeats_are_bit_equal(kind: str, num_chunks: int, kv_residency: str) -> None:
    rng = random.Random(5)
    layout = striped_layout(rng, NUM_RANKS) if kind == "stripes" else random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout, KV_HEADS) if kind == "queries move" else plan_in_place(layout, KV_HEADS)
    config = DistCAConfig(deterministic=True, kv_residency=kv_residency)

    def run(transport: Transport) -> tuple[int, int]:
        equal = equal_repeats(transport, layout, plan, config, num_chunks, WIDTHS, REPEATS)
        return equal, transport.traffic.exchanges

    for equal, exchanges in run_ranks(NUM_RANKS, run):
        assert equal == REPEATS
        assert exchanges >= 2 * REPEATS  # something did fly
