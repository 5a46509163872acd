"""Speeds: measures how fast attention servers compute during training, to divide work by time.

    server     kernels ── stopwatch ──▶ report, once per micro-batch ──▶ launcher's store
                                                                              │ read by rank 0
    trainers   kernels ── stopwatch ──▶ numbers in the vote on a step ◀───────┘
                                                  │
               all trainers alike                 `──▶ estimates ──▶ speeds of later plans

Only kernels are timed, and nothing that waits for other ranks. No host waits for its device: times of a GPU come from
events in its stream, which are read once the device has passed them. Trainers compute with the same integers, and so
have equal speeds.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple, cast

import torch

from distca_hf.errors import StoreLostError, first_line
from distca_hf.servers.job_store import JobStore
from distca_hf.servers.memberships import Member
from distca_hf.servers.served_plans import Servers
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Attention calls that a stopwatch remembers before it looks for ended ones.
REMEMBERED_CALLS = 1024
# The latest readings of a process, of which the median counts: a step that is slow by chance changes nothing.
READINGS = 7
# The first readings of a process, which do not count: they include compiling and tuning of kernels.
WARM_UP_READINGS = 1
# Speeds change if one of them changes by more than this fraction. Then batches planned ahead are planned again.
LEAST_CHANGE = 0.05
# Plans without a vote on a step before a warning that speeds are not measured.
UNVOTED_PLANS = 100
# Limits of a measured speed. A slower server still gets some work, and so another reading.
SLOWEST, FASTEST = 0.05, 20.0
# Integers of a reading.
WIDTH = 3

# A moment: nanoseconds, or an event in the stream of a GPU.
Mark = int | torch.cuda.Event


class Reading(NamedTuple):
    """Work and time of one process."""

    flops: int = 0  # operations of its attention calls, as planned
    kernel_nanoseconds: int = 0
    nanoseconds: int = 0

    def plus(self, other: "Reading") -> "Reading":
        return Reading(*(mine + its for mine, its in zip(self, other, strict=True)))

    def since(self, earlier: "Reading") -> "Reading":
        """Returns the difference from an earlier reading of the same process."""
        return Reading(*(mine - its for mine, its in zip(self, earlier, strict=True)))

    @property
    def rate(self) -> float | None:
        """Operations per nanosecond; None if nothing was computed."""
        return self.flops / self.kernel_nanoseconds if self.flops > 0 and self.kernel_nanoseconds > 0 else None

    @property
    def busy_fraction(self) -> float | None:
        """Share of the time in which kernels ran; None if no time passed."""
        return self.kernel_nanoseconds / self.nanoseconds if self.nanoseconds > 0 else None


@dataclass(eq=False)
class MeasuredCall:
    """One attention call."""

    flops: int
    kernels: list[tuple[Mark, Mark]] = field(default_factory=list)  # beginning and end of each kernel call


class Stopwatch:
    """Measures the kernels of attention calls on one device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._began = time.perf_counter_ns()
        self._calls: deque[MeasuredCall] = deque()
        self._total = Reading()
        self._spare: list[torch.cuda.Event] = []

    def begin_call(self, flops: int) -> None:
        """Begins an attention call; the kernels that follow belong to it."""
        if len(self._calls) >= REMEMBERED_CALLS:
            self._add_ended()
        self._calls.append(MeasuredCall(flops))

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """Measures a kernel call, the body of a `with` statement."""
        begin = self._mark()
        yield
        self._calls[-1].kernels.append((begin, self._mark()))

    def read(self) -> Reading:
        """Returns sums over all calls that the device has ended. Must not be called during a call."""
        self._add_ended()
        return self._total._replace(nanoseconds=time.perf_counter_ns() - self._began)

    def discard(self) -> None:
        """Forgets calls that were not read, because one of them was cut off."""
        self._calls.clear()

    def _add_ended(self) -> None:
        """Adds all calls whose last kernel the device has passed, and reuses their events."""
        while self._calls:
            kernels, taken = self._calls[0].kernels, 0
            last = kernels[-1][1] if kernels else 0
            if not isinstance(last, int) and not last.query():
                return
            for begin, end in kernels:
                if isinstance(begin, int):
                    taken += cast(int, end) - begin
                else:
                    end = cast(torch.cuda.Event, end)
                    taken += round(1e6 * begin.elapsed_time(end))
                    self._spare += [begin, end]
            self._total = self._total.plus(Reading(self._calls.popleft().flops, taken))

    def _mark(self) -> Mark:
        """Returns the present moment; on a GPU, in its stream."""
        if not self._is_gpu:
            return time.perf_counter_ns()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RecentRates:
    """The rate at which one process, or all trainers together, compute."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=READINGS)
        self._skipped = 0

    def note(self, reading: Reading) -> None:
        """Takes the reading of a step. Ignores readings without work, and the first ones."""
        if reading.rate is None:
            return
        if self._skipped < WARM_UP_READINGS:
            self._skipped += 1
            return
        self._rates.append(reading.rate)

    @property
    def typical(self) -> float | None:
        """Median of the latest rates; None before the first."""
        return statistics.median(self._rates) if self._rates else None


class SpeedEstimates:
    """Speeds of servers relative to a trainer, estimated from readings: equal readings give equal speeds.

    Args:
        neutral: speed of an unknown server.
        trainers_attend: whether trainers compute attention. If not, speeds are relative to the mean server.
    """

    def __init__(self, neutral: float, trainers_attend: bool) -> None:
        self._neutral, self._trainers_attend = neutral, trainers_attend
        self._of_trainers = RecentRates()
        self._of_servers: dict[Member, RecentRates] = {}
        self._speeds: dict[Member, float] = {}

    def note(self, trainers: Reading, servers: Mapping[Member, Reading]) -> None:
        """Takes the readings of a step: of all trainers together, and of each server that takes part."""
        self._of_trainers.note(trainers)
        self._of_servers = {member: self._of_servers.get(member, RecentRates()) for member in servers}
        for member, reading in servers.items():
            self._of_servers[member].note(reading)
        typical = {member: rates.typical for member, rates in self._of_servers.items()}
        rates = {member: rate for member, rate in typical.items() if rate is not None}
        unit = self._of_trainers.typical
        if not self._trainers_attend:
            unit = statistics.fmean(rates.values()) if rates else None
        if unit is None:
            return
        estimated = {member: round(min(max(rate / unit, SLOWEST), FASTEST), 3) for member, rate in rates.items()}
        in_force = dict(zip(estimated, self.of(list(estimated)), strict=True))
        if any(abs(speed - in_force[member]) > LEAST_CHANGE * in_force[member] for member, speed in estimated.items()):
            self._speeds = {**self._speeds, **estimated}

    def of(self, members: Sequence[Member]) -> tuple[float, ...]:
        """Returns the speeds to plan with; a new process has the neutral one."""
        return tuple(self._speeds.get(member, self._neutral) for member in members)


class ServerSpeeds:
    """A trainer's end: its numbers in the vote on a step, and the speeds that follow from all trainers' numbers. If
    speeds are not measured, servers keep the initial ones."""

    def __init__(self, servers: Servers, is_measured: bool, device: torch.device) -> None:
        # Measures this trainer's kernels; None if speeds are not measured.
        self.stopwatch = Stopwatch(device) if is_measured else None
        self.busy = Reading()  # sum of the readings of all servers, in steps that counted
        self._servers = servers
        self._estimates = SpeedEstimates(servers.speeds[0], servers.trainers_attend)
        self._here: JobStore | None = None
        self._members: Sequence[Member] = ()
        self._last = Reading()
        self._last_reports: list[Reading] | None = None
        self._plans, self._has_voted = 0, False

    def begin_membership(self, members: Sequence[Member], here: JobStore | None) -> Servers | None:
        """Begins to measure these members, and returns their part in plans; None if there are none. Forgets
        measurements of a step that did not count. `here` has their reports, on the trainer that reads it; None on
        others."""
        self._members, self._here, self._last_reports = members, here, None
        if self.stopwatch is not None:
            self.stopwatch.discard()
        return self._present()

    def note_plan(self) -> None:
        """Notes a plan; warns once if there were many plans and no vote."""
        self._plans += 1
        if self._plans == UNVOTED_PLANS and not self._has_voted and self.stopwatch is not None:
            log.warning(
                "attention servers count as fast as trainers: their speed is measured where steps can run again "
                "(plugin.attach, plugin.attempts); for this training give a server_speed"
            )

    def numbers(self) -> list[int]:
        """Returns this trainer's numbers for the vote: its own reading, and on one trainer those of the members.
        Raises StoreLostError if the store is gone."""
        self._has_voted = True
        now = self._last if self.stopwatch is None else self.stopwatch.read()
        mine, self._last = now.since(self._last), now
        return [*mine, *(number for reading in self._reports() for number in reading)]

    def note(self, rows: Sequence[Sequence[int]]) -> Servers | None:
        """Takes the numbers of all trainers for a step that counts. Returns the members' part in later plans."""
        readings = [[Reading(*row[at : at + WIDTH]) for at in range(0, len(row), WIDTH)] for row in rows]
        trainers, of_members = _sum(row[0] for row in readings), zip(*(row[1:] for row in readings), strict=True)
        servers = dict(zip(self._members, map(_sum, of_members), strict=True))
        self.busy = self.busy.plus(_sum(servers.values()))
        if self.stopwatch is not None:
            self._estimates.note(trainers, servers)
        return self._present()

    def _present(self) -> Servers | None:
        """Returns the members' part in plans from now on; None if there are none."""
        chosen = self._servers.some([member.server for member in self._members])
        if chosen is None or self.stopwatch is None:
            return chosen
        return replace(chosen, speeds=self._estimates.of(self._members))

    def _reports(self) -> list[Reading]:
        """Returns the reading of each member since the last vote; at first nothing, because members had waited."""
        nothing = [Reading()] * len(self._members)
        if self._here is None or not self._members:
            return nothing
        try:
            found = self._here.get_all([_key(server) for server, _ in self._members])
        except RuntimeError as error:
            raise StoreLostError(
                f"times of attention servers cannot be read: the launcher's store is gone ({first_line(error)})"
            ) from error
        now = [Reading(**json.loads(text or "{}")) for text in found]
        last, self._last_reports = self._last_reports, now
        return nothing if last is None else [one.since(earlier) for one, earlier in zip(now, last, strict=True)]


def report(here: JobStore, server: int, reading: Reading) -> None:
    """Writes the reading of a server since it joined a membership."""
    here.write(_key(server), reading._asdict())


def _key(server: int) -> str:
    return f"reading/{server}"


def _sum(readings: Iterable[Reading]) -> Reading:
    return reduce(Reading.plus, readings, Reading())
