"""Measured speeds: sums of a stopwatch, estimates that follow readings, and numbers that make all trainers agree."""

import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distca_hf.errors import StoreLostError
from distca_hf.servers import speeds
from distca_hf.servers.job_store import JobStore
from distca_hf.servers.memberships import Member
from distca_hf.servers.served_plans import Servers
from distca_hf.servers.speeds import (
    FASTEST,
    LEAST_CHANGE,
    READINGS,
    SLOWEST,
    Reading,
    ServerSpeeds,
    SpeedEstimates,
    Stopwatch,
    report,
)


CPU = torch.device("cpu")
FIRST, SECOND = Member(0, 0), Member(1, 0)
# Operations and nanoseconds of a trainer's step.
STEP = Reading(10**9, 10**6, 10**7)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(speeds.time, "perf_counter_ns", made)
    return made


def kernel_of(stopwatch: Stopwatch, clock: Clock, nanoseconds: int) -> None:
    with stopwatch.kernel():
        clock.now += nanoseconds


def slowed(speed: float) -> Reading:
    """The reading of a server that is so fast, for as much work as a trainer has."""
    return STEP._replace(kernel_nanoseconds=round(STEP.kernel_nanoseconds / speed))


def estimates_of(*steps: tuple[float, float], trainers_attend: bool = True) -> SpeedEstimates:
    """Estimates behind steps in which the servers had these speeds."""
    found = SpeedEstimates(1.0, trainers_attend)
    for first, second in steps:
        found.note(STEP if trainers_attend else Reading(), {FIRST: slowed(first), SECOND: slowed(second)})
    return found


def test_a_stopwatch_adds_kernels_and_leaves_out_the_time_between_them(clock: Clock) -> None:
    stopwatch = Stopwatch(CPU)
    stopwatch.begin_call(100)
    kernel_of(stopwatch, clock, 5)
    clock.now += 1000
    kernel_of(stopwatch, clock, 7)
    stopwatch.begin_call(30)
    kernel_of(stopwatch, clock, 1)

    assert stopwatch.read() == Reading(130, 13, 1013)
    clock.now += 87
    assert stopwatch.read() == Reading(130, 13, 1100)
    assert stopwatch.read().busy_fraction == 13 / 1100


def test_calls_that_were_cut_off_count_for_nothing(clock: Clock) -> None:
    stopwatch = Stopwatch(CPU)
    stopwatch.begin_call(100)
    with pytest.raises(ValueError, match="lost"), stopwatch.kernel():
        raise ValueError("lost")
    stopwatch.discard()
    stopwatch.begin_call(1)
    kernel_of(stopwatch, clock, 2)

    assert stopwatch.read() == Reading(1, 2, 2)


def test_a_stopwatch_that_nobody_reads_does_not_grow(clock: Clock) -> None:
    stopwatch = Stopwatch(CPU)
    for _ in range(3 * speeds.REMEMBERED_CALLS):
        stopwatch.begin_call(1)
        kernel_of(stopwatch, clock, 1)

    assert len(stopwatch._calls) <= speeds.REMEMBERED_CALLS
    assert stopwatch.read().flops == 3 * speeds.REMEMBERED_CALLS


class Event:
    """An event of a GPU that a test lets happen."""

    made: list["Event"]
    passed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0
        Event.made.append(self)

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end: "Event") -> float:
        assert end.query()  # torch would raise, or wait
        return 0.25 * (end.at - self.at)

    recorded = 0


def test_times_of_a_gpu_are_read_once_its_stream_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made, Event.passed, Event.recorded = [], 0, 0
    monkeypatch.setattr(speeds.torch.cuda, "Event", Event)
    stopwatch = Stopwatch(torch.device("cuda", 0))
    for flops in (1, 10, 100):
        stopwatch.begin_call(flops)
        for _ in range(2):
            with stopwatch.kernel():
                pass

    assert stopwatch.read()[:2] == (0, 0)
    Event.passed = 9  # the last event of the third call is still to come
    assert stopwatch.read()[:2] == (11, 1_000_000)
    stopwatch.begin_call(1000)
    with stopwatch.kernel():
        pass
    Event.passed = Event.recorded
    assert stopwatch.read()[:2] == (1111, 1_750_000)
    assert len(Event.made) == 12  # events are used again


def test_a_server_that_takes_twice_as_long_gets_half_of_the_work() -> None:
    assert estimates_of(*[(1.0, 0.5)] * 2).of([FIRST, SECOND]) == (1.0, 0.5)


def test_first_readings_count_for_nothing_and_later_ones_replace_each_other() -> None:
    assert estimates_of((0.1, 0.1)).of([FIRST, SECOND]) == (1.0, 1.0)
    warm = [(0.1, 0.1), (2.0, 1.0)]
    assert estimates_of(*warm).of([FIRST, SECOND]) == (2.0, 1.0)
    changed = [*warm, *[(2.0, 1.0)] * READINGS, *[(2.0, 0.25)] * (READINGS // 2)]
    assert estimates_of(*changed).of([FIRST, SECOND]) == (2.0, 1.0)
    assert estimates_of(*changed, (2.0, 0.25)).of([FIRST, SECOND]) == (2.0, 0.25)


def test_small_changes_leave_plans_as_they_are() -> None:
    steady = [(1.0, 0.5)] * 2
    assert estimates_of(*steady, *[(1.0, 0.5 * (1 + LEAST_CHANGE / 2))] * READINGS).of([SECOND]) == (0.5,)
    [larger] = estimates_of(*steady, *[(1.0, 0.5 * (1 + 4 * LEAST_CHANGE))] * READINGS).of([SECOND])
    assert larger == pytest.approx(0.6, rel=LEAST_CHANGE)


def test_a_process_that_has_just_come_begins_anew() -> None:
    found = estimates_of(*[(1.0, 0.5)] * 5)
    again = Member(1, 1)
    assert found.of([FIRST, again]) == (1.0, 1.0)
    for _ in range(2):
        found.note(STEP, {FIRST: slowed(1.0), again: slowed(0.8)})
    assert found.of([FIRST, again]) == (1.0, 0.8)


def test_without_trainers_that_attend_speeds_are_relative_to_the_mean_server() -> None:
    assert estimates_of(*[(3.0, 1.0)] * 2, trainers_attend=False).of([FIRST, SECOND]) == (1.5, 0.5)


readings = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)).map(lambda pair: Reading(*pair, 2**41))


@given(st.lists(st.tuples(readings, readings, readings), max_size=12), st.booleans())
def test_speeds_are_bounded_and_the_same_on_all_trainers(
    steps: list[tuple[Reading, Reading, Reading]], trainers_attend: bool
) -> None:
    estimates = [SpeedEstimates(1.0, trainers_attend) for _ in range(2)]
    for trainers, first, second in steps:
        for one in estimates:
            one.note(trainers, {FIRST: first, SECOND: second})
        found = [one.of([FIRST, SECOND]) for one in estimates]
        assert found[0] == found[1]
        assert all(SLOWEST <= speed <= FASTEST for speed in found[0])


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_slow_step_now_and_then_changes_nothing(seed: int, first: float, second: float) -> None:
    rng = random.Random(seed)
    steps = [(first, second)] * (READINGS + 1)
    disturbed = set(rng.sample(range(20), 5))
    for step in range(20):
        slow = rng.uniform(0.01, 1.0) if step in disturbed else 1.0
        # No more than three of the seven latest readings are disturbed, or the median may be one of them.
        recent = [step - back for back in range(READINGS) if step - back in disturbed]
        steps.append((first * (slow if len(recent) <= READINGS // 2 else 1.0), second))
    speeds_found = estimates_of(*steps).of([FIRST, SECOND])
    assert speeds_found == pytest.approx((first, second), rel=LEAST_CHANGE, abs=1e-3)


def vote(trainers: list[ServerSpeeds]) -> None:
    """The vote on a step that counts."""
    rows = [trainer.numbers() for trainer in trainers]
    assert len({len(row) for row in rows}) == 1
    for trainer in trainers:
        trainer.note(rows)


def a_store() -> JobStore:
    return JobStore(HashStore(), "of a test", "servers")


def trainers_with(store: Any, is_measured: bool = True, members: tuple[Member, ...] = (FIRST, SECOND)) -> Any:
    trainers = [ServerSpeeds(Servers((1.0, 1.0)), is_measured, CPU) for _ in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.begin_membership(members, store if rank == 0 else None)
    return trainers


def test_one_trainer_reads_and_all_plan_alike(clock: Clock) -> None:
    store, sums = a_store(), [Reading(), Reading()]
    trainers = trainers_with(store)
    for _ in range(4):
        for server, reading in enumerate([slowed(1.0), slowed(0.5)]):
            report(store, server, sums[server])
            sums[server] = sums[server].plus(reading)
        for trainer in trainers:
            trainer.stopwatch.begin_call(STEP.flops)
            kernel_of(trainer.stopwatch, clock, STEP.kernel_nanoseconds)
        vote(trainers)

    assert [trainer._present() for trainer in trainers] == [Servers((1.0, 0.5))] * 2
    # Reports come a step late, and the first one only says from when on they count.
    assert trainers[1].busy == slowed(1.0).plus(slowed(0.5)).plus(slowed(1.0)).plus(slowed(0.5)).plus(
        slowed(1.0).plus(slowed(0.5))
    )
    assert trainers[0].busy == trainers[1].busy


def test_given_speeds_stay(clock: Clock) -> None:
    store = a_store()
    trainers = trainers_with(store, is_measured=False)
    assert trainers[0].stopwatch is None
    for step in range(4):
        for server in range(2):
            report(store, server, Reading(step * 10**9, step * 10**7, step * 10**8))
        vote(trainers)

    assert trainers[0]._present() == Servers((1.0, 1.0))
    assert trainers[1].busy.busy_fraction == 0.1


def test_a_new_membership_forgets_the_step_that_did_not_count(clock: Clock) -> None:
    trainers = trainers_with(a_store(), members=())
    trainers[0].stopwatch.begin_call(10**9)
    trainers[0].begin_membership((), None)
    trainers[0].stopwatch.begin_call(1)
    kernel_of(trainers[0].stopwatch, clock, 1)

    assert trainers[0].numbers()[:2] == [1, 1]
    assert trainers[0]._present() is None


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def get_all(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("Connection reset by peer\nmore")

    trainers = trainers_with(Gone())
    with pytest.raises(StoreLostError, match=r"times of attention servers .* \(Connection reset by peer\)"):
        trainers[0].numbers()


def test_speeds_that_nobody_votes_on_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    (measured, voted), (given, _) = trainers_with(a_store(), members=()), trainers_with(a_store(), False, ())
    voted.numbers()
    with caplog.at_level(logging.WARNING, "distca_hf"):
        for one in (voted, given, measured):
            for _ in range(2 * speeds.UNVOTED_PLANS):
                one.note_plan()

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "attention servers count as fast as trainers"
    ]
