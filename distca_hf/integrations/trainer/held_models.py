"""Held models: finds further models that a Trainer holds, or that its loss uses, such as a teacher.

A model that is not enabled gets no plan. Each of these is named when placed batches are attached, and refuses them.
Other Transformers models refuse a placed batch when they ask for an attention mask (`integrations.other_models`). The
hooks here also reach models that ask for none, and compiled ones.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer

from distca_hf.batches.known_batch import copied_batch, known_batch, placed_in_another_model
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.hooks import HiddenHook
from distca_hf.integrations.models.structure import names_by_position
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.integrations.trainer.check import overrides
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Methods of a Trainer in which programs call further models.
METHODS = ("compute_loss", "training_step", "prediction_step")


def watch_held_models(attachment: Attachment) -> None:
    """Warns of models that a Trainer holds and that are not enabled, and lets them refuse placed batches."""
    for where, model in held_models(attachment.trainer).items():
        if watch_of(model) is None:
            log.warning(
                "%s (%s) is not enabled, and refuses placed batches, whose rows hold parts of documents. If the loss "
                'uses it on them, load it with attn_implementation="distca", and call distca_hf.enable(model, plugin) '
                "before it is wrapped",
                where,
                type(model).__name__,
            )
            hook = HiddenHook(partial(_refuse_placed, names_by_position(model)))
            attachment.when_undone(model.register_forward_pre_hook(hook, with_kwargs=True).remove)


def held_models(trainer: Trainer) -> dict[str, PreTrainedModel]:
    """Returns Transformers models that share nothing with the model that trains, by the place where they were found:
    attributes of the Trainer and of its callbacks, and variables that functions of its loss use."""
    known = set() if trainer.model is None else set(trainer.model.modules())
    found: dict[str, PreTrainedModel] = {}
    for holder, value in _values(trainer):
        for where, module in _modules(holder, value):
            for part in module.modules():  # outer ones first
                if isinstance(part, PreTrainedModel) and known.isdisjoint(part.modules()):
                    known.update(part.modules())
                    found[where if part is module else f"{type(part).__name__} in {where}"] = part
    return found


def _values(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yields names and values of attributes and variables."""
    for holder in (trainer, *trainer.callback_handler.callbacks):
        for name, value in vars(holder).items():
            yield f"{type(holder).__name__}.{name}", value
    functions = [function for name in METHODS for function in overrides(trainer, name)]
    for function in (*functions, trainer.compute_loss_func):
        if inspect.isfunction(function) and not function.__module__.startswith("transformers."):
            with contextlib.suppress(ValueError):  # a variable of a function around it has no value yet
                used = inspect.getclosurevars(function)
                for name, value in (*used.nonlocals.items(), *used.globals.items()):
                    yield f"{name} of {function.__qualname__}", value


def _modules(where: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module, or the modules in a collection, with their places."""
    if isinstance(value, nn.Module):
        yield where, value
        return
    numbered = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in value.items() if isinstance(value, dict) else numbered:
        if isinstance(one, nn.Module):
            yield f"{where}[{key!r}]", one


def _refuse_placed(names: Sequence[str], model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that a model that was not enabled gets neither tokens nor the plan of a placed batch.

    Raises:
        PlanError: it does.
    """
    if watch_of(model) is not None:
        return
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    plan = given.get("distca_plan")
    if not isinstance(plan, LivePlan):
        known = known_batch(given) or copied_batch(given)
        plan = None if known is None else known.plan
    if plan is not None:
        raise placed_in_another_model(plan, type(model).__name__)
