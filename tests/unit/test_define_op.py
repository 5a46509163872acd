"""Operators behave as torch expects them to: it checks schema, gradients, shapes and compilation itself."""

import random
from typing import Any

import pytest
import torch

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.layout import Layout
from distca_hf.planning.planner import plan_in_place
from distca_hf.runtime.local import flash_attn_local
from distca_hf.runtime.op import flash_attn, flash_attn_backward
from distca_hf.runtime.plans import LivePlan
from distca_hf.testing.loopback import run_ranks
from support.layouts import SCATTERED, random_plan
from support.parity import SCALE, live_plan


HEADS, KV_HEADS, DIM = 4, 2, 8
TOKENS = 12


def tensors(*, requires_grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(TOKENS, heads, DIM, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def alone() -> LivePlan:
    """A plan of one rank with two documents."""
    layout = Layout.from_segments([8, 4], [[(0, 0, 8), (1, 0, 4)]])
    return live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference"))


def of_documents() -> tuple[Any, ...]:
    offsets = torch.tensor([0, 8, 12], dtype=torch.int32)
    return offsets, offsets, 8, 8, SCALE, "auto", False


@pytest.mark.parametrize("requires_grad", [True, False])
def test_local_attention_passes_the_checks_of_torch(requires_grad: bool) -> None:
    held = tensors(requires_grad=requires_grad)
    torch.library.opcheck(flash_attn_local, (*held, *of_documents()))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_planned_attention_passes_the_checks_of_torch(requires_grad: bool) -> None:
    live = alone()
    held = tensors(requires_grad=requires_grad)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flash_attn, (*held, SCALE, live.handle), test_utils=checks)


def test_gradients_are_those_of_finite_differences() -> None:
    live = alone()
    for attention, given in ((flash_attn_local, of_documents()), (flash_attn, (SCALE, live.handle))):
        held = tensors()
        out = attention(*held, *given)[0]
        direction = torch.randn_like(out)
        gradients = torch.autograd.grad(out, held, direction)
        for at, gradient in enumerate(gradients):
            step = torch.randn_like(gradient)
            ends = [
                (attention(*(x + way * 1e-6 * step if n == at else x for n, x in enumerate(held)), *given)[0]).detach()
                for way in (1, -1)
            ]
            assert ((ends[0] - ends[1]) * direction).sum() / 2e-6 == pytest.approx(
                (gradient * step).sum().item(), 1e-6
            )


OVER_RANKS = {
    "placed": plan_in_place(SCATTERED),
    "moved": random_plan(random.Random(0), SCATTERED, 1),
    "moved heads": random_plan(random.Random(0), SCATTERED, KV_HEADS),
}


@pytest.mark.parametrize("kv_residency", ["keep", "refetch"])
@pytest.mark.parametrize("kind", list(OVER_RANKS))
def test_what_operators_return_shares_no_memory(kind: str, kv_residency: Residency) -> None:
    """Neither with what they are given nor among itself: compiled graphs write into what nobody needs any more."""

    def run(transport: Transport) -> None:
        plan = OVER_RANKS[kind]
        live = live_plan(plan.layout, transport, DistCAConfig(kv_residency=kv_residency), plan=plan)
        rows = int(plan.layout.rank_rows[transport.rank])
        q, k, v = (torch.randn(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        forward = flash_attn(q, k, v, SCALE, live.handle)
        assert (kv_residency == "keep") == any(len(kept) for kept in forward[2:])
        assert_apart(q, k, v, *forward)
        dout = torch.randn_like(q)
        assert_apart(q, k, v, *forward, dout, *flash_attn_backward(dout, q, k, v, *forward, SCALE, live.handle))

    run_ranks(2, run)


def assert_apart(*tensors: torch.Tensor) -> None:
    begins = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    assert len(set(begins)) == len(begins)


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_have_no_gradients(planned: bool) -> None:
    live, held = alone(), tensors()
    out = flash_attn(*held, SCALE, live.handle)[0] if planned else flash_attn_local(*held, *of_documents())[0]
    [gradient] = torch.autograd.grad(out.square().sum(), held[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        gradient.sum().backward()


def test_some_inputs_need_no_gradients() -> None:
    """Frozen keys, for example."""
    live, (q, k, v) = alone(), tensors()
    expected = torch.autograd.grad(flash_attn(q, k, v, SCALE, live.handle)[0].square().sum(), [q])[0]
    out, *_ = flash_attn(q, k.detach(), v.detach(), SCALE, live.handle)

    assert torch.equal(torch.autograd.grad(out.square().sum(), [q])[0], expected)
    assert not flash_attn(*(x.detach() for x in (q, k, v)), SCALE, live.handle)[0].requires_grad
    with torch.no_grad():
        assert not flash_attn(q, k, v, SCALE, live.handle)[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(flash_attn(q, k, v, SCALE, live.handle)[0], out)
