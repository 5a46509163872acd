"""The meter: time, bytes and waiting of the training alone."""

import time

import pytest
import torch

from distca_hf.batches.meter import Meter
from distca_hf.comm.transport import LocalTransport
from distca_hf.planning.kinds import PlanTotals
from distca_hf.telemetry import LoaderTimes


class Source:
    """Where plans would come from."""

    def __init__(self) -> None:
        self.totals, self.times = PlanTotals(), LoaderTimes()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_evaluation_is_left_out_wherever_it_comes(clock: list[float]) -> None:
    source, transport = Source(), LocalTransport()
    meter = Meter(transport, torch.device("cpu"), None)

    def passes(seconds: float) -> None:
        clock[0] += seconds
        transport.traffic.bytes_sent += round(10 * seconds)
        transport.traffic.waited_seconds += seconds / 2

    def evaluates() -> None:
        passes(100.0)
        meter.leave_out_evaluation()

    meter.begin(source)
    evaluates()  # before the first step
    for _ in range(2):
        passes(1.0)
        meter.note_training()
        evaluates()
        evaluates()  # a second dataset
    passes(2.0)
    source.totals = PlanTotals(micro_batches=3, tokens=8)
    reading = meter.read(source, 3, None)

    assert reading is not None
    assert (reading.seconds, reading.sent_bytes, reading.waited_seconds) == (4.0, 40, 2.0)

    evaluates()  # right behind a log
    passes(3.0)
    source.totals = PlanTotals(micro_batches=4, tokens=9)
    again = meter.read(source, 4, None)

    assert again is not None
    assert (again.seconds, again.sent_bytes, again.totals.tokens) == (3.0, 30, 1)
