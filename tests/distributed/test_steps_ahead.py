"""A Trainer whose steps are planned ahead has the losses of sdpa, and its passes wait for no device."""

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import distca_hf
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.read_documents import ENTRY
from distca_hf.integrations.models.decoder_borders import DecoderBorders
from distca_hf.integrations.models.forward_watch import ForwardWatch
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments


Batch = dict[str, Any]
STEPS, MICRO_BATCHES = 3, 3
# Ways in which torch waits for a device.
WAITS = ("cpu", "tolist", "item", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
# Where hosts tell each other integers.
OF_HOSTS = ("distca_hf/comm/",)


def padded(rows: list[dict[str, list[int]]]) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row["input_ids"])], mask[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"]), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Halved(Trainer):
    """Rank 1 passes a copy of some batches on, which nobody has read before."""

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        if self.args.process_index == 1 and self.state.global_step == 1:
            inputs = {name: value.clone() for name, value in inputs.items()}
        assert ENTRY not in inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


class Masked(Trainer):
    """Masks the first tokens of batches after they were collated, in a tensor that was read or in another one."""

    def get_batch_samples(self, *given: Any) -> tuple[list[Batch], Any]:
        batches, num_items = super().get_batch_samples(*given)
        for at, batch in enumerate(batches):
            first = torch.arange(batch["input_ids"].shape[1]) < 3
            batch["attention_mask"] = batch["attention_mask"] if at else batch["attention_mask"].clone()
            batch["attention_mask"][:, first] = 0
            batch["labels"] = batch["labels"].masked_fill(torch.arange(len(first)) < 4, -100)
            assert all(isinstance(value, torch.Tensor) for value in batch.values())
        return batches, num_items


class Case(NamedTuple):
    """A training.

    Attributes:
        gathered: passes that are not planned ahead; nobody knows of the first batch of an epoch before.
        resumes: whether it is the end of a training that goes on in mid-epoch.
    """

    collate: Callable[..., Batch] = padded
    trainer: type[Trainer] = Trainer
    gathered: int = 1
    workers: int = 0
    accumulation: int = MICRO_BATCHES
    resumes: bool = False


class Looks(TrainerCallback):
    """Asks the loader of a training for its length."""

    def on_step_end(self, *given: object, train_dataloader: Any, **kwargs: object) -> None:
        assert len(train_dataloader) >= STEPS
        assert isinstance(train_dataloader, DataLoader)
        self.loader = train_dataloader.base_dataloader


CASES = {
    "padded": Case(),
    "packs of a worker": Case(DataCollatorWithFlattening(), workers=1),
    "copies on one rank": Case(trainer=Halved, gathered=1 + MICRO_BATCHES),
    "changed before their step": Case(trainer=Masked, gathered=STEPS * MICRO_BATCHES),
    "one micro-batch": Case(accumulation=1),
    "resumed": Case(accumulation=1, resumes=True),
}


def train(folder: Path, case: Case, implementation: str) -> tuple[list[float], int, list[str]]:
    """Losses, passes that gathered lengths, and what waited for a device, the first step left out."""
    rows = random_documents(2 * 2 * STEPS * MICRO_BATCHES, lengths=(5, 120, 9, 30, 14, 61))
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    folder /= implementation
    settings = quiet_arguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        use_cpu=True,
        gradient_accumulation_steps=case.accumulation,
        dataloader_num_workers=case.workers,
        dataloader_persistent_workers=case.workers > 0,
    )
    looks = Looks()
    ours = [distca_hf.DistCACallback(distca_hf.DistCAPlugin())] if implementation == "distca" else []
    given: dict[str, Any] = {
        "model": tiny_model(implementation=implementation, num_hidden_layers=2),
        "args": TrainingArguments(**settings),
        "train_dataset": dataset,
        "data_collator": case.collate,
    }
    trainer = case.trainer(**given, callbacks=[looks, *ours])
    case.trainer(**given, callbacks=ours)  # shares the callback, and does not train
    if case.resumes:
        begun = case.trainer(**given, callbacks=ours)
        begun.args.max_steps, begun.args.save_strategy, begun.args.save_steps = 1, "steps", 1
        begun.args.save_only_model = True
        begun.train()
        torch.distributed.barrier()  # rank 0 has written its checkpoint
        trainer.args.max_steps = STEPS
    with noted() as (gathered, waits):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if case.resumes else None)
    assert ENTRY not in next(iter(looks.loader))
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, len(gathered), waits


@contextmanager
def noted() -> Iterator[tuple[list[int], list[str]]]:
    """Notes passes that gather lengths, and waits of the hooks that begin a pass and its decoder."""
    gathered: list[int] = []
    waits: list[str] = []
    passes, hooks_open = 0, 0
    prepare, replaced = GivenPlanner._prepare_gathered, {name: getattr(torch.Tensor, name) for name in WAITS}

    def prepare_gathered(self: GivenPlanner, *args: Any) -> Any:
        gathered.append(passes)
        return prepare(self, *args)

    def hook(method: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes, hooks_open
            passes, hooks_open = passes + begins, hooks_open + 1
            try:
                return method(*args, **kwargs)
            finally:
                hooks_open -= 1

        return run

    def waiting(name: str) -> Callable[..., Any]:
        @wraps(replaced[name])
        def wait(*args: Any, **kwargs: Any) -> Any:
            if hooks_open and passes > MICRO_BATCHES and threading.current_thread() is threading.main_thread():
                frame = sys._getframe(1)
                while frame.f_back is not None and "distca_hf/" not in frame.f_code.co_filename:
                    frame = frame.f_back
                place = f"{frame.f_code.co_filename}:{frame.f_lineno} {name}"
                if not any(part in place for part in OF_HOSTS):
                    waits.append(place)
            return replaced[name](*args, **kwargs)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GivenPlanner, "_prepare_gathered", prepare_gathered)
        patch.setattr(ForwardWatch, "_before", hook(ForwardWatch._before, begins=True))
        patch.setattr(DecoderBorders, "_before", hook(DecoderBorders._before, begins=False))
        for name in WAITS:
            patch.setattr(torch.Tensor, name, waiting(name))
        yield gathered, waits


def train_all(folder: Path) -> dict[str, Any]:
    multiprocessing.current_process()._config["daemon"] = False  # ranks of tests may not have children otherwise
    multiprocessing.set_start_method("fork", force=True)  # as in an ordinary process; a fork server would import all
    return {
        name: (train(folder, case, "distca"), train(folder, case._replace(workers=0), "sdpa"))
        for name, case in CASES.items()
    }


def test_steps_planned_ahead_have_the_losses_of_sdpa_and_wait_for_no_device(tmp_path: Path) -> None:
    for rank in run_ranks(2, train_all, tmp_path, tmp_path):
        for name, case in CASES.items():
            (losses, gathered, waits), (expected, *_) = rank[name]
            assert losses == pytest.approx(expected, rel=2e-6), name
            assert gathered == case.gathered, name
            assert waits == [], name
