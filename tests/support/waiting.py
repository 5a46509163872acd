"""Waiting for an event that nothing announces."""

import time
from collections.abc import Callable

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
