"""Attaches every Trainer of a process for as long as it trains (`distca_hf.attach_every_trainer`).

Upstream: `transformers.Trainer.train`, and `Trainer.__init__` to notice classes whose `train` does not call it.
Callbacks are given to one Trainer each; there is no registry for all of them.
"""

import sys
from functools import wraps
from typing import TYPE_CHECKING

from distca_hf.patches import Patch


if TYPE_CHECKING:
    from transformers import Trainer

# Attribute of the wrapped `Trainer.train`: names of the classes whose `train` was called.
TRAINED = "_distca_trained"


def trained_classes() -> set[str]:
    """Returns the names of the classes whose `train` was called."""
    from transformers import Trainer

    found: set[str] = getattr(Trainer.train, TRAINED, set())
    return found


def _apply() -> None:
    from transformers import Trainer

    if hasattr(Trainer.train, TRAINED):
        return
    init, train, trained = Trainer.__init__, Trainer.train, set[str]()

    # Both import `attach` when they are called: it imports Trainer, so its own import may be what applies this patch.
    @wraps(init)
    def init_and_check(trainer: "Trainer", *args: object, **kwargs: object) -> None:
        from distca_hf.integrations.trainer.attach import check_own_train

        init(trainer, *args, **kwargs)
        check_own_train(trainer)

    @wraps(train)
    def attach_and_train(trainer: "Trainer", *args: object, **kwargs: object) -> object:
        from distca_hf.integrations.trainer.attach import train_attached

        trained.add(type(trainer).__name__)
        # The plugin is in a higher layer, which imports this one.
        return train_attached(trainer, train, sys.modules["distca_hf"].DistCAPlugin, *args, **kwargs)

    setattr(attach_and_train, TRAINED, trained)
    Trainer.__init__, Trainer.train = init_and_check, attach_and_train


def _revert() -> None:
    from transformers import Trainer

    if hasattr(Trainer.train, TRAINED):
        Trainer.__init__, Trainer.train = Trainer.__init__.__wrapped__, Trainer.train.__wrapped__


every_trainer = Patch(
    name="every_trainer",
    upstream="transformers.Trainer.train, transformers.Trainer.__init__",
    reason="programs make Trainers that nobody else can reach",
    tested=("5.6", "5.24"),
    apply=_apply,
    revert=_revert,
)
