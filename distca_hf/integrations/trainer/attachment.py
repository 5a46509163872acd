"""Attachment: records everything that `attach` changes on a Trainer and its model, to undo it later.

This includes hooks on further models that a Trainer holds or its loss uses, such as a teacher. This model is not
enabled and gets no plan, so it refuses placed batches, and `attach` names it. Other Transformers models refuse a
placed batch when they ask for an attention mask (`integrations.mask`). The hooks here also cover compiled
models, and models that ask for no mask.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from distca_hf.batches.known_batch import copied_batch, known_batch, placed_in_another_model
from distca_hf.errors import ConfigError
from distca_hf.integrations.attention import LAYER_SETTINGS
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.hooks import HiddenHook
from distca_hf.integrations.models.structure import (
    IMPLEMENTATION,
    attention_layers,
    names_by_position,
    set_attention,
    text_configs,
    transformers_model,
)
from distca_hf.integrations.trainer.check import overrides
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import get_logger


# Attribute of an attached Trainer.
ATTACHED = "_distca_attachment"
# Parts that batches depend on: if one is replaced after `attach`, it has not been checked.
PARTS = ("train_dataset", "data_collator", "compute_loss_func", "model_init")
# Arguments that the loader was made with: changing them after `attach` has no effect on it.
ARGUMENTS = (
    "data_seed",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "remove_unused_columns",
    "seed",
    "train_sampling_strategy",
    "world_size",
)


class Attachment:
    """Makes changes to one Trainer, and undoes them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._changes = ExitStack()
        self._methods: dict[str, Callable[..., object]] = {}
        self.is_training = False
        self._parts = {name: getattr(trainer, name, None) for name in PARTS}
        self._arguments = {name: getattr(trainer.args, name, None) for name in ARGUMENTS}
        setattr(trainer, ATTACHED, self)

    @classmethod
    def of(cls, trainer: Trainer) -> "Attachment | None":
        found: Attachment | None = getattr(trainer, ATTACHED, None)
        return found

    def replace(self, owner: object, name: str, value: object) -> None:
        """Sets an attribute of the Trainer or of a part of it."""
        if name in vars(owner):
            self.when_undone(partial(setattr, owner, name, vars(owner)[name]))
        else:
            self.when_undone(partial(delattr, owner, name))
        setattr(owner, name, value)
        if owner is self.trainer and callable(value):
            self._methods[name] = value

    def when_undone(self, change_back: Callable[[], object]) -> None:
        """Registers a function to call when the attachment is undone; the latest is called first."""
        self._changes.callback(change_back)

    def set_while(self, method: str, **arguments: object) -> None:
        """Sets training arguments only while a method of the Trainer runs: other Trainers may share them."""
        trainer, inner = self.trainer, getattr(self.trainer, method)

        def run(*args: object, **kwargs: object) -> object:
            earlier = {name: getattr(trainer.args, name) for name in arguments}
            try:
                for name, value in arguments.items():
                    setattr(trainer.args, name, value)
                return inner(*args, **kwargs)
            finally:
                for name, value in earlier.items():
                    setattr(trainer.args, name, value)

        self.replace(trainer, method, run)

    def add_callback(self, callback: TrainerCallback, *, first: bool) -> None:
        """Adds a callback before or after all others."""
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.insert(0 if first else len(callbacks), callback)

        def remove() -> None:
            with contextlib.suppress(ValueError):  # `trainer.remove_callback` may have removed it
                self.trainer.callback_handler.callbacks.remove(callback)

        self.when_undone(remove)

    def undo(self) -> None:
        """Restores Trainer, callbacks and model, the latest change first."""
        self._changes.close()
        delattr(self.trainer, ATTACHED)

    def check_undoable(self) -> None:
        """Checks that undoing would neither disturb a training nor drop a later change. Raises ConfigError if the
        Trainer is training, or one of its methods was replaced after `attach`; names it."""
        if self.is_training:
            raise ConfigError(
                f"this Trainer is at step {self.trainer.state.global_step} of a training: detach it, or attach "
                "another plugin, after trainer.train() has returned"
            )
        replaced = sorted(self.replaced_since(self._methods))
        if replaced:
            raise ConfigError(
                f"{', '.join(replaced)} of this Trainer was replaced after plugin.attach(trainer), and detaching, or "
                "attaching again, would drop the replacement: take it off the Trainer first"
            )

    def replaced_since(self, names: Iterable[str]) -> set[str]:
        """Returns which of these attributes of the Trainer are neither what this attachment set, nor unset."""
        own, methods = vars(self.trainer), self._methods
        return {name for name in names if own.get(name) is not methods.get(name)}

    def check_unchanged(self) -> None:
        """Checks that the Trainer has not changed since it was attached. Raises ConfigError if parts or arguments have
        changed; names them."""
        changed = [name for name, value in self._parts.items() if getattr(self.trainer, name, None) is not value]
        arguments = self.trainer.args
        changed += [
            f"args.{name} (from {value!r} to {getattr(arguments, name, None)!r})"
            for name, value in self._arguments.items()
            if getattr(arguments, name, None) != value
        ]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} of this Trainer changed after plugin.attach(trainer), which has made its "
                "batches ready; call plugin.attach(trainer) again"
            )


def restorer(model: nn.Module) -> Callable[[], None]:
    """Returns a function that restores a model to its present state: not enabled, or enabled as before. Raises
    UnsupportedAttentionError if it is not a Transformers model."""
    inner = transformers_model(model)
    earlier = watch_of(inner)
    attention = [(config, config._attn_implementation) for config in text_configs(inner)]
    settings_of_layers = {layer: vars(layer).get(LAYER_SETTINGS) for layer in attention_layers(inner).values()}

    def restore() -> None:
        watch = watch_of(inner)
        if watch is not None and watch is not earlier:
            watch.leave({model, inner})
            if earlier is not None:
                earlier.enter()
        for config, implementation in attention:
            if config._attn_implementation == IMPLEMENTATION:  # another one was set since then
                set_attention(config, implementation)
        for layer, settings in settings_of_layers.items():
            if settings is not None:
                setattr(layer, LAYER_SETTINGS, settings)
            elif hasattr(layer, LAYER_SETTINGS):
                delattr(layer, LAYER_SETTINGS)

    return restore


log = get_logger(__name__)

# Methods of a Trainer in which programs call further models.
METHODS = ("compute_loss", "training_step", "prediction_step")


def watch_held_models(attachment: Attachment) -> None:
    """Warns of models that a Trainer holds but that are not enabled, and makes them refuse placed batches."""
    for where, model in held_models(attachment.trainer).items():
        if watch_of(model) is None:
            log.warning(
                "%s (%s) is not enabled, and refuses placed batches, whose rows hold parts of documents. If the loss "
                "uses it on them, call distca_hf.enable(model, plugin) before it is wrapped",
                where,
                type(model).__name__,
            )
            hook = HiddenHook(partial(_refuse_placed, names_by_position(model)))
            attachment.when_undone(model.register_forward_pre_hook(hook, with_kwargs=True).remove)


def held_models(trainer: Trainer) -> dict[str, PreTrainedModel]:
    """Returns Transformers models that share nothing with the model that trains, by the place where they are found:
    attributes of the Trainer and its callbacks, and variables that functions of its loss use."""
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
            with contextlib.suppress(ValueError):  # a variable of an enclosing function has no value yet
                used = inspect.getclosurevars(function)
                for name, value in (*used.nonlocals.items(), *used.globals.items()):
                    yield f"{name} of {function.__qualname__}", value


def _modules(where: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module, or the modules in a collection, each with its place."""
    if isinstance(value, nn.Module):
        yield where, value
        return
    numbered = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in value.items() if isinstance(value, dict) else numbered:
        if isinstance(one, nn.Module):
            yield f"{where}[{key!r}]", one


def _refuse_placed(names: Sequence[str], model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that a model that was not enabled gets neither tokens nor the plan of a placed batch."""
    if watch_of(model) is not None:
        return
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    plan = given.get("distca_plan")
    if not isinstance(plan, LivePlan):
        known = known_batch(given) or copied_batch(given)
        plan = None if known is None else known.plan
    if plan is not None:
        raise placed_in_another_model(plan, type(model).__name__)
