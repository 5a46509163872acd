"""Pending traces: notes moments within the attention calls of a pass, and keeps them until the device is past them.

In most steps nothing is noted: `UNTRACED` takes every call and does nothing. Nothing waits for the device until
training has ended.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import sysconf

import torch

from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes
from distca_hf.runtime.device_routing import DeviceRankPlan
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.trace_file import TraceFile
from distca_hf.traces import CallTrace, LayersTrace, MemoryUse, PassPart, RankTrace, Spent


# A moment: nanoseconds of the host, or an event in the stream of a GPU.
Moment = int | torch.cuda.Event


class PassTrace:
    """Takes the moments of a pass and does nothing; `NotedPass` notes them."""

    def begin(self, part: PassPart, layer: int, window_tokens: int) -> None:
        """Begins an attention call."""

    def spent(self, use: Spent) -> None:
        """Ends a span of the call: the time since the previous moment was spent on this."""

    def end_forward(self, backward_calls: int) -> None:
        """Ends the forward pass."""


class Untraced(PassTrace):
    """Notes nothing. Layers call `spent` many times, and a builtin takes a tenth of a method's time."""

    spent = staticmethod(bool)  # type: ignore[assignment]


UNTRACED = Untraced()


class NotedPass(PassTrace):
    """Notes moments on one device. On a GPU they are events in the stream of attention, and are read once the device
    has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._began = self._last = self._now()
        self._calls: list[tuple[PassPart, int, int, Moment]] = []
        self._spans: list[list[tuple[Spent, Moment]]] = []
        self._backward_calls: int | None = None

    def begin(self, part: PassPart, layer: int, window_tokens: int) -> None:
        self._last = self._now()
        self._calls.append((part, layer, window_tokens, self._last))
        self._spans.append([])

    def spent(self, use: Spent) -> None:
        self._last = self._now()
        self._spans[-1].append((use, self._last))

    def end_forward(self, backward_calls: int) -> None:
        self._backward_calls = backward_calls

    @property
    def is_complete(self) -> bool:
        """Whether backward has made all calls that follow the forward pass, and the device has passed them."""
        return self.has_all_calls and self.has_passed

    @property
    def has_all_calls(self) -> bool:
        """Whether backward has made all calls that follow the forward pass."""
        made = sum(part is PassPart.BACKWARD for part, *_ in self._calls)
        return self._backward_calls is not None and made >= self._backward_calls

    @property
    def has_passed(self) -> bool:
        """Whether the device has passed all that was noted so far; does not wait."""
        return isinstance(self._last, int) or bool(self._last.query())

    def calls(self) -> tuple[CallTrace, ...]:
        """Returns all calls, once the device has passed them."""
        made = []
        for (part, layer, window_tokens, begin), ends in zip(self._calls, self._spans, strict=True):
            spans, before = [], begin
            for use, end in ends:
                spans.append((use, _us(before, end)))
                before = end
            made.append(CallTrace(part, layer, window_tokens, _us(self._began, begin), tuple(spans)))
        return tuple(made)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the pass to the last moment that was noted; the device has passed it."""
        return _us(self._began, self._last) / 1e6

    def _now(self) -> Moment:
        if not self._is_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _us(begin: Moment, end: Moment) -> float:
    """Returns microseconds between two moments, rounded to a tenth."""
    if isinstance(begin, int) or isinstance(end, int):
        assert isinstance(begin, int)
        assert isinstance(end, int)
        return round((end - begin) / 1e3, 1)
    return round(1e3 * begin.elapsed_time(end), 1)


log = get_logger(__name__)

# Seconds for which a finished training waits for its device to pass the last traces.
LAST_WAIT_SECONDS = 10.0
# Passes that may wait for their backward. Some never get one; a pipeline has as many as micro-batches in a step.
MOST_PENDING = 64

RankBytes = tuple[tuple[int, int], ...]  # (rank, bytes)
Bytes = defaultdict[int, float]  # by rank


@dataclass(eq=False)
class Pending:
    """A traced pass that is not written yet."""

    trace: RankTrace  # everything known when the pass begins
    noted: NotedPass
    device: torch.device
    number: int  # number of this rank in the job
    began: float  # seconds of the host's clock
    step_seconds: float | None = None  # seconds until the next pass began; None before that

    def completed(self) -> RankTrace:
        """Returns the trace with its calls; the device has passed all moments."""
        return replace(
            self.trace,
            calls=self.noted.calls(),
            pass_seconds=self.noted.seconds,
            step_seconds=self.step_seconds,
            is_complete=self.noted.is_complete,
            memory=memory_of(self.device),
        )


class PendingTraces:
    """Traced passes that are not written yet."""

    def __init__(self) -> None:
        self._pending: list[tuple[TraceFile, Pending]] = []

    def add(self, file: TraceFile, pending: Pending) -> None:
        """Adds a pass that begins, and the file that takes its trace."""
        self._pending.append((file, pending))

    def write_complete(self) -> None:
        """Writes passes whose backward has ended on the device; if too many others wait, also the oldest."""
        complete = [one for one in self._pending if one[1].noted.is_complete]
        if len(self._pending) - len(complete) > MOST_PENDING:
            complete += [one for one in self._pending[:1] if one[1].noted.has_passed]
        self._write(complete)

    def drop_incomplete(self) -> None:
        """Drops passes whose backward has not made all its calls."""
        self._pending = [one for one in self._pending if one[1].noted.has_all_calls]

    def flush(self) -> None:
        """Writes everything that is left when training has ended. Waits briefly for the device, but not for other
        ranks."""
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while self._pending and time.monotonic() < deadline:
            self._write([one for one in self._pending if one[1].noted.has_passed])
            if self._pending:
                time.sleep(0.01)
        if self._pending:
            log.warning(
                "the traces of %d passes are left out: the device has not come to their end after %.0f s",
                *(len(self._pending), LAST_WAIT_SECONDS),
                extra=OF_THIS_RANK,
            )
            self._pending.clear()

    def _write(self, complete: Sequence[tuple[TraceFile, Pending]]) -> None:
        for file, pending in complete:
            file.write(pending.number, pending.completed())
            self._pending.remove((file, pending))


def bytes_of_layer(
    plans: Iterable[DeviceRankPlan], kinds: Sequence[LayersTrace], token_bytes: TokenBytes
) -> tuple[RankBytes, RankBytes]:
    """Returns (rank, bytes) that this rank sends and receives in the forward pass of one layer, mean over kinds of
    layers."""
    sent, received = Bytes(float), Bytes(float)
    total = sum(kind.layers for kind in kinds) or 1  # a rank may hold no attention layers
    for plan in plans:
        layers = [kind.layers for kind in kinds if is_routed_by(kind, plan)]
        share = sum(layers) / total
        if not share:
            continue
        # Keys and values, moving queries, and outputs, which go the other way.
        weight = share / plan.forward.rows_per_token
        for chunk in plan.forward.chunks:
            ways = (chunk.keys, token_bytes.key_value, 0), (chunk.queries, token_bytes.query, token_bytes.output)
            for splits, out_bytes, back_bytes in ways:
                for rank, (leaving, coming) in enumerate(zip(splits.send_counts, splits.receive_counts, strict=True)):
                    sent[rank] += weight * (leaving * out_bytes + coming * back_bytes)
                    received[rank] += weight * (coming * out_bytes + leaving * back_bytes)
    return _rounded(sent), _rounded(received)


def is_routed_by(kind: LayersTrace, plan: DeviceRankPlan) -> bool:
    """Returns whether layers follow a routing: a window as long as all documents counts as none."""
    window = 0 if kind.window_tokens >= plan.facts.longest_document_tokens else kind.window_tokens
    return window == (plan.facts.window_tokens or 0)


def tasks_of(tasks: IntArray) -> tuple[tuple[int, int, int], ...]:
    """Returns `[tasks, 3]` tasks of a `DeviceRankPlan` for a trace."""
    return tuple((queries, before, group) for queries, before, group in tasks.tolist())


def _rounded(of_ranks: Bytes) -> RankBytes:
    return tuple((rank, round(of_ranks[rank])) for rank in sorted(of_ranks) if of_ranks[rank])


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_of(device: torch.device) -> MemoryUse:
    """Returns this rank's memory: its GPU's, as torch counts it, or its process's. Does not wait."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return MemoryUse("GPU", torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device), total)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse("process", peak, peak, sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES"))
