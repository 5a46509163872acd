"""Loggers whose lines carry name and rank and come once, and how long the training loop waited for data."""

import logging
import sys
from dataclasses import dataclass

from tqdm import tqdm

from distca_hf.config import launched_rank


NAME = "distca_hf"
# Micro-batches whose facts are kept for whoever reports them.
REMEMBERED_MICRO_BATCHES = 1024
# `extra=OF_THIS_RANK` marks a record that other ranks do not write, too.
OF_THIS_RANK = {"of_this_rank": True}


def get_logger(name: str) -> logging.Logger:
    """Returns a logger below `distca_hf`. Information and warnings come from rank 0 alone; errors, debug lines and
    records that `OF_THIS_RANK` marks come from every rank."""
    logger = logging.getLogger(name if name.startswith(NAME) else f"{NAME}.{name}")
    if not any(isinstance(present, OncePerJob) for present in logger.filters):
        logger.addFilter(OncePerJob())
    return logger


def this_rank() -> int:
    """Returns the rank of this process: of its process group, or as launched while there is none."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: planning needs no torch
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return int(distributed.get_rank())  # type: ignore[union-attr]
    return launched_rank()


class OncePerJob(logging.Filter):
    """Lets a record pass on the rank that should write it, and gives it the attribute `rank`."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = this_rank()
        record.__dict__["rank"] = rank
        everywhere = not logging.DEBUG < record.levelno < logging.ERROR or hasattr(record, "of_this_rank")
        return rank == 0 or everywhere


class Console(logging.Handler):
    """Writes to standard error, beside progress bars, where the application has no handler that would."""

    def emit(self, record: logging.LogRecord) -> None:
        given = [*logging.getLogger(NAME).handlers, *logging.getLogger().handlers]
        if any(handler is not self for handler in given):
            return
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        try:
            tqdm.write(f"{NAME} [rank {getattr(record, 'rank', 0)}] {level}{record.getMessage()}", file=sys.stderr)
        except Exception:  # as in all handlers: a closed pipe or a full disk ends no training
            self.handleError(record)


def _prepare(logger: logging.Logger) -> None:
    """Shows information by default, unless the application has said otherwise."""
    logger.addHandler(Console())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_prepare(logging.getLogger(NAME))


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
