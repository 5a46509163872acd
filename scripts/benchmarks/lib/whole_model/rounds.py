"""Training steps in rounds: as in `lib/rounds.py`, and an optimizer.

The learning rate is 0. An optimizer's step takes as long as any other, but weights stay as they are: all modes have
the same ones in every round, and their losses can be compared.
"""

import argparse

import torch
from torch.optim import AdamW

from lib.model import LossModel
from lib.modes import Mode
from lib.rounds import Runner
from lib.whole_model.head import HEADS
from lib.wires import Wires


# Names of TrainingArguments, and AdamW's `fused`; None is its default.
OPTIMIZERS = {"adamw_torch_fused": True, "adamw_torch": None}


class TrainingRunner(Runner):
    """Runs forward, backward, and the optimizer.

    Args:
        optimizer: one of `OPTIMIZERS`.
    """

    def __init__(self, model: LossModel, wires: Wires, device: torch.device, optimizer: str) -> None:
        super().__init__(model, wires, device)
        self._optimizer = AdamW(model.parameters(), lr=0.0, fused=OPTIMIZERS[optimizer])

    def step(self, mode: Mode) -> torch.Tensor:
        """Runs a step, and the optimizer's; returns the loss of this rank's tokens, a scalar."""
        loss = super().step(mode)
        self._optimizer.step()
        return loss


def add_head(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--head`, by default this one, and `--optimizer`."""
    parser.add_argument("--head", choices=[*HEADS], default=default, help="none is Transformers' own")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adamw_torch_fused", help="as Trainer names it")
