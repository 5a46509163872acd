"""The host makes few calls before the first kernel of a training step, and no more for a model of more layers."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.batches.agreement import Returning
from distca_hf.batches.given import _Meanwhile
from distca_hf.integrations.models.forward_watch import watch_of
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


# Passes 1, 2, 4 and 8 check more.
STEPS, STEADY = 7, (5, 6, 7)
LAYERS = 2, 8
# Calls of Python functions and of C, beyond those of a plain Trainer and those that are made while this rank waits for
# the others; and in each further layer.
MOST_CALLS, MOST_IN_A_LAYER = 570, 1
# Calls while this rank waits.
MOST_WHILE_WAITING = 70


class CallsBeforeKernels(TrainerCallback):
    """Counts calls of each step until its embedding looks tokens up."""

    def __init__(self) -> None:
        self.of_steps, self.while_waiting = list[int](), list[int]()

    def on_step_begin(self, *given: Any, **kwargs: Any) -> None:
        for thread in threading.enumerate():  # a plan that is not made yet takes a look at all modules
            if thread.name.startswith("distca-ahead"):
                thread.join()
        self.of_steps.append(0)
        sys.setprofile(self._note)

    def note_wait(self, frame: FrameType, event: str, value: object) -> None:
        self.while_waiting[-1] += event in ("call", "c_call")

    def _note(self, frame: FrameType, event: str, value: object) -> None:
        self.of_steps[-1] += event in ("call", "c_call")


def uneven(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch, shorter on rank 1."""
    ids = torch.tensor([row["input_ids"] for row in rows])[:, : 60 - 40 * torch.distributed.get_rank()]
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def calls(folder: Path, num_layers: int, attaches: bool) -> int:
    """Calls of a steady step on this rank; of the least, because a slow exchange is asked for again."""
    model = tiny_model(implementation="sdpa", num_hidden_layers=num_layers)
    rows = random_documents(2 * 2 * STEPS, lengths=(60,))
    settings = quiet_arguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, logging_steps=STEPS
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        data_collator=uneven,
    )
    if attaches:
        distca_hf.DistCAPlugin().attach(trainer)
    counted = CallsBeforeKernels()
    trainer.callback_handler.callbacks.insert(0, counted)
    embedding, run_meanwhile = nn.functional.embedding, _Meanwhile.run

    def run(meanwhile: _Meanwhile) -> None:
        note = sys.getprofile()
        counted.while_waiting.append(0)
        sys.setprofile(counted.note_wait)
        run_meanwhile(meanwhile)
        sys.setprofile(note)

    def look_up(*given: Any, **kwargs: Any) -> torch.Tensor:
        sys.setprofile(None)
        return embedding(*given, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "embedding", look_up)
        patch.setattr(_Meanwhile, "run", run)
        trainer.train()
    if attaches:
        watch = watch_of(model)
        assert watch is not None
        assert watch.planner is not None
        assert watch.planner.latest_moves is not None
        assert watch.planner.latest_moves.crosses
        assert watch.planner.returning is Returning.LOSS
        waiting = min(counted.while_waiting[step - 1] for step in STEADY)
        assert 0 < waiting <= MOST_WHILE_WAITING, counted.while_waiting
    return min(counted.of_steps[step - 1] for step in STEADY)


def calls_of_models(folder: Path) -> dict[tuple[int, bool], int]:
    cases = [(layers, attaches) for layers in LAYERS for attaches in (False, True)]
    return {case: calls(folder, *case) for case in cases}


def test_few_calls_before_the_first_kernel_of_a_step(tmp_path: Path) -> None:
    for counted in run_ranks(2, calls_of_models, tmp_path, tmp_path):
        few, many = (counted[layers, True] - counted[layers, False] for layers in LAYERS)
        assert 0 < few <= MOST_CALLS
        assert many - few <= MOST_IN_A_LAYER * (LAYERS[1] - LAYERS[0])
