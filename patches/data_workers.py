"""Lets worker processes of `DataLoader` outlive SIGTERM and Ctrl-C, for a training that saves on these signals.

Launchers, schedulers and terminals signal all processes of a job. A rank needs batches until all ranks know of the
signal, so its workers must not end earlier. They end with their iterator, or after their rank.

Upstream: `torch.utils.data.DataLoader.__iter__`. Trainer initialises workers in training but not in evaluation, and a
program may have loaders that Trainer does not know, so there is no single place for an initialisation.

Torch and Python send SIGTERM to a worker that hangs, or that is left at exit. Here they kill it.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable
from functools import wraps
from multiprocessing import forkserver
from types import FrameType
from typing import Any

from distca_hf.patches import Patch


# The signals that workers outlive.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class OutliveSignals:
    """An initialisation of a worker.

    Args:
        then: the loader's own initialisation, which follows.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            signal.signal(number, _do_nothing)  # not SIG_IGN, which programs that a worker starts would inherit
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self._then is not None:
            self._then(worker)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal."""


def _protecting(iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a `DataLoader.__iter__` whose workers outlive the signals."""

    @wraps(iterate)
    def iterate_with_protected_workers(loader: Any) -> Any:
        if not loader.num_workers:
            return iterate(loader)
        if not isinstance(loader.worker_init_fn, OutliveSignals):
            loader.worker_init_fn = OutliveSignals(loader.worker_init_fn)
        if (loader.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
            forkserver.ensure_running()  # while signals are not blocked: its children inherit that
        before = set(multiprocessing.active_children())
        # Workers inherit what is blocked, so that no signal meets one that is not initialised yet.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            iterator = iterate(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate = worker.kill  # type: ignore[method-assign]
        return iterator

    return iterate_with_protected_workers


def _end_workers() -> None:
    """Ends remaining workers when Python ends, before it waits for them. Torch would report each of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if "terminate" in vars(child):
            child.kill()


def _apply() -> None:
    from torch.utils.data import DataLoader

    if not hasattr(DataLoader.__iter__, "__wrapped__"):
        DataLoader.__iter__ = _protecting(DataLoader.__iter__)  # type: ignore[method-assign]
        atexit.register(_end_workers)


def _revert() -> None:
    from torch.utils.data import DataLoader

    DataLoader.__iter__ = getattr(DataLoader.__iter__, "__wrapped__", DataLoader.__iter__)  # type: ignore[method-assign]
    atexit.unregister(_end_workers)


data_workers = Patch(
    name="data_workers",
    upstream="torch.utils.data.DataLoader.__iter__",
    reason="workers must outlive the signals on which their rank saves a checkpoint",
    tested=("2.11", "2.13"),
    apply=_apply,
    revert=_revert,
)
