"""Trainings that get a signal at a named place, as launchers send it: to the rank and to workers of its loaders."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments, default_data_collator

import distca_hf
from support.data import random_dataset
from support.models import tiny_model
from support.training import quiet_arguments


RANKS, STEPS, AT_STEP = 2, 6, 3
# Steps of a training that goes on, and of one that gets no signal.
LAST_STEP = 8
# Optimizer steps have two micro-batches, and an epoch four steps.
ACCUMULATION, ROWS, TOKENS = 2, 32, 17

Fire = Callable[[], None]


class At(TrainerCallback):
    """Calls a function at an event of one step."""

    def __init__(self, event: str, fire: Fire, step: int = AT_STEP) -> None:
        def called(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                fire()

        setattr(self, event, called)


def _event(name: str, step: int = AT_STEP, **arguments: Any) -> tuple[dict[str, Any], Callable[[Trainer, Fire], None]]:
    return arguments, lambda trainer, fire: trainer.callback_handler.callbacks.insert(0, At(name, fire, step))


def _in_forward(trainer: Trainer, fire: Fire) -> None:
    def called(module: Any, args: Any) -> None:
        if trainer.state.global_step == AT_STEP:
            fire()

    trainer.model.model.layers[0].mlp.register_forward_pre_hook(called)


def _in_backward(trainer: Trainer, fire: Fire) -> None:
    def called(gradient: torch.Tensor) -> None:
        if trainer.state.global_step == AT_STEP:
            fire()

    trainer.model.lm_head.weight.register_hook(called)


def _before(name: str, trainer: Trainer, fire: Fire) -> None:
    """Calls a function before a method of the Trainer."""
    method = getattr(trainer, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        fire()
        return method(*args, **kwargs)

    setattr(trainer, name, called)


def _in_generation(trainer: Trainer, fire: Fire) -> None:
    method = trainer.prediction_step

    def called(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        trainer.model.generate(inputs["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
        fire()
        return method(model, inputs, *args, **kwargs)

    trainer.prediction_step = called


def _in_prediction(trainer: Trainer, fire: Fire) -> None:
    """Predicts after the evaluation, with a signal in its midst."""

    def predict() -> None:
        trainer.callback_handler.callbacks.insert(0, At("on_prediction_step", fire))
        trainer.predict(trainer.eval_dataset)

    trainer.callback_handler.callbacks.append(At("on_evaluate", predict))


EVALUATES = {"eval_strategy": "steps", "eval_steps": AT_STEP}
SAVES = {"save_strategy": "steps", "save_steps": AT_STEP}
# Arguments of the training, and how the signal gets to its place.
PLACES: dict[str, tuple[dict[str, Any], Callable[[Trainer, Fire], None]]] = {
    "before the first step": _event("on_step_begin", 0),
    "forward": ({}, _in_forward),
    "backward": ({}, _in_backward),
    "between micro-batches": _event("on_substep_end"),
    "between steps": _event("on_step_end"),
    "between epochs": _event("on_epoch_end", 4),
    "saving": (SAVES, lambda trainer, fire: _before("_save_checkpoint", trainer, fire)),
    "evaluation": _event("on_prediction_step", **EVALUATES),
    "placed evaluation": _event("on_prediction_step", **EVALUATES),
    "generation": (EVALUATES, _in_generation),
    "prediction": (EVALUATES, _in_prediction),
    "evaluation after the last step": _event("on_prediction_step", STEPS, **EVALUATES),
    "the best model is loaded": (
        EVALUATES | SAVES | {"load_best_model_at_end": True},
        lambda trainer, fire: _before("_load_best_model", trainer, fire),
    ),
    "after the last step": (
        {},
        lambda trainer, fire: trainer.callback_handler.callbacks.append(At("on_step_end", fire, STEPS)),
    ),
}


def make_trainer(place: str, batches: str, workers: int, folder: Path, steps: int = STEPS) -> Trainer:
    """A Trainer of one rank, attached. Its loaders may start workers by forking, as in a script."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    arguments = PLACES[place][0]
    args = TrainingArguments(
        **quiet_arguments(
            folder,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=steps,
            use_cpu=True,
            seed=3,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            **arguments,
        )
    )
    dataset = random_dataset(ROWS, lengths=(TOKENS,))
    dataset = dataset.add_column("labels", dataset["input_ids"])
    evaluated = dataset.select(range(8))
    if batches == "placed" and workers:  # which read the rows that a transform makes
        dataset = dataset.add_column("length", [TOKENS] * ROWS).with_transform(dict)
    collator = DataCollatorWithFlattening() if batches == "packs" else default_data_collator
    trainer = Trainer(tiny_model(num_hidden_layers=1), args, collator, train_dataset=dataset, eval_dataset=evaluated)
    settings: dict[str, Any] = {} if batches == "packs" else {"tokens_per_rank": 2 * TOKENS}
    distca_hf.DistCAPlugin(**settings, evaluate="distca" if place == "placed evaluation" else "local").attach(trainer)
    return trainer


def losses(place: str, batches: str, workers: int, folder: Path, resume: bool) -> dict[int, float]:
    """Trains without a signal; returns the loss of every step."""
    trainer = make_trainer(place, batches, workers, folder, LAST_STEP)
    trainer.train(resume_from_checkpoint=resume)
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def train_into_signal(
    place: str, batches: str, workers: int, folder: Path, number: signal.Signals, ranks: tuple[int, ...]
) -> None:
    """Trains as a script does, and ends with its exit status. Some ranks send the signal to themselves and to their
    workers, once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer, sent = make_trainer(place, batches, workers, folder), []

    def fire() -> None:
        if int(os.environ["RANK"]) in ranks and not sent:
            sent.append(number)
            children = [child.pid for child in multiprocessing.active_children()]
            (folder / f"sent-{os.environ['RANK']}").write_text(str(len(children)))
            send_from_outside(number, os.getpid(), *filter(None, children))

    PLACES[place][1](trainer, fire)
    try:
        trainer.train()
    except SystemExit as leaving:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(int(str(leaving.code)))


def send_from_outside(number: signal.Signals, process: int | None, *workers: int | None) -> None:
    """Sends a signal as another process: workers take one of their parent for an order to end. Some may have ended."""
    for one in workers:
        subprocess.run(["kill", f"-{number}", str(one)], check=False)
    subprocess.run(["kill", f"-{number}", str(process)], check=True)


def checkpoints(folder: Path) -> list[int]:
    """Steps that were saved."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
