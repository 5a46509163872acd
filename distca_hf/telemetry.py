"""Telemetry: log lines, once per job; an error for the launcher's summary; the time that training waits for data."""

import contextlib
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from distca_hf.errors import printable
from distca_hf.launched import launched_error_file, launched_rank
from distca_hf.whole_file import replaced


NAME = "distca_hf"
# Maximum number of micro-batches whose facts are kept until they are reported.
REMEMBERED_MICRO_BATCHES = 1024
# `extra=OF_THIS_RANK` marks a record that concerns only this rank: every rank writes it.
OF_THIS_RANK = {"of_this_rank": True}


def get_logger(name: str) -> logging.Logger:
    """Returns a logger below `distca_hf`.

    Only rank 0 writes information and warnings. Every rank writes errors, debug lines and records marked by
    `OF_THIS_RANK`.
    """
    logger = logging.getLogger(name if name.startswith(NAME) else f"{NAME}.{name}")
    if not any(isinstance(present, OncePerJob) for present in logger.filters):
        logger.addFilter(OncePerJob())
    return logger


def this_rank() -> int:
    """Returns the rank of this process in its process group; without a group, its launched rank."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: planning needs no torch
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return int(distributed.get_rank())  # type: ignore[union-attr]
    return launched_rank()


def warn(message: str, stacklevel: int) -> None:
    """Warns on rank 0 of the job. Python shows a repeated warning once. `stacklevel` is counted as in
    `warnings.warn`, from the caller."""
    if this_rank() == 0:
        warnings.warn(message, stacklevel=stacklevel + 1)


class OncePerJob(logging.Filter):
    """A filter that passes a record on the ranks that write it, and adds the attribute `rank`."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = this_rank()
        record.__dict__["rank"] = rank
        everywhere = not logging.DEBUG < record.levelno < logging.ERROR or hasattr(record, "of_this_rank")
        return rank == 0 or everywhere


class Console(logging.Handler):
    """A handler that writes to standard error, above progress bars, if the application has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        given = [*logging.getLogger(NAME).handlers, *logging.getLogger().handlers]
        if any(handler is not self for handler in given):
            return
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        try:
            message = printable(record.getMessage())
            tqdm.write(f"{NAME} [rank {getattr(record, 'rank', 0)}] {level}{message}", file=sys.stderr)
        except Exception:  # as in all handlers: a closed pipe or a full disk must not end the training
            self.handleError(record)


_log = logging.getLogger(NAME)
_log.addHandler(Console())
if _log.level == logging.NOTSET:  # the application has not set a level
    _log.setLevel(logging.INFO)


@dataclass
class LoaderTimes:
    """Sums of seconds in which the training loop waited for data, its steps ran, and batches were planned."""

    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    plan_seconds: float = 0.0
    micro_batches: int = 0
    begun: bool = False

    @property
    def wait_share(self) -> float:
        """Waiting as a fraction of all time since the first micro-batch."""
        total = self.wait_seconds + self.step_seconds
        return self.wait_seconds / total if total else 0.0


def leave_for_launcher(message: str, follows: bool = False) -> None:
    """Writes an error into the file that the launcher reads if this process fails.

    Writes nothing if the launcher named no file, or if it already exists (`torch.distributed.elastic`'s `record`). An
    error that follows another process's gets a later second: the launcher shows the earliest as cause.
    """
    name = launched_error_file()
    if name is None:
        return
    # The format of torch.distributed.elastic. With a call stack, its summary would not show the message.
    content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()) + follows)}}}
    with contextlib.suppress(OSError):  # the error is printed in any case
        if not Path(name).exists():
            with replaced(Path(name)) as whole:  # a partial file would make the launcher fail
                whole.write_text(json.dumps(content), encoding="utf-8")
