"""Runs that stop and go on: documents that can be told apart, and what a Trainer has trained on."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import Trainer, TrainerCallback, TrainingArguments

from support.models import tiny_model
from support.training import quiet_arguments


# Trainer of 5.17 loads the optimizer of several CPU ranks to "cpu:0", which no torch can; that of 5.23 does not.
LOADS_ON_CPU_RANKS = Version(transformers.__version__) >= Version("5.23")
resumes_on_cpu_ranks = pytest.mark.skipif(
    not LOADS_ON_CPU_RANKS, reason="this version of Transformers cannot load an optimizer on several CPU ranks"
)
FIRST_TOKEN = 10
TOKENS_PER_RANK = 64
# How often each token comes. Document number i is `[10 + i, 10 + i, ...]`: a token says which document it is of.
TOKENS = Counter({FIRST_TOKEN + number: random.Random(number).choice((3, 9, 20, 40)) for number in range(60)})


def all_tokens(epochs: int = 1) -> Counter[int]:
    """What training for some epochs takes."""
    return Counter({token: epochs * times for token, times in TOKENS.items()})


class StopAt(TrainerCallback):
    """Saves a checkpoint at a step, and ends training there, as preemption does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


class Diary(TrainerCallback):
    """Epoch of every step that was made."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)


def train(trainer: Trainer, resume: bool | str | None = None, stop_at: int | None = None) -> None:
    """Trains to the end, or to a step at which a checkpoint is saved."""
    stop = StopAt(stop_at) if stop_at is not None else None
    if stop is not None:
        trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=resume)
    if stop is not None:
        trainer.remove_callback(stop)


def numbered_trainer(folder: Path, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    """A Trainer of a tiny model on documents of one token each, not attached yet."""
    return kind(
        model=tiny_model(num_hidden_layers=1, hidden_size=16, intermediate_size=16),
        args=TrainingArguments(
            **quiet_arguments(folder, **{"use_cpu": True, "lr_scheduler_type": "linear", "seed": 3} | arguments)
        ),
        train_dataset=Dataset.from_dict({"input_ids": [[token] * times for token, times in TOKENS.items()]}),
    )


def count_tokens(trainer: Trainer, compute: bool = True) -> Counter[int]:
    """How often this rank trains each token, from now on; without computing anything, if only that is asked."""
    seen: Counter[int] = Counter()
    step = trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        seen.update(ids[ids >= FIRST_TOKEN].tolist())
        return step(model, inputs, *args, **kwargs) if compute else torch.zeros(())

    trainer.training_step = counted
    return seen
