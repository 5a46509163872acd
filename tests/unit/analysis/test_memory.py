"""Memory of a training step: beside measured peaks, and by hand."""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from distca_hf.analysis.decoder_size import DecoderSize, LayerSize
from distca_hf.analysis.fit import RankLoad, Room, largest_tokens
from distca_hf.analysis.memory import Memory, estimate_memory
from distca_hf.analysis.models import ModelShape, ModelSize, preset
from distca_hf.analysis.training_setup import TrainingSetup
from distca_hf.cost import Heads
from support.commands import REPOSITORY


def sizes_of(shape: ModelShape) -> DecoderSize:
    assert shape.size is not None
    return shape.size.decoder(shape.heads)


LLAMA = sizes_of(preset("llama3-8b"))
SMALL = Heads(query=2, key_value=1, dim=4, value_dim=4, groups=1)
SIZE = ModelSize.of_gated_layers(SMALL, layers=3, hidden_size=8, mlp_size=16, vocabulary=10).decoder(SMALL)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "scripts" / "benchmarks")
    return importlib.import_module("plan_estimates")


def test_memory_is_within_ten_percent_of_measured_peaks(measured: ModuleType) -> None:
    """Every peak of two and four H200s in docs/benchmarks whose documents are known."""
    peaks = measured.read_peaks()
    assert len(peaks) == 32
    off = {
        f"{row.gpus} GPUs, {row.documents}, {row.model}, {row.way}, {row.gib:g} GiB": (
            measured.estimated_gib(row) / row.gib - 1
        )
        for row in peaks
    }
    assert {row: share for row, share in off.items() if abs(share) > 0.10} == {}, off
    page = (REPOSITORY / "docs" / "benchmarks" / "training.md").read_text()
    assert f"off by {min(off.values()):+.1%} to {max(off.values()):+.1%}." in page


def test_without_ligers_loss_logits_are_counted() -> None:
    memory = estimate_memory(LLAMA, TrainingSetup(8), 10_000)
    assert memory.computed == memory.head == (12 * 128_256 + 8 * 4096) * 10_000


def test_received_keys_stay_as_long_as_the_budget_holds_those_of_all_layers() -> None:
    def received(budget_bytes: float) -> int:
        setup = TrainingSetup(8, kv_budget_bytes=budget_bytes)
        return estimate_memory(SIZE, setup, 100, received_bytes=50).received

    assert received(150) == 200  # three layers, and one layer's gradients
    assert received(149) == 100


def test_parts_are_the_peak() -> None:
    """Where the logits are more than a layer, the layer is not counted, and the other way round."""
    plain = estimate_memory(LLAMA, TrainingSetup(8), 65536, received_bytes=1000)
    fused = estimate_memory(LLAMA, TrainingSetup(8, liger=True), 65536, received_bytes=1000)

    assert (plain.layer, plain.received) == (0, 32 * 1000)
    assert plain.gathered == 2 * 2 * 128_256 * 4096  # the embedding and the head
    assert (fused.head, fused.received) == (0, 33 * 1000)
    assert fused.gathered == plain.gathered + 2 * (128_256 * 4096 + 3 * 218_103_808)
    for memory in (plain, fused):
        in_words = memory.as_json()
        total = in_words.pop("total")
        assert total == memory.backward == sum(in_words[name] for name in PARTS)


PARTS = ("parameters", "optimizer", "gradients", "gathered", "kept", "layer", "head", "received")


def test_zero3_keeps_gradients_in_bf16_and_makes_others_for_the_optimizer() -> None:
    memory = estimate_memory(LLAMA, TrainingSetup(8, "zero3", liger=True), 65536)

    assert memory.state == (2 + 4 + 8 + 2) * (LLAMA.parameters // 8)
    assert memory.optimizer_step == memory.state + 4 * (LLAMA.parameters // 8)
    assert memory.gathered == 4 * 128_256 * 4096


def test_accumulation_keeps_whole_gradients_unless_they_are_synced() -> None:
    """Those of layer and head are then added to what is there."""

    def of(sharding: Any, micro_steps: int, tensor_ranks: int = 1) -> Memory:
        setup = TrainingSetup(8, sharding, liger=True, micro_steps=micro_steps, tensor_ranks=tensor_ranks)
        return estimate_memory(LLAMA, setup, 65536)

    weights, one = LLAMA.parameters, of("fsdp2", 1)
    assert of("fsdp2_synced", 1) == one
    assert of("fsdp2", 4).gradients == 2 * weights
    assert of("fsdp2", 4, tensor_ranks=2).gradients == weights
    assert of("fsdp2_synced", 4).gradients == 4 * (weights // 8)
    assert one.gathered - of("fsdp2", 4).gathered == 2 * (LLAMA.head_parameters + LLAMA.layers[0].parameters)
    assert of("fsdp2_synced", 4).gathered == one.gathered
    assert of("zero3", 4) == of("zero3", 1)
    assert of("fsdp2", 4).optimizer_step == one.optimizer_step


def test_layers_with_windows_receive_their_halos() -> None:
    (layer,) = SIZE.layers
    kinds = (replace(layer, count=1), replace(layer, count=2, window_tokens=4))
    windows = replace(SIZE, layers=kinds)
    halo = 2 * 3 * 16  # two parts of a rank, three tokens each, keys and values of one head of 4 numbers in bf16

    assert estimate_memory(windows, TrainingSetup(8), 100, received_bytes=1000).received == 2 * 1000 + 2 * halo
    assert estimate_memory(windows, TrainingSetup(8), 100, received_bytes=50).received == 4 * 50


def test_the_largest_layer_is_the_peak() -> None:
    small, large = LayerSize(1, 100, 4.0, SMALL), LayerSize(1, 900, 64.0, None)
    size = DecoderSize(8, 0, 1000, 0, (small, large))
    memory = estimate_memory(size, TrainingSetup(2), 1000)

    assert memory.gathered == 2 * 3 * 900
    assert memory.layer == round(1000 * large.computed_bytes(8, TrainingSetup(1)))
    assert memory.kept == 1000 * (2 * 16 + 2 * 8 + 4 * 2)  # two inputs, one output of attention


def test_the_largest_tokens_that_fit_are_found() -> None:
    setup = TrainingSetup(8, liger=True)

    def total(tokens: int) -> int:
        return estimate_memory(LLAMA, setup, tokens, 1000 * tokens // 65536).total

    load = RankLoad(LLAMA, 65536, 1000)
    largest = largest_tokens(load, setup, Room(72 * 2**30))
    assert total(largest) <= 72 * 2**30 < total(largest + 1024)
    assert largest_tokens(load, setup, Room(2**30)) == 0
