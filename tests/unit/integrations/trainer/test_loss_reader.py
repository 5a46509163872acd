"""Which way a Trainer's loss takes: results return wherever anything but the mean loss of all ranks may be read."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import DataCollatorWithFlattening, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.data import random_dataset
from support.models import tiny_model


class ReadsLogs(Trainer):
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super()._maybe_log_save_evaluate(*args, **kwargs)


class Found(Exception):
    """Ends `compute_loss` where the model would run."""


def reason_of(trainer: Trainer, **inputs: Any) -> str:
    """Why results of the model would return, as its forward pass in `compute_loss` finds."""
    ids = torch.ones(1, 4, dtype=torch.int64)

    def model(**batch: Any) -> None:
        watch = watch_of(trainer.model)
        assert watch is not None
        raise Found(watch.loss.begin(batch)[1])

    with pytest.raises(Found) as found:
        trainer.compute_loss(model, {"input_ids": ids, "labels": ids, **inputs}, num_items_in_batch=torch.tensor(3))
    return str(found.value)


def trainer_of(
    folder: Path, kind: type[Trainer] = Trainer, given: dict[str, Any] | None = None, **arguments: Any
) -> Trainer:
    dataset = random_dataset(8)
    settings: dict[str, Any] = {"logging_steps": 5, "report_to": [], "use_cpu": True}
    trainer = kind(
        model=tiny_model(implementation="distca", num_hidden_layers=1),
        args=TrainingArguments(output_dir=str(folder), **settings | arguments),
        train_dataset=dataset.add_column("labels", dataset["input_ids"]),
        eval_dataset=dataset,
        data_collator=DataCollatorWithFlattening(),
        **given or {},
    )
    trainer.state.max_steps, trainer.state.logging_steps = 10, 5
    distca_hf.DistCAPlugin().attach(trainer)
    return trainer


def loss_of_outputs(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.zeros(())


def sum_of_logits(logits: torch.Tensor, labels: torch.Tensor, shift_labels: Any = None, **kwargs: Any) -> torch.Tensor:
    return logits.sum()


def adds_a_term(self: Any, logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    loss = self.loss_function(logits, **kwargs)
    loss += logits.square().mean()
    return loss


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "Trainer": ({}, ""),
    "logs of epochs": ({"logging_strategy": "epoch"}, ""),
    "no logs": ({"logging_strategy": "no"}, "train_loss"),
    "a class": ({"kind": ReadsLogs}, "ReadsLogs._maybe_log_save_evaluate is not Trainer's"),
    "compute_loss_func": ({"given": {"compute_loss_func": loss_of_outputs}}, "compute_loss_func"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label smoothing"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_settings_decide(case: str, tmp_path: Path) -> None:
    settings, reason = CASES[case]

    found = reason_of(trainer_of(tmp_path, **settings))

    assert found.startswith(reason) if reason else found == ""


BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "routers": ({"output_router_logits": True}, "output_router_logits"),
    "kept logits": ({"logits_to_keep": 2}, "logits_to_keep"),
    "no labels of tokens": ({"labels": torch.ones(1)}, "the batch has no label for each token"),
    "a mask of pairs": ({"mask": torch.ones(1, 1, 4, 4)}, "the batch has mask"),
}


def test_batch_and_later_changes_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)

    for inputs, reason in BATCHES.values():
        assert reason_of(trainer, **inputs).startswith(reason)
    trainer.state.global_step = 9
    assert reason_of(trainer) == ""
    trainer.state.max_steps = 9
    assert reason_of(trainer).startswith("train_loss")
    trainer.state.max_steps = 10
    monkeypatch.setattr(type(trainer.model), "z_loss_coefficient", 0.1, raising=False)
    assert "more than a sum over labels" in reason_of(trainer)
    monkeypatch.undo()
    assert reason_of(trainer) == ""
    own_loss = {
        "of the model": partial(monkeypatch.setattr, trainer.model, "_loss_function", sum_of_logits, False),
        "of its class": partial(monkeypatch.setattr, type(trainer.model), "_loss_function", sum_of_logits, False),
        "a module": partial(monkeypatch.setattr, trainer.model, "_loss_function", torch.nn.Identity(), False),
        "of Transformers": partial(monkeypatch.setitem, LOSS_MAPPING, "ForCausalLM", sum_of_logits),
    }
    for replace in own_loss.values():
        replace()
        assert "has its own loss" in reason_of(trainer)
        monkeypatch.undo()
        assert reason_of(trainer) == ""
    monkeypatch.setattr(type(trainer.model), "forward", adds_a_term)
    assert "more than a sum over labels" in reason_of(trainer)
    monkeypatch.undo()
    compute_loss: Callable[..., Any] = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs)
    assert reason_of(trainer).startswith("Trainer.compute_loss is not Trainer's")


def test_program_of_its_own_gets_all_results(tmp_path: Path) -> None:
    watch = watch_of(trainer_of(tmp_path).model)
    ids = torch.ones(1, 4, dtype=torch.int64)

    assert watch is not None
    _, reason = watch.loss.begin({"input_ids": ids, "labels": ids, "num_items_in_batch": 3})
    assert reason.startswith("the program may")


def test_hooks_and_a_forward_that_was_replaced_decide(tmp_path: Path) -> None:
    """In every pass: they may come at any time, and go."""
    trainer = trainer_of(tmp_path)
    model = trainer.model
    for part in (model, model.lm_head):
        handle = part.register_forward_hook(lambda module, args, output: output)
        assert "a hook of test_loss_reader may read logits" in reason_of(trainer)
        handle.remove()
    assert reason_of(trainer) == ""

    def shifts_itself(input_ids: Any = None, labels: Any = None, **kwargs: Any) -> None:
        kwargs.pop("shift_labels", None)

    model.forward = shifts_itself
    assert "was replaced, and has no parameter shift_labels" in reason_of(trainer)
    del model.forward
    assert reason_of(trainer) == ""

    usual = model.forward

    @wraps(usual)
    def reads_logits(*args: Any, **kwargs: Any) -> Any:
        output = usual(*args, **kwargs)
        output.loss = output.loss + output.logits.square().mean()
        return output

    model.forward = reads_logits
    assert "is wrapped by test_loss_reader, which may read logits" in reason_of(trainer)
    model.forward = MethodType(convert_outputs_to_fp32(torch.autocast("cpu")(type(model).forward)), model)
    assert reason_of(trainer) == ""  # as Accelerate does it


class Late(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = False


@pytest.mark.parametrize(
    ("arguments", "callback", "unlogged"),
    [
        ({}, None, [6, 7]),
        ({"logging_first_step": True}, Late, [1, 3, 4, 6, 7]),
        ({"eval_strategy": "steps"}, EarlyStoppingCallback, [3, 6, 7]),
        ({"eval_strategy": "epoch"}, EarlyStoppingCallback, [3, 4, 6, 7]),
        ({"logging_strategy": "epoch"}, Late, []),
        ({"logging_strategy": "no"}, None, list(range(8))),
    ],
)
def test_steps_that_no_log_may_cover_are_known(
    tmp_path: Path, arguments: dict[str, Any], callback: type[TrainerCallback] | None, unlogged: list[int]
) -> None:
    """Of 8 steps, logged after every third; an epoch has 5."""
    given = {"callbacks": [] if callback is None else [callback()]}
    steps: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 3, "per_device_train_batch_size": 1}
    trainer = trainer_of(tmp_path, given=given, **steps | arguments)
    trainer.callback_handler.train_dataloader = range(5)
    trainer.state.max_steps, trainer.state.logging_steps, trainer.state.eval_steps = 8, 3, 4
    reasons = []
    for step in range(8):
        trainer.state.global_step = step
        reasons.append(reason_of(trainer))

    assert [step for step, reason in enumerate(reasons) if "train_loss" in reason] == unlogged
    assert sum(bool(reason) for reason in reasons) == len(unlogged)
