"""A plan that does not fit the device is refused before anything is sent."""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import Inputs, empty_outputs
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime import attention, kernel_calls, remote_kv
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.testing import run_ranks
from support.layouts import SCATTERED, SHARED, THRICE, random_layout, random_plan, striped_layout
from support.memory import LiveBytes, QuietTransport
from support.parity import SPEC, live_plan


NUM_RANKS = 3
HEADS, KV_HEADS, DIM = 4, 2, 8
Q, KV = HEADS * DIM, 2 * KV_HEADS * DIM  # elements of a token


def tensors(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v of a layer."""
    return [torch.zeros(tokens, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def plan_of(kind: str) -> Plan:
    rng = random.Random(4)
    if kind == "striped":
        return plan_in_place(striped_layout(rng, NUM_RANKS, 500), KV_HEADS)
    layout = place([300, 90, 41, 1, 7, 150, 26], NUM_RANKS)
    return plan_in_place(layout) if kind == "placed" else random_plan(rng, layout, 2 if kind == "moved heads" else 1)


@pytest.mark.parametrize("free", [None, 0, 10**9], ids=["a CPU", "nothing", "enough"])
def test_plan_is_refused_if_it_cannot_fit(free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "free_bytes", lambda device: free)
    rng = random.Random(4)
    layout = random_layout(rng, NUM_RANKS)
    plan = random_plan(rng, layout)

    def run(transport: Transport) -> tuple[str, int]:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference"), plan=plan)
        tokens = live.kinds.num_rows
        try:
            attend(*tensors(tokens, torch.float32), SPEC, live)
        except PlanError as error:
            return str(error), transport.traffic.exchanges
        return "", transport.traffic.exchanges

    for rank, (message, num_exchanges) in enumerate(run_ranks(NUM_RANKS, run)):
        if free == 0:
            assert f"rank {rank}, micro-batch 0, layer 0, forward: attention needs" in message
            assert "but 0 bytes are free on cpu; nothing was sent. Lower tokens_per_rank" in message
            assert num_exchanges == 0
        else:
            assert message == ""
            assert num_exchanges > 0


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_what_comes_in_the_last_chunk_needs_room_too(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes little with what comes to it, and so nothing with what the first of four chunks brings."""
    layout = Layout.from_segments([16, 20], [[(0, 0, 15)], [(0, 15, 16), (1, 0, 20)]])
    asked: list[int] = []
    needed_bytes = attention.needed_bytes
    monkeypatch.setattr(attention, "needed_bytes", lambda *given: asked.append(needed_bytes(*given)) or asked[-1])

    def run(transport: Transport) -> None:
        live = live_plan(layout, transport, DistCAConfig(kernel="reference"), num_chunks=num_chunks)
        attend(*tensors(int(layout.rank_rows[transport.rank]), torch.float32), SPEC, live)

    run_ranks(2, run)
    rows = 15 * KV  # of the document that is sent, and stored with gradients
    assert sorted(asked) == sorted([4 * (rows + 15 * (Q + KV)), 4 * (3 * rows + 21 * (Q + KV) + Q)])


@pytest.mark.parametrize(
    ("layout", "dtype", "expected"),
    [
        # Rank 0 sends two tokens, rank 1 stores them, and derives six queries twice.
        (
            SHARED,
            torch.float32,
            [
                4 * (2 * KV + 5 * (Q + KV)),
                4 * (2 * KV + 2 * 2 * KV + 7 * (Q + KV) + 6 * Q),
            ],
        ),
        # Both ranks send and store, rank 0 two documents; there two calls read the keys of two tokens, whose gradients
        # one adds to those of the other.
        (
            SCATTERED,
            torch.bfloat16,
            [
                2 * (2 * 10 * KV + 2 * KV + (2 + 8) * KV + 6 * (Q + KV) + 6 * Q),
                2 * (2 * 4 * KV + (8 + 2) * KV + 8 * (Q + KV) + 3 * Q),
            ],
        ),
        # Three calls of rank 0 read the keys of two tokens, so gradients of all ten are summed in fp32; of rank 1 two.
        (
            THRICE,
            torch.bfloat16,
            [
                2 * (10 * KV + 2 * (4 + 6) * KV + 6 * (Q + KV) + 6 * Q) + 4 * 10 * KV,
                2 * (2 * 8 * KV + 4 * KV + (6 + 4) * KV + 6 * (Q + KV) + 4 * Q),
            ],
        ),
    ],
    ids=["one document", "added", "summed"],
)
def test_needed_bytes_by_hand(layout: Layout, dtype: torch.dtype, expected: list[int]) -> None:
    def run(transport: Transport) -> int:
        routing = live_plan(layout, transport, DistCAConfig()).kinds.of(SPEC).plan.forward
        return attention.needed_bytes(routing, *tensors(int(layout.rank_rows[transport.rank]), dtype))

    assert run_ranks(2, run) == expected


class NoKernel:
    """Computes nothing: what it would need for itself is not ours."""

    def forward(self, inputs: Inputs, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return empty_outputs(inputs.q_TNH, inputs.v_SGV)

    def backward(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kv_residency", "num_chunks"),
    [
        ("keep", 1),
        ("keep", 3),
        ("refetch", 1),
    ],
)
@pytest.mark.parametrize("kind", ["placed", "moved", "moved heads", "striped"])
def test_attention_holds_hardly_more_than_needed_bytes(
    kind: str, kv_residency: Residency, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth. Merging and summing apart, for which GPUs have kernels that need nothing. Counted on one rank at
    a time: torch notes for all threads together whether a dispatch mode is active."""
    monkeypatch.setattr(kernel_calls, "prepare_merge", lambda *of_layer: lambda *tensors: None)
    monkeypatch.setattr(remote_kv, "prepare_add", lambda *given: lambda *tensors: None)
    plan = plan_of(kind)

    def run(transport: Transport, counted: int) -> tuple[int, int, int]:
        counts, config = transport.rank == counted, DistCAConfig(kv_residency=kv_residency)
        wires = QuietTransport(transport) if counts else transport
        live = live_plan(plan.layout, wires, config, plan=plan, num_chunks=num_chunks)
        live.lookup.kernel = lambda *given: NoKernel()
        q, k, v = tensors(int(plan.layout.rank_rows[transport.rank]), torch.bfloat16)
        forward, backward = LiveBytes(), LiveBytes()
        with forward if counts else nullcontext():
            out, lse, kept = attend(q, k, v, SPEC, live)
        dout = torch.zeros_like(out)
        with backward if counts else nullcontext():
            attend_backward(dout, Attended(q, k, v, out, lse), kept, SPEC, live)
        return attention.needed_bytes(live.kinds.of(SPEC).plan.backward, q, k, v), forward.most, backward.most

    for rank in range(NUM_RANKS):
        needed, forward, backward = run_ranks(NUM_RANKS, partial(run, counted=rank))[rank]
        assert 0 < max(forward, backward) <= 1.1 * needed
