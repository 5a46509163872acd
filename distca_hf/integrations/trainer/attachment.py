"""Attachment: all that attaching has changed on a Trainer, so that it can be undone and done again."""

from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback

from distca_hf.errors import ConfigError


# Attribute of an attached Trainer.
ATTACHED = "_distca_attachment"
# Parts that batches depend on: one that was replaced after `attach` has not been checked.
PARTS = ("train_dataset", "data_collator", "compute_loss_func", "model_init")
ARGUMENTS = ("gradient_accumulation_steps", "seed", "data_seed", "label_smoothing_factor", "world_size")


class Attachment:
    """Replaced attributes and added callbacks of one Trainer.

    Attributes:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._replaced: list[tuple[object, str, bool, Any]] = []
        self._callbacks: list[TrainerCallback] = []
        self._parts = {name: getattr(trainer, name, None) for name in PARTS}
        self._arguments = {name: getattr(trainer.args, name, None) for name in ARGUMENTS}
        setattr(trainer, ATTACHED, self)

    @classmethod
    def of(cls, trainer: Trainer) -> "Attachment | None":
        """Returns the attachment of a Trainer; None if nothing is attached to it."""
        found: Attachment | None = getattr(trainer, ATTACHED, None)
        return found

    def replace(self, owner: object, name: str, value: Any) -> None:
        """Sets an attribute of the Trainer or of a part of it."""
        self._replaced.append((owner, name, name in vars(owner), vars(owner).get(name)))
        setattr(owner, name, value)

    def set_while(self, method: str, **arguments: Any) -> None:
        """Sets training arguments for the time that a method of the Trainer runs: other Trainers may share them."""
        self.replace(self.trainer, method, partial(self._run, getattr(self.trainer, method), arguments))

    def _run(self, method: Any, arguments: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method with other arguments."""
        earlier = {name: getattr(self.trainer.args, name) for name in arguments}
        try:
            for name, value in arguments.items():
                setattr(self.trainer.args, name, value)
            return method(*args, **kwargs)
        finally:
            for name, value in earlier.items():
                setattr(self.trainer.args, name, value)

    def add_callback(self, callback: TrainerCallback, *, first: bool) -> None:
        """Adds a callback before or behind all others."""
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.insert(0 if first else len(callbacks), callback)
        self._callbacks.append(callback)

    def undo(self) -> None:
        """Gives the Trainer back what it had, the latest change first."""
        for owner, name, was_there, earlier in reversed(self._replaced):
            if was_there:
                setattr(owner, name, earlier)
            else:
                delattr(owner, name)
        for callback in self._callbacks:
            self.trainer.callback_handler.callbacks.remove(callback)
        self._replaced.clear()
        self._callbacks.clear()
        delattr(self.trainer, ATTACHED)

    def check_unchanged(self) -> None:
        """Checks that the Trainer is still the one that was attached to.

        Raises:
            ConfigError: names what was changed since.
        """
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
