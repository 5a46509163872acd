"""Meter: speed, balance, bytes and waiting of all ranks between two readings. A reading is one gather of a few
integers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.flops import StepFlops, peak_flops
from distca_hf.planning.kinds import PlanTotals
from distca_hf.telemetry import LoaderTimes


# Share of the time below which waiting is too short to name the rank that others wait for.
LITTLE_WAITING = 0.01
# Dtypes for which a GPU's peak is known, and so its utilisation.
HALF = (torch.bfloat16, torch.float16)


class PlanSource(Protocol):
    """Where plans come from: the placed loader, or the planner of given batches."""

    times: LoaderTimes

    @property
    def totals(self) -> PlanTotals:
        """Sums over micro-batches so far."""
        ...


@dataclass(frozen=True)
class MeterReading:
    """Counts and times of all ranks since the previous reading; equal on all of them.

    Attributes:
        num_ranks: number of ranks in the group.
        seconds: time that passed on this rank, without evaluation.
        totals: of the micro-batches.
        sent_bytes, plan_seconds, loader_wait_seconds, waited_seconds: each on the rank with the most.
        slowest_rank: number in the group of the rank that waited least for others; None in a reading of one rank.
        utilisation: operations of the model over the peak of these ranks' GPUs, without attention servers. None if
            unknown.
        memory_bytes: most that torch had allocated at once on a GPU since the process began; None on CPUs.
    """

    num_ranks: int
    seconds: float
    totals: PlanTotals
    sent_bytes: int
    plan_seconds: float
    loader_wait_seconds: float
    waited_seconds: float
    slowest_rank: int | None
    utilisation: float | None
    memory_bytes: int | None

    def basic(self) -> dict[str, float]:
        """Returns the most-watched metrics, as far as they are known."""
        totals = self.totals
        metrics = {"distca/imbalance": totals.imbalance / totals.micro_batches}
        if totals.step_imbalance:
            metrics |= {"distca/step_imbalance": totals.step_imbalance / totals.micro_batches}
        metrics |= {"distca/tokens_per_second_per_rank": totals.tokens / self.seconds / self.num_ranks}
        if self.utilisation is not None:
            metrics |= {"distca/utilisation": self.utilisation}
        if self.memory_bytes is not None:
            metrics |= {"distca/memory_gib": self.memory_bytes / 2**30}
        return metrics

    def all(self, documents_truncated: int) -> dict[str, float]:
        """Returns the basic metrics, and others that help to see why a training is slow."""
        totals, count = self.totals, self.totals.micro_batches
        metrics = self.basic() | {
            "distca/imbalance_before": totals.imbalance_before / count,
            "distca/mbytes_sent_max": self.sent_bytes / count / 1e6,
            "distca/plan_ms": 1e3 * self.plan_seconds / count,
            "distca/loader_wait_ms": 1e3 * self.loader_wait_seconds / count,
            "distca/wait_ms_max": 1e3 * self.waited_seconds / count,
            "distca/slowest_rank": float(self.slowest_rank or 0),
            "distca/tokens_per_second": totals.tokens / self.seconds,
            "distca/documents_truncated": float(documents_truncated),
        }
        if mixed := totals.mixed_micro_batches:  # the model has full layers and layers with a window
            metrics |= {
                "distca/imbalance_full": totals.imbalance_full / mixed,
                "distca/imbalance_window": totals.imbalance_window / mixed,
            }
        if totals.step_imbalance:  # work of a step is counted
            metrics |= {
                "distca/step_imbalance_before": totals.step_imbalance_before / count,
                "distca/token_imbalance_before": totals.token_imbalance_before / count,
                "distca/token_imbalance": totals.token_imbalance / count,
            }
        return metrics

    def in_words(self, done: str) -> str:
        """Returns a one-line summary of a finished training or epoch.

        Args:
            done: the beginning of the line.
        """
        totals, seconds = self.totals, self.seconds
        waited_much = self.slowest_rank is not None and self.waited_seconds >= LITTLE_WAITING * seconds
        slow = f", mostly for rank {self.slowest_rank}" if waited_much else ""
        shared, tokens = totals.shared_tokens, totals.tokens
        saved = f" ({shared:,} of them, {shared / tokens:.0%}, saved by shared prefixes)" if shared else ""
        return (
            f"{done}: {tokens:,} tokens{saved} in {duration(seconds)}, {tokens / seconds:,.0f} per second; "
            f"{totals.balance}; waited {self.loader_wait_seconds / seconds:.1%} of the time for data, "
            f"{self.waited_seconds / seconds:.1%} for other ranks{slow}"
        )


def duration(seconds: float) -> str:
    """Returns seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Moment(NamedTuple):
    """Totals at a moment: time, bytes that this rank has sent, time that it has waited for others."""

    seconds: float
    sent_bytes: int
    waited_seconds: float

    def since(self, earlier: "Moment") -> "Moment":
        """Returns the difference from an earlier moment."""
        seconds, sent_bytes, waited_seconds = (now - then for now, then in zip(self, earlier, strict=True))
        return Moment(seconds, int(sent_bytes), waited_seconds)


class Meter:
    """Measures a training.

    Args:
        flops: operations of the model; None if they are not known.
    """

    def __init__(self, transport: Transport, device: torch.device, flops: StepFlops | None) -> None:
        self._transport, self._device, self._flops = transport, device, flops
        self.begin(None)

    def begin(self, source: PlanSource | None) -> None:
        """Counts from here on; there may be no source before the first batch."""
        self._began = self._trained_until = self._now()
        self._totals = PlanTotals() if source is None else source.totals
        self._times = LoaderTimes() if source is None else replace(source.times)

    def note_training(self) -> None:
        """Notes that the model has trained until now."""
        self._trained_until = self._now()

    def leave_out_evaluation(self) -> None:
        """Leaves out time and bytes since the model trained."""
        now = self._now()
        self._began, self._trained_until = now.since(self._trained_until.since(self._began)), now

    def _now(self) -> Moment:
        traffic = self._transport.traffic
        return Moment(time.perf_counter(), traffic.bytes_sent, traffic.waited_seconds)

    def read(self, source: PlanSource, step: int, dtype: torch.dtype | None) -> MeterReading | None:
        """Returns a reading and begins the next one; None if nothing was planned. A collective call: all ranks read at
        the same steps."""
        totals, passed = source.totals.since(self._totals), self._now().since(self._began)
        mine = self._mine(source, passed)
        self.begin(source)
        if not totals.micro_batches:
            return None
        by_rank = Agreement.start(self._transport, Occasion.REPORT, step, {}, mine).wait()
        return self._reading(totals, passed.seconds, by_rank, dtype)

    def read_here(self, source: PlanSource) -> MeterReading:
        """Returns a reading without the other ranks: times and bytes are this rank's."""
        totals, passed = source.totals.since(self._totals), self._now().since(self._began)
        mine = {name: [value] for name, value in self._mine(source, passed).items()}
        return self._reading(totals, passed.seconds, mine, None)

    def _mine(self, source: PlanSource, passed: Moment) -> dict[str, int]:
        """Returns the numbers of this rank, by name."""
        times = source.times
        return {
            "wait_ns": round(1e9 * (times.wait_seconds - self._times.wait_seconds)),
            "plan_ns": round(1e9 * (times.plan_seconds - self._times.plan_seconds)),
            "sent_bytes": passed.sent_bytes,
            "waited_ns": round(1e9 * passed.waited_seconds),
            "memory_bytes": torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0,
        }

    def _reading(
        self, totals: PlanTotals, seconds: float, by_rank: Mapping[str, Sequence[int]], dtype: torch.dtype | None
    ) -> MeterReading:
        """Returns the reading that follows from the numbers of all ranks."""
        num_ranks = len(self._transport.grid.ranks)
        utilisation = None  # not known
        if self._flops is not None and self._device.type == "cuda" and dtype in HALF:
            peak = peak_flops(torch.cuda.get_device_name(self._device))
            if peak is not None:
                utilisation = self._flops.useful(totals.tokens - totals.shared_tokens, totals.pairs) / (
                    num_ranks * seconds * peak
                )
        most = {name: max(values) for name, values in by_rank.items()}
        return MeterReading(
            num_ranks=num_ranks,
            seconds=seconds,
            totals=totals,
            sent_bytes=most["sent_bytes"],
            plan_seconds=most["plan_ns"] / 1e9,
            loader_wait_seconds=most["wait_ns"] / 1e9,
            waited_seconds=most["waited_ns"] / 1e9,
            slowest_rank=int(np.argmin(by_rank["waited_ns"])) if len(by_rank["waited_ns"]) == num_ranks else None,
            utilisation=utilisation,
            memory_bytes=most["memory_bytes"] or None,
        )
