"""Attaches every Trainer of a process for as long as it trains (`distca_hf.attach_every_trainer`).

Upstream: `transformers.Trainer.train`, and `Trainer.__init__` to notice classes whose `train` does not call it.
Callbacks are given to one Trainer each; there is no registry for all of them.
"""

import sys

from distca_hf.patches import Patch


def _apply() -> None:
    from transformers import Trainer

    from distca_hf.integrations.trainer.attach import INSTALLED, attaching, checking

    if not hasattr(Trainer.train, INSTALLED):
        Trainer.__init__ = checking(Trainer.__init__)
        # The plugin is in a higher layer, which imports this one.
        Trainer.train = attaching(Trainer.train, lambda: sys.modules["distca_hf"].DistCAPlugin())


def _revert() -> None:
    from transformers import Trainer

    from distca_hf.integrations.trainer.attach import INSTALLED

    if hasattr(Trainer.train, INSTALLED):
        Trainer.__init__, Trainer.train = Trainer.__init__.__wrapped__, Trainer.train.__wrapped__


every_trainer = Patch(
    name="every_trainer",
    upstream="transformers.Trainer.train, transformers.Trainer.__init__",
    reason="programs make Trainers that nobody else can reach",
    tested=("5.6", "5.24"),
    apply=_apply,
    revert=_revert,
)
