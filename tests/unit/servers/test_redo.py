"""Optimizer steps of a loop and of a Trainer that run again leave no trace: logs, random states, weights are equal."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments

import distca_hf
from distca_hf.errors import ConfigError, PeerLostError
from distca_hf.servers.annex import cannot_redo
from distca_hf.servers.redo import attempts
from support.data import random_dataset
from support.models import tiny_model
from support.redoing import (
    CAPACITY_TOKENS,
    Script,
    ScriptedContext,
    assert_equal_training,
    break_attention,
    initial_model,
    train_with_script,
)
from support.training import quiet_arguments


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


def test_an_attempt_that_failed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_error_leaves_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, script, left = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS), Script(), []
    monkeypatch.setattr(script, "leave_step", lambda: left.append(script.runs))
    context: Any = ScriptedContext(plugin, script)
    with pytest.raises(KeyboardInterrupt), next(attempts(enabled_model(plugin), [], context)):
        raise KeyboardInterrupt
    assert left == [1]


def test_placed_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = train_with_script(None, tmp_path)
    random_state = torch.get_rng_state()
    script = Script(failed={2, 4, 5})
    break_attention(script, monkeypatch.setattr)
    redone = train_with_script(script, tmp_path)

    assert_equal_training(redone, undisturbed)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert script.runs == 4 + 3
    # Step 2 ran twice; step 3 three times.
    assert [log["distca/redone_steps"] for log in redone[0] if "loss" in log] == [1, 2]


@pytest.mark.parametrize("loop", ["trainer", "sft", "collecting"])
def test_accumulation(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = train_with_script(None, tmp_path, loop=loop, accumulation=3)
    script = Script(failed={1, 4}, from_call=6)  # in the second micro-batch
    break_attention(script, monkeypatch.setattr, harm=float("nan"))
    redone = train_with_script(script, tmp_path, loop=loop, accumulation=3)

    assert_equal_training(redone, undisturbed)
    assert script.runs == 4 + 2


def test_a_step_that_fails_in_every_run_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(failed={2, 3, 4, 5})
    break_attention(script, monkeypatch.setattr)

    with pytest.raises(PeerLostError, match=r"optimizer step 2: attention servers were lost in each of its 4 runs"):
        train_with_script(script, tmp_path)


def trainer_with(folder: Path, **arguments: Any) -> Trainer:
    args = TrainingArguments(**quiet_arguments(folder, use_cpu=True, **arguments))
    return Trainer(model=tiny_model(), args=args, train_dataset=random_dataset(4))


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_that_step_inside_backward_are_refused(optimizer: str, tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    trainer.args.optim = optimizer

    assert any(f"optim='{optimizer}' steps inside backward" in reason for reason in cannot_redo(trainer))


def test_fp16_and_unsharded_deepspeed_are_refused(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    trainer.accelerator = SimpleNamespace(
        mixed_precision="fp16",
        distributed_type=DistributedType.DEEPSPEED,
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=0)),
    )
    reasons = "; ".join(cannot_redo(trainer))

    assert "fp16 scales gradients" in reasons
    assert "DeepSpeed's stage 0" in reasons


def test_others_are_accepted(tmp_path: Path) -> None:
    assert list(cannot_redo(trainer_with(tmp_path, bf16=True, optim="galore_adamw"))) == []
