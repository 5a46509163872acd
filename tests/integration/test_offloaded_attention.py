"""Saved attention outputs, on the host or not: the same numbers, attention runs once, nothing stays behind."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import modeling_utils

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.integrations import checkpointing
from distca_hf.integrations.checkpointing import HostCopy, OffloadedAttention
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.runtime import local_attention
from distca_hf.runtime.local_attention import Documents, flash_attn_local
from distca_hf.runtime.regions import RegionRun, saving_contexts
from support.counting import CountingKernel
from support.data import random_dataset
from support.models import tiny_model
from support.versions import offloads_inputs


NUM_LAYERS, TOKENS = 3, 192
Contexts = Callable[[], tuple[RegionRun[Any], RegionRun[Any]]]


def test_layers_compiled_with_their_checkpointing_are_refused() -> None:
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention="offload")
    distca_hf.enable(model, plugin)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[1].compile(backend="aot_eager")

    with pytest.raises(ConfigError, match="checkpointed_attention='offload' cannot be compiled"):
        model(**next(iter(plugin.dataloader(random_dataset()))))


class Regions:
    """Regions of two attention calls each, one after the other."""

    def __init__(self, number: int, contexts: Contexts | None = None) -> None:
        self.contexts, self.number = contexts or OffloadedAttention(), number
        self.x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(self) -> torch.Tensor:
        x = self.x
        for _ in range(self.number):
            x = checkpoint(self._twice, x, use_reentrant=False, context_fn=self.contexts)
        return x.square().sum()

    @staticmethod
    def _twice(x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
        for _ in range(2):
            out, _ = flash_attn_local(x, x, x, Documents.of(Spans(offsets, offsets, 4, 4)), AttentionSpec(0.5))
            x = x + torch.tanh(out)
        return x

    def expected(self) -> torch.Tensor:
        x = self.x
        for _ in range(self.number):
            x = self._twice(x)
        return torch.autograd.grad(x.square().sum(), self.x)[0]


def test_outputs_are_fetched_one_region_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region once, the last one first, and the one before as soon as a region has taken all it needs."""
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    for name in ("save", "fetch", "take"):
        method = getattr(checkpointing._HostRegion, name)

        def told(region: object, *args: object, name: str = name, method: object = method) -> object:
            waiting = name != "fetch" or region._fetched is None
            number = numbers.setdefault(id(region), len(numbers))
            if waiting:
                events.append((name, number))
            return method(region, *args)

        monkeypatch.setattr(checkpointing._HostRegion, name, told)
    regions = Regions(3)
    (gradient,) = torch.autograd.grad(regions.run(), regions.x)

    assert torch.equal(gradient, regions.expected())
    assert events[:6] == [("save", region) for region in (0, 0, 1, 1, 2, 2)]
    assert events[6:] == [
        ("fetch", 2),
        *[("take", 2), ("take", 2), ("fetch", 1)],
        *[("take", 1), ("take", 1), ("fetch", 0)],
        *[("take", 0), ("take", 0)],
    ]


@pytest.mark.parametrize("contexts", [OffloadedAttention(), saving_contexts])
def test_backward_may_run_twice(contexts: Contexts) -> None:
    regions = Regions(2, contexts)
    loss = regions.run()
    first, second = (torch.autograd.grad(loss, regions.x, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, second)
    assert torch.equal(first, regions.expected())


@pytest.mark.parametrize("contexts", [OffloadedAttention(), saving_contexts])
def test_regions_in_a_region_attend_once(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, forwards = Regions(2, contexts), []

    def kernel(*args: Any) -> CountingKernel:
        forwards.append(CountingKernel(choose(*args)))
        return forwards[-1]

    choose = local_attention._kernel
    monkeypatch.setattr(local_attention, "_kernel", kernel)
    loss = checkpoint(regions.run, use_reentrant=False, context_fn=contexts)
    (gradient,) = torch.autograd.grad(loss, regions.x)

    assert sum(one.forward_pairs > 0 for one in forwards) == 2 * 2
    assert torch.equal(gradient, regions.expected())


def test_a_graph_that_is_dropped_leaves_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[HostCopy]] = []
    method = checkpointing._HostRegion._to_host

    def kept(region: object, x: torch.Tensor) -> HostCopy:
        host = method(region, x)
        copies.append(weakref.ref(host))
        return host

    monkeypatch.setattr(checkpointing._HostRegion, "_to_host", kept)
    regions = Regions(2)
    loss = regions.run()
    assert all(copy() is not None for copy in copies)
    del loss
    gc.collect()

    assert len(copies) == 2 * 2 * 2  # regions, calls, outputs
    assert all(copy() is None for copy in copies)


def test_outputs_that_change_in_place_are_an_error() -> None:
    def changes(x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, len(x)], dtype=torch.int32)
        documents = Documents.of(Spans(offsets, offsets, len(x), len(x)))
        return flash_attn_local(x, x, x, documents, AttentionSpec(0.5))[0].mul_(2).tanh()

    x = torch.randn(4, 1, 4, requires_grad=True)
    loss = checkpoint(changes, x, use_reentrant=False, context_fn=saving_contexts).sum()

    with pytest.raises(RuntimeError, match="changed in place after it was saved for recomputation"):
        loss.backward()


@pytest.mark.parametrize("contexts", [OffloadedAttention(), saving_contexts])
def test_more_attention_calls_than_before_are_an_error(contexts: Contexts) -> None:
    calls = iter([1, 2])

    def differs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, len(x)], dtype=torch.int32)
        documents = Documents.of(Spans(offsets, offsets, len(x), len(x)))
        for _ in range(next(calls)):
            x = torch.tanh(flash_attn_local(x, x, x, documents, AttentionSpec(0.5))[0])
        return layer(x)

    x = torch.randn(4, 1, 4, requires_grad=True)
    loss = checkpoint(functools.partial(differs, nn.Linear(4, 4)), x, use_reentrant=False, context_fn=contexts).sum()

    with pytest.raises(RuntimeError, match="more than the 1 calls of its forward pass"):
        loss.backward()


def _gradients(checkpointed_attention: str, enable: Callable[[Any], None]) -> list[torch.Tensor]:
    """Gradients of a micro-batch of documents."""
    torch.manual_seed(0)
    model = tiny_model(num_hidden_layers=NUM_LAYERS).double().train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention=checkpointed_attention)
    distca_hf.enable(model, plugin)
    enable(model)
    model(**next(iter(plugin.dataloader(random_dataset())))).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@offloads_inputs
@pytest.mark.parametrize("checkpointed_attention", ["save", "offload", "recompute"])
def test_inputs_of_layers_may_wait_on_the_host_as_well(
    checkpointed_attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers moves what checkpointing saves; attention outputs are ours to move."""
    regions = []

    def unpinned(pin_memory: bool, **_: Any) -> save_on_cpu:  # no memory can be pinned without a GPU
        regions.append(save_on_cpu(pin_memory=False))
        return regions[-1]

    monkeypatch.setattr(modeling_utils, "save_on_cpu", unpinned)
    gradients = _gradients(checkpointed_attention, lambda model: model.gradient_checkpointing_enable(offload=True))

    assert len(regions) == NUM_LAYERS
    for own, plain in zip(gradients, _gradients("save", lambda model: None), strict=True):
        torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)
