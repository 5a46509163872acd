"""Layers that are alike share what was found out for the first of them, and layers of other tensors do not."""

import random

import pytest
import torch

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import NEW, AttentionSpec, Inputs, Outputs, Room, Spans, empty_outputs
from distca_hf.layout import Layout
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.attention import attend
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import run_ranks
from support.layouts import random_layout, random_plan
from support.parity import SPEC, live_plan


HEADS, KV_HEADS, DIM = 4, 2, 8


def tensors(rows: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(rows, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def alone(rows: int = 5) -> LivePlan:
    """A plan of one rank with two documents, and padding if there are more rows."""
    layout = Layout.from_segments([3, 2], [[(0, 0, 3), (1, 0, 2)]], [rows])
    return live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference"))


def test_layers_are_alike_where_tensors_and_how_they_attend_are() -> None:
    plan, (q, k, v) = alone(), tensors(5)
    layers = plan.alike(q, k, v, SPEC, "a layer")
    strided = k.transpose(0, 1).contiguous().transpose(0, 1)

    assert plan.alike(*tensors(5), SPEC, "a layer") is layers
    assert plan.alike(q, k, v, SPEC._replace(window_tokens=3), "a layer").spec == SPEC  # no document is longer
    for others in (
        plan.alike(q, strided, v, SPEC, "a layer"),
        plan.alike(*tensors(5, torch.float32), SPEC, "a layer"),
        plan.alike(q, k, v, SPEC._replace(softcap=2.0), "a layer"),
        alone().alike(q, k, v, SPEC, "a layer"),
    ):
        assert others is not layers
        assert others.forward_rows is not layers.forward_rows


class Notes:
    """A kernel that notes the queries of its calls, and whether it got room."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        self.calls.append((len(inputs.q_TNH), room is not NEW))
        out, lse = empty_outputs(inputs.q_TNH, inputs.v_SGV)
        return room.filled(out.zero_(), lse.zero_())


@pytest.mark.parametrize(("rows", "gets_room"), [(5, False), (8, True)], ids=["all rows", "padding"])
def test_a_call_that_writes_all_rows_makes_room_itself(rows: int, gets_room: bool) -> None:
    plan, kernel = alone(rows), Notes()
    plan.kernel = lambda *given: kernel  # type: ignore[method-assign,assignment]
    out, lse, _ = attend(*tensors(rows), SPEC, plan)

    assert kernel.calls == [(5, gets_room)]
    assert (out.shape, lse.shape) == ((rows, HEADS, DIM), (rows, HEADS))
    assert not out[5:].any()


@pytest.mark.parametrize("moves", [False, True], ids=["in place", "queries move"])
@pytest.mark.parametrize("seed", range(8))
def test_later_layers_have_the_bits_of_the_first_one(seed: int, moves: bool) -> None:
    """What was prepared for other numbers serves these."""
    rng = random.Random(seed)
    layout = random_layout(rng, 2)
    plan = random_plan(rng, layout, KV_HEADS) if moves else plan_in_place(layout)

    def run(transport: Transport) -> None:
        def live() -> LivePlan:
            return live_plan(layout, transport, DistCAConfig(kernel="reference"), plan=plan, num_chunks=2)

        of_all_layers = live()
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(3):
            held = [x.normal_(generator=generator) for x in tensors(int(layout.rank_rows[transport.rank]))]
            for got, expected in zip(
                attend(*held, SPEC, of_all_layers)[:2], attend(*held, SPEC, live())[:2], strict=True
            ):
                assert torch.equal(got, expected)

    run_ranks(2, run)
