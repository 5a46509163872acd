"""Options of programs that train whole models."""

import argparse

from lib.whole_model.head import HEADS
from lib.whole_model.rounds import OPTIMIZERS


def add_head(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--head`, by default this one, and `--optimizer`."""
    parser.add_argument("--head", choices=[*HEADS], default=default, help="none is Transformers' own")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adamw_torch_fused", help="as Trainer names it")
