"""Waiting for an event that nothing announces, such as the end of a process that is no child."""

import time
from collections.abc import Callable

import psutil

from support.commands import HANG_SECONDS


def wait_until(is_so: Callable[[], object]) -> None:
    """Waits until something is so.

    Raises:
        AssertionError: it never was.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {HANG_SECONDS} s"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody has asked for its status has."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
