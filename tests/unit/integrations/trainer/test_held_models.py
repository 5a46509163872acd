"""Further models that a Trainer holds are named, and refuse placed batches until they are enabled."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca_hf
from distca_hf.errors import PlanError
from distca_hf.integrations.trainer.attachment import held_models
from support.data import random_dataset
from support.models import VOCABULARY, tiny_model
from support.training import quiet_arguments


SMALL = {"num_hidden_layers": 1}


class OfAttributes(Trainer):
    def __init__(self, teacher: Any, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ref_model, self.many, self.by_name = teacher, [nn.Linear(2, 2), teacher], {"one": teacher}


class OfAGlobal(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
        assert teacher_of_this_file is not None
        return super().compute_loss(model, inputs, *others, **keywords)


teacher_of_this_file: Any = None


class Watching(TrainerCallback):
    def __init__(self, teacher: Any) -> None:
        self.reference = teacher


def with_closure(trainer: Trainer, teacher: Any) -> Trainer:
    usual = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        assert teacher is not None
        return usual(model, inputs | {"shift_labels": inputs["shift_labels"]}, return_outputs, num_items_in_batch)

    trainer.compute_loss = compute_loss
    return trainer


def arguments_of(folder: Path) -> dict[str, Any]:
    args = TrainingArguments(**quiet_arguments(folder, max_steps=1, use_cpu=True))
    return {"model": tiny_model(**SMALL), "args": args, "train_dataset": random_dataset(20)}


MAKERS: dict[str, Callable[[Any, dict[str, Any]], Trainer]] = {
    "OfAttributes.ref_model": lambda teacher, arguments: OfAttributes(teacher, **arguments),
    "teacher of with_closure.<locals>.compute_loss": lambda teacher, arguments: with_closure(
        Trainer(**arguments), teacher
    ),
    "teacher_of_this_file of OfAGlobal.compute_loss": lambda teacher, arguments: OfAGlobal(**arguments),
    "Watching.reference": lambda teacher, arguments: Trainer(callbacks=[Watching(teacher)], **arguments),
}


@pytest.mark.parametrize("where", MAKERS)
def test_models_that_are_not_enabled_are_named_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = tiny_model(implementation="sdpa", **SMALL)
    monkeypatch.setitem(globals(), "teacher_of_this_file", nn.Sequential(teacher))
    trainer = MAKERS[where](teacher, arguments_of(tmp_path))
    place = f"LlamaForCausalLM in {where}" if "of_this_file" in where else where
    assert held_models(trainer) == {place: teacher}
    with caplog.at_level(logging.WARNING, logger="distca_hf"):
        distca_hf.DistCAPlugin(tokens_per_rank=192).attach(trainer)

    (line,) = (line for line in caplog.messages if "is not enabled, and refuses placed batches" in line)
    assert line.startswith(f"{place} (LlamaForCausalLM) is not")


def test_models_refuse_placed_batches_until_they_are_enabled_or_detached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mamba asks for no mask, by which others are noticed, and a compiled model for none that is looked at."""
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)).eval()
    compiled = tiny_model(implementation="sdpa", **SMALL).eval()
    compiled.compile(backend="eager")
    later, plugin = tiny_model(**SMALL).eval(), distca_hf.DistCAPlugin(tokens_per_rank=192)
    trainer = Trainer(**arguments_of(tmp_path))
    trainer.teachers = [mamba, compiled, later]
    places = {f"Trainer.teachers[{at}]": model for at, model in enumerate(trainer.teachers)}
    assert held_models(trainer) == places
    trainer.together = nn.ModuleList([trainer.model, tiny_model(**SMALL)])
    assert held_models(trainer) == places | {"LlamaForCausalLM in Trainer.together": trainer.together[1]}
    plugin.attach(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    ids = {"input_ids": batch["input_ids"]}
    given = (ids, {"input_ids": ids["input_ids"].clone()}, {**ids, "distca_plan": batch["distca_plan"]})
    for model in (mamba, compiled, later):
        for some in given:
            with pytest.raises(PlanError, match=f"was not enabled \\({type(model).__name__}"):
                model(**some)
    mamba(input_ids=ids["input_ids"][:, :7].clone())

    distca_hf.enable(later, plugin)
    with torch.no_grad():
        assert later(**ids).logits.shape[1] == batch["input_ids"].shape[1]
    plugin.detach(trainer)
    mamba(**ids)


def test_enabled_models_and_what_belongs_to_the_trained_one_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, teacher = distca_hf.DistCAPlugin(tokens_per_rank=192), tiny_model(**SMALL)
    trainer = OfAttributes(distca_hf.enable(teacher, plugin), **arguments_of(tmp_path))
    trainer.backbone, trainer.around, trainer.loss = (
        trainer.model.model,
        nn.Sequential(trainer.model),
        nn.CrossEntropyLoss(),
    )
    with caplog.at_level(logging.WARNING, logger="distca_hf"):
        plugin.attach(trainer)

    assert [*held_models(trainer).values()] == [teacher]
    assert "is not enabled" not in caplog.text


def test_packs_are_for_other_models_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher = tiny_model(implementation="sdpa", **SMALL)
    trainer = OfAttributes(teacher, data_collator=DataCollatorWithFlattening(), **arguments_of(tmp_path))
    with caplog.at_level(logging.WARNING, logger="distca_hf"):
        distca_hf.DistCAPlugin().attach(trainer)

    assert "is not enabled" not in caplog.text
