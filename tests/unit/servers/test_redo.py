"""Attempts at optimizer steps of a loop."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distca_hf
from distca_hf.errors import ConfigError
from distca_hf.servers.redo import attempts
from support.data import random_dataset
from support.models import tiny_model
from support.redoing import CAPACITY_TOKENS, Script, ScriptedContext, break_attention, initial_model


def enabled_model(plugin: distca_hf.DistCAPlugin) -> nn.Module:
    model = initial_model().train()
    distca_hf.enable(model, plugin)
    return model


def train(script: Script | None) -> tuple[list[float], list[torch.Tensor]]:
    """Trains four steps of two micro-batches in a loop; returns losses and weights."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS)
    context: Any = ScriptedContext(plugin, script)
    loader = plugin.dataloader(random_dataset(50), seed=1)
    model = enabled_model(plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    losses, batches = [], iter(loader)
    for _ in range(4):
        window = [next(batches), next(batches)]
        for attempt in plugin.attempts(model, window) if script is None else attempts(model, window, context):
            with attempt:
                total = 0.0
                for batch in window:
                    loss = model(**batch).loss
                    loss.backward()
                    total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def test_an_attempt_that_was_failed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = train(None)
    script = Script(failed={1, 4}, from_call=6)
    break_attention(script, monkeypatch.setattr)
    redone_losses, redone_weights = train(script)

    assert redone_losses == losses
    assert all(map(torch.equal, redone_weights, weights))
    assert script.runs == 4 + 2


def test_misuse_is_refused() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS)
    context: Any = ScriptedContext(plugin, Script())

    with pytest.raises(ConfigError, match="not enabled"):
        next(attempts(tiny_model(), [], context))
    model = enabled_model(plugin)
    with pytest.raises(ConfigError, match="was not entered"):
        list(attempts(model, [], context))
    model.zero_optimization_stage = lambda: 3  # as engines of DeepSpeed have it
    with pytest.raises(ConfigError, match="engine of DeepSpeed"):
        next(attempts(model, [], context))


def test_a_step_inside_of_an_attempt_is_refused() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS)
    context: Any = ScriptedContext(plugin, Script())
    model = enabled_model(plugin)
    optimizer = torch.optim.SGD(model.parameters())
    with next(attempts(model, [], context)), pytest.raises(ConfigError, match=r"SGD steps before it is known"):
        optimizer.step()
    optimizer.step()


def test_without_servers_there_is_one_attempt() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS)

    assert len(list(plugin.attempts(tiny_model(), []))) == 1


def test_an_error_leaves_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, script, left = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS), Script(), []
    monkeypatch.setattr(script, "leave_step", lambda: left.append(script.runs))
    context: Any = ScriptedContext(plugin, script)
    with pytest.raises(KeyboardInterrupt), next(attempts(enabled_model(plugin), [], context)):
        raise KeyboardInterrupt
    assert left == [1]
