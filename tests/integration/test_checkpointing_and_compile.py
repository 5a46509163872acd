"""The operator under activation checkpointing and `torch.compile`: same numbers, and saved attention runs once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import distca_hf
from support.compiling import forget_graphs, graph_breaks, graphs_made
from support.data import random_dataset
from support.models import tiny_model
from support.thorough import is_thorough


NUM_LAYERS = 2
TOKENS = 192


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _plain(model: nn.Module) -> None:
    pass


def _non_reentrant(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _reentrant(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def _selective(model: nn.Module) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_attention)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def _wrapped(model: nn.Module) -> None:
    """As Accelerate's fsdp_config activation_checkpointing does."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    layers = tuple({type(layer) for layer in model.model.layers})
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, layers))


def _steps(
    checkpoint: Callable[[nn.Module], None], compiled: bool, attention: str = "save", whole: bool = False
) -> tuple[list, list]:
    """Losses with gradient norms, and forward calls of attention, of three steps."""
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS, checkpointed_attention=attention)
    distca_hf.enable(model, plugin)
    checkpoint(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    if whole:
        model.compile(backend="aot_eager")
    numbers, calls = [], []
    for _, batch in zip(range(3), plugin.dataloader(random_dataset()), strict=False):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        numbers.append((loss.item(), norm.item()))
        calls.append((batch["distca_plan"].forward_pass.calls, batch["distca_plan"].forward_pass.backward_calls))
    return numbers, calls


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, float]]:
    return _steps(_plain, compiled=False)[0]


THOROUGH_WAYS = [
    pytest.param(_wrapped, "recompute", 2 * NUM_LAYERS, True, id="wrapper, recompute, compiled"),
    pytest.param(_reentrant, "save", 2 * NUM_LAYERS, True, id="reentrant, compiled"),
    pytest.param(_selective, "recompute", NUM_LAYERS, True, id="own selective, compiled"),
]


@pytest.mark.parametrize(
    ("checkpoint", "attention", "forward_calls", "compiled"),
    [
        pytest.param(_non_reentrant, "save", NUM_LAYERS, False, id="default"),
        pytest.param(_non_reentrant, "save", NUM_LAYERS, True, id="default, compiled"),
        pytest.param(_non_reentrant, "recompute", 2 * NUM_LAYERS, False, id="recompute"),
        pytest.param(_wrapped, "save", NUM_LAYERS, False, id="wrapper"),
        pytest.param(_reentrant, "save", 2 * NUM_LAYERS, False, id="reentrant"),
        pytest.param(_selective, "recompute", NUM_LAYERS, False, id="own selective"),
        *(THOROUGH_WAYS if is_thorough() else ()),
    ],
)
def test_numbers_are_equal_and_saved_attention_runs_once(
    checkpoint: Callable[[nn.Module], None],
    attention: str,
    forward_calls: int,
    compiled: bool,
    expected: list[tuple[float, float]],
) -> None:
    forget_graphs()
    numbers, calls = _steps(checkpoint, compiled, attention)

    for (loss, norm), (expected_loss, expected_norm) in zip(numbers, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert calls == [(forward_calls, NUM_LAYERS)] * 3
    assert graph_breaks() == []


@pytest.mark.parametrize(
    ("checkpoint", "whole"),
    [(_non_reentrant, False), (_wrapped, False), (_non_reentrant, True)],
    ids=["default", "wrapper", "compiled model"],
)
def test_attention_outputs_on_the_host_are_the_same(
    checkpoint: Callable[[nn.Module], None], whole: bool, expected: list[tuple[float, float]]
) -> None:
    torch._dynamo.reset()
    numbers, calls = _steps(checkpoint, compiled=False, attention="offload", whole=whole)

    for got, before in zip(numbers, expected, strict=True):
        assert got == (pytest.approx(before, rel=1e-5) if whole else before)
    assert calls == [(NUM_LAYERS, NUM_LAYERS)] * 3


def test_layers_share_their_graphs() -> None:
    """Torch makes 8 graphs of one function and no more; layers have their numbers all the same."""
    forget_graphs()
    model = tiny_model(num_hidden_layers=10).train()
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS)
    distca_hf.enable(model, plugin)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    batch = next(iter(plugin.dataloader(random_dataset())))
    model(**batch).loss.backward()

    assert graphs_made() == 1
    assert graph_breaks() == []
    assert [int(layer) for layer in batch["distca_plan"].forward_pass.layers] == list(range(10))


def test_reentrant_checkpointing_is_told_that_it_attends_twice(caplog: pytest.LogCaptureFixture) -> None:
    _steps(_reentrant, compiled=False)

    assert caplog.text.count("reentrant activation checkpointing recomputes attention") == 1
