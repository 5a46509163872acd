"""Loggers, and the numbers a training run wants to see about its own balance."""

import logging
from dataclasses import dataclass


# Micro-batches whose facts are kept for whoever reports them.
REMEMBERED_MICRO_BATCHES = 1024


def get_logger(name: str) -> logging.Logger:
    """A logger below `distca_hf`; handlers and levels belong to the application."""
    return logging.getLogger(name if name.startswith("distca_hf") else f"distca_hf.{name}")


@dataclass
class LoaderTimes:
    """How long the training loop waited for data, against how long its steps took (seconds, summed)."""

    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    plan_seconds: float = 0.0
    micro_batches: int = 0
    begun: bool = False

    @property
    def wait_share(self) -> float:
        """Waiting as a share of all time since the first micro-batch."""
        total = self.wait_seconds + self.step_seconds
        return self.wait_seconds / total if total else 0.0
