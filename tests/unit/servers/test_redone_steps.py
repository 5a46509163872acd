"""Optimizer steps that run again leave no trace: logs, random states and weights are equal bit for bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

from distca_hf.errors import PeerLostError
from distca_hf.servers.annex import cannot_redo
from support.data import random_dataset
from support.models import tiny_model
from support.redoing import Script, assert_equal_training, break_attention, train_with_script
from support.training import quiet_arguments


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


def test_a_step_that_is_failed_in_every_run_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
