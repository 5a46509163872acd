"""What checkpointed layers keep, on the host or not: the same numbers, attention runs once, nothing is left over."""

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
from distca_hf.integrations.offload import HostRegion, OffloadedLayers, OnHost
from distca_hf.kernels.interface import AttentionSpec, Spans
from distca_hf.runtime import local_attention
from distca_hf.runtime.local_attention import Documents, flash_attn_local
from distca_hf.runtime.regions import saving_contexts
from support.checkpointing import checkpointing_arguments
from support.counting import CountingKernel
from support.data import random_dataset
from support.models import tiny_model
from support.versions import offloads_inputs


NUM_LAYERS, TOKENS = 3, 192
Run = Callable[..., Any]


def saving(function: Run, *args: Any) -> Any:
    """Runs a checkpointed function whose attention outputs stay on the device."""
    return checkpoint(function, *args, use_reentrant=False, context_fn=saving_contexts)


def offloading(layers: OffloadedLayers | None = None) -> Run:
    """Runs checkpointed functions of which everything waits on the host."""
    return functools.partial((layers or OffloadedLayers()).run, functools.partial(checkpoint, use_reentrant=False))


BOTH = pytest.mark.parametrize("make", [offloading, lambda: saving], ids=["offloading", "saving"])


def test_layers_compiled_with_their_checkpointing_are_refused() -> None:
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention="offload")
    distca_hf.enable(model, plugin)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[1].compile(backend="aot_eager")

    with pytest.raises(ConfigError, match="checkpointed_attention='offload' cannot be compiled"):
        model(**next(iter(plugin.dataloader(random_dataset()))))


def test_reentrant_checkpointing_is_refused() -> None:
    """It keeps inputs where no hook sees them: the user would run out of the memory that was to be saved."""
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention="offload")
    distca_hf.enable(model, plugin)
    model.gradient_checkpointing_enable({"use_reentrant": True})

    with pytest.raises(ConfigError, match="checkpointed_attention='offload' needs use_reentrant=False"):
        model(**next(iter(plugin.dataloader(random_dataset()))))


@pytest.mark.parametrize("form", ["", "selective"])
def test_offloading_of_nothing_is_said(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention="offload")
    distca_hf.enable(model, plugin)
    if form:
        model.gradient_checkpointing_enable(checkpointing_arguments(form)["gradient_checkpointing_kwargs"])
    for _, batch in zip(range(2), plugin.dataloader(random_dataset()), strict=False):
        model(**batch).loss.backward()

    assert sum("no layer is checkpointed" in record.getMessage() for record in caplog.records) == 1


def test_given_batches_on_one_rank_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Size] = []
    send = OffloadedLayers.send
    monkeypatch.setattr(OffloadedLayers, "send", lambda layers, x: (sent.append(x.shape), send(layers, x))[1])
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    distca_hf.enable(model, distca_hf.DistCAPlugin(checkpointed_attention="offload"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.arange(40)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()

    assert len(sent) == 3 * NUM_LAYERS  # inputs, attention outputs, log-sum-exps


class Regions:
    """Regions of two attention calls each, one after the other."""

    def __init__(self, number: int, run: Run | None = None) -> None:
        self.run_one, self.number = run or offloading(), number
        self.x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(self) -> torch.Tensor:
        x = self.x
        for _ in range(self.number):
            x = self.run_one(self._twice, x)
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


def test_regions_are_fetched_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region once, the last one first, and the one before as soon as a region has taken all it needs."""
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    for name in ("save_input", "save", "fetch", "take_input", "take"):
        method = getattr(HostRegion, name)

        def told(region: object, *args: object, name: str = name, method: Run = method) -> object:
            if not isinstance(args[0] if args else None, tuple) or name == "save":  # an input that stays on the device
                events.append((name, numbers.setdefault(id(region), len(numbers))))
            result = method(region, *args)
            if isinstance(result, tuple) and name == "save_input":
                events.pop()
            return result

        monkeypatch.setattr(HostRegion, name, told)
    regions = Regions(3)
    (gradient,) = torch.autograd.grad(regions.run(), regions.x)

    assert torch.equal(gradient, regions.expected())
    forward = [(name, region) for region in (0, 1, 2) for name in ("save_input", "save", "save")]
    assert events == [
        *forward,
        *[("take_input", 2), ("fetch", 2)],
        *[("take", 2), ("take", 2), ("fetch", 1)],
        *[("take_input", 1), ("take", 1), ("take", 1), ("fetch", 0)],
        *[("take_input", 0), ("take", 0), ("take", 0)],
    ]


def test_a_region_without_attention_fetches_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[HostRegion] = []
    fetch = HostRegion.fetch
    monkeypatch.setattr(HostRegion, "fetch", lambda region: (fetched.append(region), fetch(region))[1])
    run, x = offloading(), torch.randn(6, requires_grad=True)
    run(torch.sin, run(torch.cos, run(torch.exp, x))).sum().backward()

    assert len(fetched) == len(set(fetched)) == 3


def test_only_inputs_with_a_gradient_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are the same tensor in all layers, which is kept once if it stays where it is."""
    sent: list[torch.Size] = []
    send = OffloadedLayers.send
    monkeypatch.setattr(OffloadedLayers, "send", lambda layers, x: (sent.append(x.shape), send(layers, x))[1])
    x, positions = torch.randn(6, requires_grad=True), torch.arange(7.0)
    offloading()(lambda x, positions: x.exp() * positions.sum(), x, positions).sum().backward()

    assert sent == [(6,)]
    torch.testing.assert_close(x.grad, 21 * x.detach().exp())


@BOTH
def test_backward_may_run_twice(make: Callable[[], Run]) -> None:
    regions = Regions(2, make())
    loss = regions.run()
    first, second = (torch.autograd.grad(loss, regions.x, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, second)
    assert torch.equal(first, regions.expected())


@BOTH
def test_two_passes_may_run_before_backward(make: Callable[[], Run]) -> None:
    run = make()
    passes = [Regions(2, run) for _ in range(2)]
    losses = [regions.run() for regions in passes]

    for regions, loss in zip(passes, losses, strict=True):
        assert torch.equal(torch.autograd.grad(loss, regions.x)[0], regions.expected())


@BOTH
def test_regions_in_a_region_attend_once(make: Callable[[], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    regions, forwards = Regions(2, run), list[CountingKernel]()

    def kernel(*args: Any) -> CountingKernel:
        forwards.append(CountingKernel(choose(*args)))
        return forwards[-1]

    choose = local_attention._kernel
    monkeypatch.setattr(local_attention, "_kernel", kernel)
    (gradient,) = torch.autograd.grad(run(regions.run), regions.x)

    assert sum(one.forward_pairs > 0 for one in forwards) == 2 * 2
    assert torch.equal(gradient, regions.expected())


def test_a_graph_that_is_dropped_leaves_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[OnHost]] = []
    send = OffloadedLayers.send

    def kept(layers: OffloadedLayers, x: torch.Tensor) -> OnHost:
        host = send(layers, x)
        copies.append(weakref.ref(host))
        return host

    monkeypatch.setattr(OffloadedLayers, "send", kept)
    regions = Regions(2)
    loss = regions.run()
    assert all(copy() is not None for copy in copies)
    del loss
    gc.collect()

    assert len(copies) == 2 * (1 + 2 * 2)  # regions; the input; calls, outputs
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


@BOTH
def test_more_attention_calls_than_before_are_an_error(make: Callable[[], Run]) -> None:
    calls = iter([1, 2])

    def differs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, len(x)], dtype=torch.int32)
        documents = Documents.of(Spans(offsets, offsets, len(x), len(x)))
        for _ in range(next(calls)):
            x = torch.tanh(flash_attn_local(x, x, x, documents, AttentionSpec(0.5))[0])
        return layer(x)

    x = torch.randn(4, 1, 4, requires_grad=True)
    loss = make()(functools.partial(differs, nn.Linear(4, 4)), x).sum()

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
