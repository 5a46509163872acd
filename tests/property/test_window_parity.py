"""Layers with windows and full layers of one micro-batch, through the operator, against exact attention in fp64."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig, Residency
from distca_hf.cost import CAUSAL_MASK, LayerMasks, Mask
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.runtime.layer_kinds import PinnedKinds
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.testing import attend_documents, rows_of_rank, run_ranks
from support.layouts import padding_rows, random_layout, random_plan, striped_layout
from support.parity import HEADS
from support.thorough import is_thorough


SCALE = 0.4
CPU = torch.device("cpu")


@dataclass
class Layer:
    """Differences of one layer on one rank, and its traffic."""

    window_tokens: int | None
    differences: list[float] = field(default_factory=list)
    exchanges: int = 0
    bytes_sent: int = 0


def live_plan(
    plan: Plan, transport: Transport, config: DistCAConfig, layer_masks: LayerMasks, num_chunks: int
) -> LivePlan:
    kinds = PinnedKinds.prepare(RoutedKinds.of(plan, transport.rank, num_chunks, layer_masks))
    return LivePlan(0, kinds.planned(CPU, plan.fingerprint), transport, config)


def run_layers(
    plan: Plan,
    windows: list[int | None],
    known: list[int | None],
    kv_residency: Residency,
    num_chunks: int,
    seed: int,
) -> list[list[Layer]]:
    """Of each rank, the layers: all forward, then all backward."""
    layout = plan.layout
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, groups, dim, value_dim = rng.choice([one for one in HEADS if one[1] % plan.tasks.head_groups == 0])
    tokens, lengths = int(layout.document_tokens.sum()), layout.document_tokens.tolist()
    shapes = ((heads, dim), (groups, dim), (groups, value_dim), (heads, value_dim))
    whole = [
        [torch.randn(tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes] for _ in windows
    ]
    softcap = rng.choice([0.0, 0.0, 0.7])
    sinks = torch.randn(heads, dtype=torch.float64, generator=generator) if rng.random() < 0.5 else None

    def expected(inputs: list[torch.Tensor], window: int | None) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        out = attend_documents(q, k, v, lengths, SCALE, window, softcap, sinks)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]

    exact = [expected(inputs, window) for inputs, window in zip(whole, windows, strict=True)]

    def run(transport: Transport) -> list[Layer]:
        config = DistCAConfig(kernel="reference", kv_residency=kv_residency)
        live = live_plan(plan, transport, config, tuple((Mask(window), 1) for window in known), num_chunks)
        rows, padding = rows_of_rank(layout, transport.rank), int(padding_rows(layout)[transport.rank])
        layers = [Layer(window) for window in windows]
        graphs = []
        for layer, inputs in zip(layers, whole, strict=True):
            before = transport.traffic.exchanges, transport.traffic.bytes_sent
            held = [torch.cat([x[rows], torch.full((padding, *x.shape[1:]), 1e9, dtype=x.dtype)]) for x in inputs]
            q, k, v = (x.requires_grad_() for x in held[:3])
            spec = AttentionSpec(SCALE, window_tokens=layer.window_tokens or 0, softcap=softcap)
            out, *_ = flash_attn(q, k, v, spec, live.handle, sinks_N=sinks)
            graphs.append((out, (q, k, v), held[3]))
            layer.exchanges = transport.traffic.exchanges - before[0]
            layer.bytes_sent = transport.traffic.bytes_sent - before[1]
        for layer, graph, want in reversed(list(zip(layers, graphs, exact, strict=True))):
            before = transport.traffic.exchanges, transport.traffic.bytes_sent
            out, inputs, dout = graph
            got = [out, *torch.autograd.grad(out, inputs, dout)]
            assert not any(x[len(rows) :].any() for x in got)
            layer.differences = [
                float((x[: len(rows)] - y[rows]).detach().abs().max()) if len(rows) else 0.0
                for x, y in zip(got, want, strict=True)
            ]
            layer.exchanges += transport.traffic.exchanges - before[0]
            layer.bytes_sent += transport.traffic.bytes_sent - before[1]
        return layers

    return run_ranks(layout.num_ranks, run)


def drawn_plan(seed: int, num_ranks: int) -> Plan:
    rng = random.Random(seed)
    kind = rng.choice(["in place", "moved", "striped"])
    if kind == "striped":
        return plan_in_place(striped_layout(rng, num_ranks), 2)
    layout = random_layout(rng, num_ranks, rng.choice([12, 40, 90]))
    return plan_in_place(layout) if kind == "in place" else random_plan(rng, layout, rng.choice([1, 2]))


@settings(max_examples=200 if is_thorough() else 30)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=3),
    kv_residency=st.sampled_from(["keep", "refetch", "auto"]),
    num_chunks=st.sampled_from([1, 3]),
    all_known=st.booleans(),
)
def test_every_kind_of_layer_is_exact(
    seed: int,
    num_ranks: int,
    windows: list[int | None],
    kv_residency: Residency,
    num_chunks: int,
    all_known: bool,
) -> None:
    """Whatever a plan moves for full layers, with sinks and softcap, and whether a window was known before the pass or
    not."""
    plan = drawn_plan(seed, num_ranks)
    known = windows if all_known else windows[:1]
    by_rank = run_layers(plan, windows, known, kv_residency, num_chunks, seed)
    for layers in zip(*by_rank, strict=True):
        assert max(max(layer.differences) for layer in layers) < 1e-10
        assert len({layer.exchanges for layer in layers}) == 1  # all ranks make the same exchanges
        window = layers[0].window_tokens
        if window is not None and window < plan.layout.longest_document_tokens:
            assert layers[0].exchanges in (0, 2 if kv_residency != "refetch" else 3)


def test_a_window_sends_its_halo_alone() -> None:
    """Bytes are those of the facts: keys and values of at most window - 1 tokens before each part, and gradients."""
    layout = Layout.from_segments([40, 6], [[(0, 0, 20)], [(0, 20, 40), (1, 0, 6)]])
    for window, halo in ((1, 0), (5, 4), (21, 20), (30, 20), (39, 20)):
        [left, right] = [layer for [layer] in run_layers(plan_in_place(layout), [window], [window], "keep", 1, seed=3)]
        assert (left.exchanges, right.exchanges) == ((2, 2) if halo else (0, 0))
        assert left.bytes_sent == right.bytes_sent  # keys one way, their gradients the other
        assert left.bytes_sent % max(halo, 1) == 0
        assert bool(left.bytes_sent) == bool(halo)


def test_a_window_as_long_as_every_document_is_none() -> None:
    layout = Layout.from_segments([12, 5], [[(0, 0, 9)], [(0, 9, 12), (1, 0, 5)]])
    kinds = RoutedKinds.of(plan_in_place(layout), 0, layer_masks=((CAUSAL_MASK, 1), (Mask(12), 4), (Mask(11), 2)))
    assert list(kinds.plans) == [CAUSAL_MASK, Mask(11)]
    assert [(facts.num_tokens, count) for facts, count in kinds.facts.kinds] == [(17, 5), (17, 2)]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_documents_of_several_parts_on_a_rank_share_halos(window: int) -> None:
    """Parts whose halos overlap, or that are held by the rank itself, read one copy of the keys."""
    layout = Layout.from_segments(
        [30], [[(0, 0, 4), (0, 9, 12), (0, 14, 15), (0, 16, 30)], [(0, 4, 9), (0, 12, 14), (0, 15, 16)]]
    )
    for layers in run_layers(plan_in_place(layout), [window], [None], "auto", 1, seed=window):
        assert max(layers[0].differences) < 1e-10
