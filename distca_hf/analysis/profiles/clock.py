"""Clock: seconds of a call on a device that is kept busy, as it is in training."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clock:
    """Times calls of a device.

    Attributes:
        device: where calls run.
        enough_seconds: a call is repeated until it took so long in all.
        fewest, most: how often it is repeated.
    """

    device: torch.device
    enough_seconds: float = 0.06
    fewest: int = 2
    most: int = 20

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the median of the calls that come after the first one."""
        run()
        times: list[float] = []
        while len(times) < self.fewest or (sum(times) < self.enough_seconds and len(times) < self.most):
            times.append(self._once(run))
        return statistics.median(times)

    def busy(self, run: Callable[[], object], seconds: float) -> None:
        """Repeats a call for so long: clocks of a GPU fall while it gets warm."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._once(run)

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return max(1e-9, time.perf_counter() - began)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
