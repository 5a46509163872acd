"""Prefetch: runs an iterator in a background thread and hands its items over in order."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from distca_hf.telemetry import LoaderTimes


Item = TypeVar("Item")

# How often a thread that waits for room looks whether it is still wanted.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """The last thing in the queue."""


class Prefetcher(Generic[Item]):
    """Items of `make()`, up to `depth` of them made before they are asked for.

    The thread never touches a process group. It ends with its iterator, when the consumer stops, or with the main
    thread. A daemon thread would be cut off in the midst of a call, which may abort the process.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int, times: LoaderTimes) -> None:
        self._make = make
        self._queue: queue.Queue[Item | _Failure | type[_End]] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._times = times

    def __iter__(self) -> Generator[Item, None, None]:
        """Yields items in order; an exception of the iterator is raised in its place."""
        thread = threading.Thread(target=self._run, name="distca-ahead")
        thread.start()
        try:
            while True:
                asked = time.perf_counter()
                item = self._queue.get()
                if self._times.begun:  # nothing can be ahead of the very first item
                    self._times.wait_seconds += time.perf_counter() - asked
                self._times.begun = True
                if item is _End:
                    return
                if isinstance(item, _Failure):
                    raise item.error
                handed_over = time.perf_counter()
                yield item  # type: ignore[misc]
                self._times.step_seconds += time.perf_counter() - handed_over
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        try:
            for item in self._make():
                if not self._put(item):
                    return
            self._put(_End)
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: "Item | _Failure | type[_End]") -> bool:
        """Puts an item when there is room; False if the consumer has stopped."""
        while not self._stopped.is_set():
            if not threading.main_thread().is_alive():
                return False
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False
