"""Layers that are alike share what was found out for the first of them, and layers of other tensors do not."""

import random
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca_hf.comm.transport import LocalTransport, Transport
from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import NEW, AttentionSpec, Inputs, Outputs, Room, Spans
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime import kernel_calls, remote_kv
from distca_hf.runtime.attention import Attended, attend, attend_backward
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.regions import retaining_contexts
from distca_hf.runtime.retention import Kept
from distca_hf.testing import attend_documents, rows_of_rank, run_ranks
from support.layouts import SCATTERED, padding_rows, random_layout, random_plan
from support.parity import SPEC, live_plan


HEADS, KV_HEADS, DIM = 4, 2, 8


def tensors(rows: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(rows, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def alone(rows: int = 5) -> LivePlan:
    """A plan of one rank with two documents, and padding if there are more rows."""
    layout = Layout.from_segments([3, 2], [[(0, 0, 3), (1, 0, 2)]], [rows])
    return live_plan(layout, LocalTransport(), DistCAConfig(kernel="reference"))


class Looks:
    """A kernel that notes where queries and keys of its calls lie, and whether it got room for results."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        self.calls.append((inputs.q_TNH.data_ptr(), inputs.k_SGH.data_ptr(), room is not NEW))
        out, lse = room.made(inputs)
        return out.zero_(), lse.zero_()


@pytest.mark.parametrize(("rows", "gets_room"), [(5, False), (8, True)], ids=["all rows", "padding"])
def test_rows_are_read_where_they_lie_and_a_call_that_writes_all_makes_room_itself(rows: int, gets_room: bool) -> None:
    """So no layer copies them."""
    plan, kernel, (q, k, v) = alone(rows), Looks(), tensors(rows)
    plan.lookup.kernel = lambda *given: kernel  # type: ignore[method-assign,assignment]
    out, lse, _ = attend(q, k, v, SPEC, plan)

    assert kernel.calls == [(q.data_ptr(), k.data_ptr(), gets_room)]
    assert (out.shape, lse.shape) == ((rows, HEADS, DIM), (rows, HEADS))
    assert not out[5:].any()


def lying_apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with other strides."""
    return x.contiguous() if x.ndim < 2 else x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.usefixtures("steps_are_checked")
@pytest.mark.parametrize("groups", [0, 1, KV_HEADS], ids=["in place", "queries move", "some heads move"])
@pytest.mark.parametrize("seed", range(4))
def test_backward_has_the_same_bits_however_saved_rows_lie(seed: int, groups: int) -> None:
    """Hooks of saved tensors may bring them back with other strides, in some layers alone."""
    rng = random.Random(seed)
    layout = random_layout(rng, 2)
    plan = random_plan(rng, layout, groups) if groups else plan_in_place(layout)

    def run(transport: Transport) -> None:
        def live() -> LivePlan:
            return live_plan(layout, transport, DistCAConfig(kernel="reference"), plan=plan)

        of_all_layers = live()
        generator = torch.Generator().manual_seed(transport.rank)
        for other_strides in (False, True, False, True):
            q, k, v = (x.normal_(generator=generator) for x in tensors(int(layout.rank_rows[transport.rank])))
            dout = torch.randn(q.shape, dtype=q.dtype, generator=generator)
            gradients = []
            for one in (of_all_layers, live()):
                out, lse, kept = attend(q, k, v, SPEC, one)
                saved = q, k, v, out, lse
                if other_strides and one is of_all_layers:
                    saved = tuple(map(lying_apart, saved))
                    kept = Kept(
                        *map(lying_apart, (kept.keys, kept.remote_q, kept.remote_out, kept.remote_lse)), kept.slot
                    )
                gradients.append(attend_backward(dout, Attended(*saved), kept, SPEC, one))
            for got, expected in zip(*gradients, strict=True):
                assert torch.equal(got, expected)

    run_ranks(2, run)


# --- layers that differ


def kinds_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [(x.device, x.dtype, x.shape, x.stride()) for x in tensors]


def checked(prepare: Callable[..., Callable[..., object]], prepared_for: Callable[..., list[object]]) -> Any:
    """Returns a function that prepares steps which refuse tensors unlike those that they were prepared for. GPUs do
    not look at them again, and would write anywhere."""

    def prepare_checked(*given: Any) -> Callable[..., object]:
        step, kinds = prepare(*given), prepared_for(*given)

        def run(*tensors: Any) -> object:
            flat = [x for given in tensors for x in (given if isinstance(given, tuple) else (given,))]
            assert kinds_of(flat) == kinds
            return step(*tensors)

        return run

    return prepare_checked


@pytest.fixture
def steps_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: tuple[tuple[ModuleType, str, Callable[..., list[object]]], ...] = (
        (remote_kv, "prepare_copy", lambda sources, rows, targets, places: kinds_of([*sources, *targets])),
        (remote_kv, "prepare_add", lambda *given: kinds_of(given[:3])),
        (kernel_calls, "prepare_merge", lambda *given: kinds_of(given[:4])),
        (kernel_calls, "view_of", lambda part, whole: kinds_of([whole])),
    )
    for module, name, prepared_for in prepared:
        monkeypatch.setattr(module, name, checked(getattr(module, name), prepared_for))


# Query heads, KV heads, dimension; window; whether heads lie apart in memory; whether queries need gradients; whether
# attention is recomputed. Some layers differ in one of them alone.
UNLIKE = (
    ((4, 2, 8), 0, False, True, False),
    ((4, 2, 8), 0, True, True, False),
    ((2, 2, 8), 0, False, True, True),
    ((4, 2, 4), 3, False, False, False),
    ((4, 2, 8), 5, False, True, True),
    ((4, 2, 8), 0, False, False, False),
)


@pytest.mark.usefixtures("steps_are_checked")
@pytest.mark.parametrize("moves", [False, True], ids=["in place", "queries move"])
@pytest.mark.parametrize("seed", range(4))
def test_unlike_layers_of_one_plan_are_exact(seed: int, moves: bool) -> None:
    """In two passes, and differentiated in any order."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layout = random_layout(rng, 3)
    plan = random_plan(rng, layout) if moves else plan_in_place(layout)
    layers = [rng.choice(UNLIKE) for _ in range(4)] + rng.sample(UNLIKE, len(UNLIKE))
    order = rng.sample(range(len(layers)), len(layers))
    tokens, lengths = int(layout.document_tokens.sum()), layout.document_tokens.tolist()
    whole = [
        [
            torch.randn(tokens, heads, dim, dtype=torch.float64, generator=generator)
            for heads in (num_heads, groups, groups, num_heads)
        ]
        for (num_heads, groups, dim), *_ in layers
    ]

    def run(transport: Transport) -> None:
        live = live_with_windows(plan, transport, DistCAConfig(kernel="reference"))
        rows, padding = rows_of_rank(layout, transport.rank), int(padding_rows(layout)[transport.rank])
        graphs = []
        for (_, window, apart, q_trains, recomputes), inputs in zip(layers, whole, strict=True):
            held = [torch.cat([x[rows], x.new_full((padding, *x.shape[1:]), 1e9)]) for x in inputs]
            lying = [x.transpose(0, 1).contiguous().transpose(0, 1) if apart else x for x in held[:3]]
            q, k, v = (x.requires_grad_(q_trains or number > 0) for number, x in enumerate(lying))

            def layer(*q_k_v: torch.Tensor, window: int = window) -> torch.Tensor:
                return flash_attn(*q_k_v, SPEC._replace(window_tokens=window), live.handle)[0]

            if recomputes:
                out = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=retaining_contexts)
            else:
                out = layer(q, k, v)
            graphs.append((out, [x for x in (q, k, v) if x.requires_grad], held[3]))
        for number in order:
            out, trained, dout = graphs[number]
            got = [out, *torch.autograd.grad(out, trained, dout)]
            for x, want in zip(got, [exact[number][0], *exact[number][-len(trained) :]], strict=True):
                torch.testing.assert_close(x[: len(rows)].detach(), want[rows], atol=1e-10, rtol=0)

    exact = []
    for (_, window, *_), inputs in zip(layers, whole, strict=True):
        q_k_v = [x.clone().requires_grad_() for x in inputs[:3]]
        out = attend_documents(*q_k_v, lengths, SPEC.scale, window or None)
        exact.append([out.detach(), *torch.autograd.grad(out, q_k_v, inputs[3])])
    run_ranks(3, run)


def live_with_windows(plan: Plan, transport: Transport, config: DistCAConfig) -> LivePlan:
    kinds, cpu = PinnedKinds.prepare(RoutedKinds.of(plan, transport.rank, 2)), torch.device("cpu")
    return LivePlan(0, kinds.planned(cpu, plan.fingerprint), transport, config)


def test_what_layers_share_holds_no_tensor_of_a_layer_and_ends_with_the_plan() -> None:
    """Without the collector of cycles: it might run a long time after a step."""

    def run(transport: Transport) -> list[object]:
        plan = plan_in_place(SCATTERED)
        live = live_with_windows(plan, transport, DistCAConfig(kernel="reference", plans_in_flight=1))
        of_layers = []
        for window in (0, 0, 3):
            held = [x.requires_grad_() for x in tensors(int(SCATTERED.rank_rows[transport.rank]))]
            out, lse, *_ = flash_attn(*held, SPEC._replace(window_tokens=window), live.handle)
            out.sum().backward()
            of_layers += [weakref.ref(x) for x in (*held, out, lse)]
        del held, out, lse
        left: list[object] = [one() for one in of_layers]
        kept = [weakref.ref(live), *[weakref.ref(one.plan.forward.send_rows) for one in live.kinds]]
        live_with_windows(plan, transport, live.config)  # takes its place in the register
        del live
        return left + [one() for one in kept]

    for left in run_ranks(2, run):
        assert not any(one is not None for one in left)
