"""What a plan says is what happens: kernels compute its pairs, and exchanges carry its keys."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from distca_hf.comm.transport import AllToAll, Exchange, Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.planning.plan import Plan
from distca_hf.planning.rebalance import plan_by_moving
from distca_hf.planning.transfers import ExchangeChunks, key_transfers
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import run_ranks
from support.counting import CountingKernel
from support.layouts import packed_layout
from support.parity import SPEC, live_plan
from support.plans import NUM_RANKS, anywhere, divided, placed, striped


HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 8, 4, 8, 4


class RecordingTransport:
    """Writes down how many elements each exchange sends to each rank."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.world_size, self.traffic = transport.rank, transport.world_size, transport.traffic
        self.grid, self.gather = transport.grid, transport.gather
        self.elements: list[list[int]] = []

    def exchange(self, asked: AllToAll) -> Exchange:
        self.elements.append([part.numel() for part in asked.rows.split(list(asked.send_counts))])
        return self.transport.exchange(asked)


def run_one_layer(
    plan: Plan, kv_residency: Residency, num_chunks: int
) -> list[tuple[CountingKernel, RecordingTransport]]:
    """Forward and backward of one layer; what was counted on each rank."""
    config = DistCAConfig(kernel="reference", kv_residency=kv_residency)

    def run(transport: Transport) -> tuple[CountingKernel, RecordingTransport]:
        recording = RecordingTransport(transport)
        live = live_plan(plan.layout, recording, config, plan=plan, num_chunks=num_chunks)
        rows = int(plan.layout.rank_rows[transport.rank])
        shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
        held = [torch.randn(rows, *shape, requires_grad=True) for shape in shapes]
        counting = CountingKernel(live.lookup.kernel(*held, SPEC))
        live.lookup.kernel = lambda *given: counting
        flash_attn(*held, SPEC, live.handle)[0].sum().backward()
        return counting, recording

    return run_ranks(NUM_RANKS, run)


def moved(seed: int) -> Plan:
    return plan_by_moving(packed_layout(random.Random(seed), NUM_RANKS, longest_tokens=200))


KINDS = [placed, striped, moved, anywhere, divided]


@pytest.mark.parametrize(
    ("seed", "kv_residency", "num_chunks"),
    [(seed, ("refetch", "keep")[seed % 2], (1, 3)[seed // 2 % 2]) for seed in range(8)],
)
@pytest.mark.parametrize("make", KINDS)
def test_kernels_compute_the_pairs_of_the_plan_and_exchanges_carry_its_keys(
    make: Callable[[int], Plan], seed: int, kv_residency: Residency, num_chunks: int
) -> None:
    plan = make(seed)
    transfers = key_transfers(plan, ExchangeChunks.cut(plan, num_chunks))
    planned = np.zeros((num_chunks, NUM_RANKS, NUM_RANKS), dtype=np.int64)
    np.add.at(planned, (transfers.chunk, transfers.source, transfers.destination), transfers.rows)
    counted = run_one_layer(plan, kv_residency, num_chunks)

    row_heads = KV_HEADS // plan.tasks.head_groups  # of a row of keys; work, too, counts groups of heads
    work = (row_heads * plan.work).tolist()
    assert [kernel.forward_pairs for kernel, _ in counted] == work
    assert [kernel.backward_pairs for kernel, _ in counted] == work
    # In every chunk keys leave before queries; all at once again in backward if they were not kept. Their gradients go
    # the same way back before those of queries.
    elements = row_heads * (HEAD_DIM + VALUE_DIM) * planned
    moves, some = [None] * plan.moves_queries, bool(planned.any())
    keys = [exchange for chunk in elements for exchange in ([chunk.tolist()] * some + moves)]
    at_once = [elements.sum(axis=0).tolist()] * (some and kv_residency == "refetch")
    gradients = [elements.sum(axis=0).T.tolist()] * some
    expected = [*keys, *moves * num_chunks, *at_once, *moves, *gradients, *moves]
    for _, recording in counted:
        assert len(recording.elements) == len(expected)
        for sent, between in zip(recording.elements, expected, strict=True):
            assert between is None or sent == between[recording.rank]


@pytest.mark.parametrize("make", KINDS)
def test_some_plans_of_every_kind_send_keys(make: Callable[[int], Plan]) -> None:
    """Or the test above would compare nothing with nothing."""
    plans = [make(seed) for seed in range(8)]

    assert sum(len(key_transfers(plan)) > 0 for plan in plans) >= 4
    assert any(plan.moves_queries for plan in plans) == (make is not placed)
