"""Recomputed attention: what came from other ranks does not travel again, and every bit is the same."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distca_hf.comm.transport import Transport
from distca_hf.config import DistCAConfig
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan
from distca_hf.planning.transfers import key_transfers
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.op import flash_attn
from distca_hf.runtime.regions import RetainingRegion, retaining_contexts
from distca_hf.runtime.retention import Received, received_bytes
from distca_hf.testing import run_ranks
from support.parity import SPEC, live_plan
from support.plans import NUM_RANKS, anywhere, divided, placed, striped
from support.recomputing import LAYERS, Layers, Trained, expected_exchanges, train


GIB = 2**30
PLANS = [placed, anywhere, divided, striped]


def moving(make: Callable[[int], Plan]) -> Plan:
    """The first plan of a kind in which keys travel."""
    return next(plan for plan in map(make, range(100)) if len(key_transfers(plan)))


def trained(plan: Plan, num_chunks: int = 1, **settings: Any) -> list[Trained]:
    """A step of every rank."""
    config = DistCAConfig(kernel="reference", deterministic=True, **settings)
    return run_ranks(NUM_RANKS, lambda transport: train(Layers(plan, transport, config, num_chunks)))


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("make", PLANS)
def test_only_results_travel_again_and_all_bits_are_the_same(make: Callable[[int], Plan], num_chunks: int) -> None:
    plan = moving(make)
    kept, fetched = (trained(plan, num_chunks, kv_residency=setting) for setting in ("keep", "refetch"))
    for now, before in zip(kept, fetched, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(now.numbers, before.numbers, strict=True))
        assert (now.forward, now.backward) == expected_exchanges(plan, num_chunks, waits=True, keeps=True)
        assert (before.forward, before.backward) == expected_exchanges(plan, num_chunks, waits=False, keeps=False)


@pytest.mark.parametrize("make", PLANS)
def test_ranks_decide_alike_around_the_budget(make: Callable[[int], Plan]) -> None:
    """Received rows of all layers wait, or those of none do; what one layer needs until its backward is kept."""
    plan = moving(make)

    def most_bytes(transport: Transport) -> int:
        layers = Layers(plan, transport, DistCAConfig(kernel="reference"))
        return received_bytes(layers.live.facts, *layers.inputs)

    (most,) = set(run_ranks(NUM_RANKS, most_bytes))
    for spare, waits in ((0, True), (-1, False)):
        for rank in trained(plan, kv_budget_gib=(LAYERS * most + spare) / GIB):
            assert (rank.forward, rank.backward) == expected_exchanges(plan, 1, waits=waits, keeps=True)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Received keys of all calls of forward; nothing but references keeps them, no collector comes to their help."""
    keys: list[weakref.ref[torch.Tensor]] = []
    keep = RetainingRegion.keep

    def remembered(region: RetainingRegion, received: Received | None) -> None:
        assert received is not None
        keys.append(weakref.ref(received.keys))
        keep(region, received)

    monkeypatch.setattr(RetainingRegion, "keep", remembered)
    gc.collect()
    gc.disable()
    yield keys
    gc.enable()


@pytest.mark.parametrize("make", PLANS)
def test_nothing_stays_after_a_step(make: Callable[[int], Plan], held: list[weakref.ref[torch.Tensor]]) -> None:
    config = DistCAConfig(kernel="reference", kv_residency="keep")

    def run(transport: Transport) -> None:
        layers = Layers(moving(make), transport, config)
        for step in range(3):
            out = layers()
            if step == 1:
                continue  # backward never runs
            torch.autograd.grad(out.square().sum(), layers.inputs)
            del out

    run_ranks(NUM_RANKS, run)

    assert len(held) == 3 * NUM_RANKS * LAYERS
    assert not any(keys() is not None for keys in held)


def test_backward_may_run_twice(held: list[weakref.ref[torch.Tensor]]) -> None:
    def run(transport: Transport) -> tuple[bool, int]:
        layers = Layers(moving(placed), transport, DistCAConfig(kernel="reference", kv_residency="keep"))
        loss = layers().square().sum()
        before = transport.traffic.exchanges
        first, second = (torch.autograd.grad(loss, layers.inputs, retain_graph=True) for _ in range(2))
        return all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), transport.traffic.exchanges - before

    assert run_ranks(NUM_RANKS, run) == [(True, 2 * LAYERS)] * NUM_RANKS
    assert not any(keys() is not None for keys in held)


def test_more_attention_calls_than_before_are_an_error() -> None:
    calls = iter([1, 2])

    def differs(live: LivePlan, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(calls)):
            x = torch.tanh(flash_attn(x, x, x, SPEC, live.handle)[0])
        return layer(x)

    def run(transport: Transport) -> str:
        live = live_plan(place([4], 1), transport, DistCAConfig(kernel="reference"))
        x = torch.randn(4, 1, 4, requires_grad=True)
        region = functools.partial(differs, live, nn.Linear(4, 4))
        loss = checkpoint(region, x, use_reentrant=False, context_fn=retaining_contexts).sum()
        with pytest.raises(RuntimeError, match="more than the 1 calls of its forward pass") as error:
            loss.backward()
        return str(error.value)

    assert "kv_residency='refetch'" in run_ranks(1, run)[0]
