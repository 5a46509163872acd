"""Operators behave as torch expects them to: it checks schema, gradients, shapes and compilation itself."""

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig, KernelName, Residency
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.kernels.interface import Spans
from distca_hf.layout import Layout
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.local_attention import Documents, flash_attn_local
from distca_hf.runtime.op import flash_attn, flash_attn_backward
from distca_hf.testing import run_ranks
from support.layouts import SCATTERED, random_plan
from support.parity import SPEC, live_plan


HEADS, KV_HEADS, DIM = 4, 2, 8
TOKENS = 12


def tensors(*, requires_grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(TOKENS, heads, DIM, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def alone(kernel: KernelName = "reference") -> LivePlan:
    """A plan of one rank with two documents."""
    layout = Layout.from_segments([8, 4], [[(0, 0, 8), (1, 0, 4)]])
    return live_plan(layout, LocalTransport(), DistCAConfig(kernel=kernel))


def of_documents() -> tuple[Any, ...]:
    offsets = torch.tensor([0, 8, 12], dtype=torch.int32)
    return Documents.of(Spans(offsets, offsets, 8, 8)), SPEC, "reference"


def sinks(requires_grad: bool = True) -> torch.Tensor:
    return torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("sinks_N", [None, sinks()], ids=["none", "trained"])
@pytest.mark.parametrize("rows", [None, [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 0, 0]], ids=["all rows", "some rows"])
def test_local_attention_passes_the_checks_of_torch(
    requires_grad: bool, sinks_N: torch.Tensor | None, rows: list[int] | None
) -> None:
    """Also with tensors of documents that are longer than they have to be."""
    held = tensors(requires_grad=requires_grad)
    count = 12 if rows is None else 10
    offsets = torch.tensor([0, 6, count, *([] if rows is None else [0, 0])], dtype=torch.int32)
    taken = None if rows is None else torch.tensor(rows)
    documents = Documents(offsets, offsets, torch.tensor([2, 6, 6, count, count]), taken, taken)
    given = *documents, [*SPEC], "reference", sinks_N
    torch.library.opcheck(torch.ops.distca.flash_attn_local.default, (*held, *given))


def test_rows_attend_as_if_there_were_no_others() -> None:
    q, k, v = tensors(requires_grad=True)
    of_queries, of_keys = torch.tensor([2, 3, 7, 8]), torch.tensor([0, 1, 2, 3, 6, 7, 8])
    offsets = [torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 2, 4], [0, 4, 7])]
    taken = q[of_queries], k[of_keys], v[of_keys]
    expected, _ = flash_attn_local(*taken, Documents.of(Spans(*offsets, 2, 4)), SPEC, "reference")
    expected.backward(torch.ones_like(expected))
    gradients = [x.grad for x in (q, k, v)]

    longer = [torch.cat([x, x.new_zeros(3)]) for x in (*offsets, of_queries, of_keys)]
    documents = Documents(longer[0], longer[1], torch.tensor([2, 2, 4, 4, 7]), longer[2], longer[3])
    again = tensors(requires_grad=True)
    out, lse = flash_attn_local(*again, documents, SPEC, "reference")
    out.backward(torch.ones_like(out))

    assert torch.equal(out[of_queries], expected)
    others = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, of_queries, False)
    assert not out[others].any()
    assert not lse[:, others].any()
    torch.testing.assert_close([x.grad for x in again], gradients)


def test_plans_are_refused_in_cuda_graphs() -> None:
    from torch._inductor import config

    shapes = [torch.empty(TOKENS, heads, DIM, device="meta") for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with config.patch("triton.cudagraphs", True), pytest.raises(UnsupportedAttentionError, match="reduce-overhead"):
        flash_attn(*shapes, SPEC, 0)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("sinks_N", [None, sinks()], ids=["no sinks", "sinks"])
def test_planned_attention_passes_the_checks_of_torch(requires_grad: bool, sinks_N: torch.Tensor | None) -> None:
    live = alone()
    held = tensors(requires_grad=requires_grad)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = *held, [*SPEC], live.handle, None, requires_grad, sinks_N
    torch.library.opcheck(torch.ops.distca.flash_attn.default, given, test_utils=checks)


class Seen(TorchDispatchMode):
    """Notes the operators of ours that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "distca":
            self.operators.append(str(function))
        return function(*args, **(kwargs or {}))


def test_what_is_not_dispatched_is_the_operator_all_the_same() -> None:
    """Values and gradients; and with a mode there is none that does not see it."""
    documents, spec, kernel = of_documents()
    live = alone()
    # The operator itself has no defaults, and takes no tuples.
    for attention, given, of_operator in (
        (flash_attn_local, (documents, spec, kernel), (*documents, [*SPEC], kernel, None)),
        (flash_attn, (SPEC, live.handle), ([*SPEC], live.handle, None, True, None)),
    ):
        name = "flash_attn_local" if attention is flash_attn_local else "flash_attn"
        operator = getattr(torch.ops.distca, name).default
        results = []
        for call, arguments in ((attention, given), (operator, of_operator)):
            held = tensors()
            out = call(*held, *arguments)[0]
            results.append([out, *torch.autograd.grad(out.square().sum(), held)])
        with Seen() as seen:
            held = tensors()
            out = attention(*held, *given)[0]
            results.append([out, *torch.autograd.grad(out.square().sum(), held)])

        assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))
        assert seen.operators == [f"distca.{name}.default", f"distca.{name}_backward.default"]


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_may_be_batched(planned: bool) -> None:
    """By torch's older vmap, of which only the dispatcher knows."""
    live, held = alone(), tensors()
    out = flash_attn(*held, SPEC, live.handle)[0] if planned else flash_attn_local(*held, *of_documents())[0]
    directions = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, held, directions, is_grads_batched=True, retain_graph=True)
    for at, direction in enumerate(directions):
        expected = torch.autograd.grad(out, held, direction, retain_graph=True)
        assert all(torch.allclose(batch[at], one) for batch, one in zip(together, expected, strict=True))


def test_values_that_are_still_to_be_negated_are() -> None:
    q, k, v = tensors(requires_grad=False)
    lazy = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert lazy.is_neg()
    assert torch.equal(flash_attn_local(lazy, k, v, *of_documents())[0], flash_attn_local(q, k, v, *of_documents())[0])


def test_profiles_name_the_operator() -> None:
    live, held = alone(), tensors()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flash_attn(*held, SPEC, live.handle)

    assert "distca::flash_attn" in {event.name for event in profile.events()}


def test_tensors_of_other_kinds_are_dispatched() -> None:
    """Those without values get shapes, and subclasses of Tensor decide themselves."""
    live = alone()
    for kind in (torch.device("meta"), FakeTensorMode()):
        with kind:
            held = [torch.empty(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            offsets = torch.empty(3, dtype=torch.int32)
            documents = Documents.of(Spans(offsets, offsets, 8, 8))
        out, lse = flash_attn_local(*held, documents, SPEC, "auto")
        assert (out.shape, lse.shape) == ((TOKENS, HEADS, DIM), (HEADS, TOKENS))
    assert live.forward_pass.calls == 0

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return str(function)

    q, k, v = tensors()
    assert "flash_attn" in flash_attn(q.as_subclass(Mine), k, v, SPEC, live.handle)


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
        forward = flash_attn(q, k, v, SPEC, live.handle)
        assert (kv_residency == "keep") == any(len(kept) for kept in forward[2:])
        assert_apart(q, k, v, *forward)
        dout = torch.randn_like(q)
        assert_apart(q, k, v, *forward, dout, *flash_attn_backward(dout, q, k, v, *forward, [*SPEC], live.handle))

    run_ranks(2, run)


def assert_apart(*tensors: torch.Tensor) -> None:
    begins = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    assert len(set(begins)) == len(begins)


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_have_no_gradients(planned: bool) -> None:
    live, held = alone(), tensors()
    out = flash_attn(*held, SPEC, live.handle)[0] if planned else flash_attn_local(*held, *of_documents())[0]
    [gradient] = torch.autograd.grad(out.square().sum(), held[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        gradient.sum().backward()


def test_some_inputs_need_no_gradients() -> None:
    """Frozen keys, for example."""
    live, (q, k, v) = alone(), tensors()
    expected = torch.autograd.grad(flash_attn(q, k, v, SPEC, live.handle)[0].square().sum(), [q])[0]
    out, *_ = flash_attn(q, k.detach(), v.detach(), SPEC, live.handle)

    assert torch.equal(torch.autograd.grad(out.square().sum(), [q])[0], expected)
    assert not flash_attn(*(x.detach() for x in (q, k, v)), SPEC, live.handle)[0].requires_grad
    with torch.no_grad():
        assert not flash_attn(q, k, v, SPEC, live.handle)[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(flash_attn(q, k, v, SPEC, live.handle)[0], out)


# --- forward-mode derivatives


def _local(*given: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 8, TOKENS], dtype=torch.int32)
    output: torch.Tensor = flash_attn_local(*given, Documents.of(Spans(offsets, offsets, 8, 8)), SPEC, "reference")[0]
    return output


def _planned(*given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = flash_attn(*given, SPEC, alone().handle)[0]
    return output


def _by_torch_func(derive: Any, x: torch.Tensor) -> None:
    torch.func.jvp(derive, (x,), (torch.ones_like(x),))


def _by_dual_tensors(derive: Any, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        derive(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("attend", [_local, _planned])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("how", [_by_torch_func, _by_dual_tensors])
def test_forward_derivatives_are_refused_instead_of_lost(attend: Any, at: int, requires_grad: bool, how: Any) -> None:
    given = tensors(requires_grad=requires_grad)
    with pytest.raises(UnsupportedAttentionError, match=r"distca::flash_attn.* forward-mode derivatives"):
        how(lambda x: attend(*given[:at], x, *given[at + 1 :]), given[at])


@pytest.mark.parametrize("attend", [_local, _planned])
def test_a_dual_level_without_derivatives_through_attention_is_no_reason_to_refuse(attend: Any) -> None:
    given = tensors()
    with forward_ad.dual_level():
        inside = attend(*given)

    assert torch.equal(inside, attend(*given))
