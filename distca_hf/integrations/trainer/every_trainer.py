"""Every Trainer: attaches each Trainer of a process while it trains, without a change to the program.

`patches/every_trainer.py` wraps Trainer's methods in these functions, for `python -m distca_hf.run --attach` and for
DISTCA_ATTACH=1. Settings come from the recipe or from DISTCA_<FIELD>. The program keeps its batches, unless
`tokens_per_rank` is set. A Trainer stays as it is if the program has attached it, if it has a `DistCACallback`, or if
its model was enabled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn

from transformers import Trainer

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.forward_watch import watch_of
from distca_hf.integrations.models.structure import calls_super
from distca_hf.integrations.trainer.attach import attach, detach
from distca_hf.integrations.trainer.attachment import Attachment
from distca_hf.integrations.trainer.callback import DistCACallback
from distca_hf.integrations.trainer.check import TRAINER
from distca_hf.parallel_context import ParallelContext
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Attribute of the wrapped method: names of classes whose `train` was called.
INSTALLED = "_distca_attaches"


def attaching(train: Callable[..., Any], make: Callable[[], ParallelContext]) -> Callable[..., Any]:
    """Wraps `Trainer.train` in an attachment, and returns it."""

    trained = set[str]()

    @wraps(train)
    def attach_and_train(trainer: Trainer, *args: object, **kwargs: object) -> object:
        trained.add(type(trainer).__name__)
        callbacks = trainer.callback_handler.callbacks
        if (  # the program balances this Trainer itself
            any(isinstance(callback, DistCACallback) for callback in callbacks)
            or Attachment.of(trainer) is not None
            or watch_of(trainer.model) is not None
        ):
            return train(trainer, *args, **kwargs)
        if _replaces(type(trainer), "_inner_training_loop"):
            _refuse(trainer, "_inner_training_loop")
        plugin = make()
        with _attached(trainer, train, plugin):
            output = trainer.train(*args, **kwargs)
        if Attachment.of(trainer) is None:
            plugin.close()  # programs may train many times, and each plugin opens process groups
        return output

    setattr(attach_and_train, INSTALLED, trained)
    return attach_and_train


def checking(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps `Trainer.__init__`, and returns it: a class whose `train` never calls Trainer's will refuse to train."""

    @wraps(init)
    def init_and_check(trainer: Trainer, *args: object, **kwargs: object) -> None:
        init(trainer, *args, **kwargs)
        if _replaces(type(trainer), "train"):
            trainer.train = partial(_refuse, trainer, "train")

    return init_and_check


def _replaces(kind: type[Trainer], method: str) -> bool:
    """Returns whether a class overrides a method of Trainer without calling Trainer's."""
    own = (vars(part)[method] for part in kind.__mro__ if method in vars(part))
    for function in own:
        if function.__module__.startswith(TRAINER):
            return False
        if not calls_super(function, method):
            return True
    return False


def _refuse(trainer: Trainer, method: str, *args: object, **kwargs: object) -> NoReturn:
    """Refuses to train in a loop that is not Trainer's."""
    name = type(trainer).__name__
    raise ConfigError(
        f"distca_hf cannot be attached to this Trainer: {name}.{method} makes its own loop, and does not call "
        f"Trainer's. Leave --attach and DISTCA_ATTACH out, and call distca_hf.enable(model, plugin) in that loop "
        "before the model is wrapped"
    )


@contextmanager
def _attached(trainer: Trainer, train: Callable[..., Any], plugin: ParallelContext) -> Iterator[None]:
    """Attaches a Trainer in a `with` block. There its `train` is Trainer's, because an override is already running. If
    the Trainer was changed meanwhile, it stays attached, with a warning."""
    own = vars(trainer).get("train")
    trainer.train = MethodType(train, trainer)
    try:
        attach(trainer, plugin)
        try:
            yield
        finally:
            try:
                detach(trainer)
            except ConfigError as error:
                log.warning("%s stays attached after its training: %s", type(trainer).__name__, error)
    finally:
        if Attachment.of(trainer) is None:
            del trainer.train
            if own is not None:
                trainer.train = own
