"""A plan that does not fit the device is refused before anything is sent."""

import random

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanError
from distca_hf.runtime import room
from distca_hf.runtime.core_attention import attend
from distca_hf.testing.loopback import run_ranks
from support.layouts import random_layout, random_plan
from support.parity import SCALE, live_plan


NUM_RANKS = 3
HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.mark.parametrize("free", [None, 0, 10**9], ids=["a CPU", "nothing", "enough"])
def test_plan_is_refused_if_it_cannot_fit(free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: free)
    rng = random.Random(4)
    layout = random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout)

    def run(transport: Transport) -> tuple[str, int]:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference"), plan=plan)
        tokens = live.maps.num_rows // live.maps.rows_per_token
        q, k, v = (torch.zeros(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        try:
            attend(q, k, v, SCALE, live)
        except PlanError as error:
            return str(error), transport.traffic.exchanges
        return "", transport.traffic.exchanges

    for rank, (message, exchanges) in enumerate(run_ranks(NUM_RANKS, run)):
        if free == 0:
            assert f"rank {rank}, micro-batch 0, layer 0, forward: attention needs" in message
            assert "but 0 bytes are free on cpu; nothing was sent. Lower tokens_per_rank" in message
            assert exchanges == 0
        else:
            assert message == ""
            assert exchanges > 0


def test_needed_bytes_are_those_of_buffers_and_gradients() -> None:
    rng = random.Random(4)
    layout = random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout)

    def run(transport: Transport) -> tuple[int, int]:
        maps = live_plan(layout, transport, DistCAConfig(kernel="reference"), plan=plan).maps
        per_token = maps.rows_per_token
        q = torch.zeros(maps.num_rows, HEADS // per_token, DIM, dtype=torch.float32)
        k = v = torch.zeros(maps.num_rows, KV_HEADS // per_token, DIM, dtype=torch.float32)
        row = 4 * 2 * KV_HEADS // per_token * DIM
        rows = 2 * maps.store_rows + len(maps.send_rows) + len(maps.received_to_store)
        return room.needed_bytes(maps, q, k, v), row * rows + 4 * (q.numel() + 2 * k.numel())

    for needed, expected in run_ranks(NUM_RANKS, run):
        assert needed == expected
