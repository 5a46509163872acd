"""Reported steps: which passes of a model are traced, and the traces that ranks write of them.

    pass begins ──▶ NotedPass ──▶ attention calls note moments ──▶ pending ──▶ device has passed them ──▶ trace file
    every n-th step                                                            looked at when later passes begin

Nothing waits for the device or for other ranks. Ranks trace the same steps, because they count alike: Trainer its
optimizer steps, a placed loader its micro-batches. The setting is among those that ranks compare.
"""

import atexit
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import sysconf

import torch

from distca_hf.batches.preview import PlacedPlan
from distca_hf.cost import TokenBytes
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.device_routing import DeviceRankPlan
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pass_trace import UNTRACED, NotedPass, PassTrace
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.trace_file import TraceFile
from distca_hf.traces import MemoryUse, PredictedCosts, RankTrace


log = get_logger(__name__)

# Seconds in which a training that has ended waits for its device to pass the last traces.
LAST_WAIT_SECONDS = 10.0
# Passes that wait for their backward. Some never get one; of a pipeline there are as many as micro-batches in a step.
MOST_PENDING = 64

RankBytes = tuple[tuple[int, int], ...]  # (rank, bytes)
Bytes = defaultdict[int, float]  # by rank


@dataclass(eq=False)
class Pending:
    """A traced pass that is not written yet.

    Attributes:
        trace: all that is known of it when it begins.
        noted: moments.
        device: of the model.
        number: of this rank in the job.
        began: seconds of the host's clock.
        step_seconds: until the next pass began; None before.
    """

    trace: RankTrace
    noted: NotedPass
    device: torch.device
    number: int
    began: float
    step_seconds: float | None = None

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


class ReportedSteps:
    """Traces the passes of one model.

    Args:
        every_steps: optimizer steps from one reported step to the next; 0: none is.
        file: of this rank.
        token_bytes: bytes of one token in one layer of the model.
        layers: that attend.
    """

    def __init__(self, every_steps: int, file: TraceFile, token_bytes: TokenBytes, layers: int) -> None:
        self._every_steps, self._file = every_steps, file
        self._token_bytes, self._layers = token_bytes, layers
        self._pending: list[Pending] = []
        self._begun: Pending | None = None

    def begin(self, plan: LivePlan, trains: bool, costs: Callable[[], PredictedCosts | None]) -> PassTrace:
        """Returns what notes the moments of a pass that begins now.

        Args:
            plan: of the pass.
            trains: whether it is one of training; no other is traced.
            costs: returns predicted costs of the model, which is asked in reported steps alone.
        """
        if not self._every_steps or not trains:
            return UNTRACED
        self._end_latest()
        self._write_complete()
        step = self._step_of(plan)
        if step % self._every_steps:
            return UNTRACED
        plan.agree()
        plan.follow_roster()  # or the plan might be another one by the time that the pass attends
        atexit.unregister(self.flush)
        atexit.register(self.flush)
        device = next(iter(plan.kinds)).plan.forward.send_rows.device
        trace = self._begun_trace(plan, step, device, costs() if device.type == "cuda" else None)
        self._begun = Pending(trace, NotedPass(device), device, plan.transport.grid.rank, time.perf_counter())
        self._pending.append(self._begun)
        return self._begun.noted

    def flush(self) -> None:
        """Writes all that is left, when training has ended. Waits a little for the device, and for no other rank."""
        atexit.unregister(self.flush)
        self._begun = None
        deadline = time.monotonic() + LAST_WAIT_SECONDS
        while self._pending and time.monotonic() < deadline:
            passed = [pending for pending in self._pending if pending.noted.has_passed]
            self._write(passed)
            if self._pending:
                time.sleep(0.01)
        if self._pending:
            log.warning(
                "the traces of %d passes are left out: the device has not come to their end after %.0f s",
                *(len(self._pending), LAST_WAIT_SECONDS),
                extra=OF_THIS_RANK,
            )
            self._pending.clear()

    def _step_of(self, plan: LivePlan) -> int:
        """Returns the optimizer step that a pass belongs to, from 1: Trainer's, or one counted from micro-batches."""
        if self._file.step is not None:
            return self._file.step
        micro_steps = plan.data.micro_steps if isinstance(plan, PlacedPlan) else 1
        return plan.micro_batch // micro_steps + 1

    def _end_latest(self) -> None:
        """Notes the time until another pass of training begins."""
        if self._begun is not None:
            self._begun.step_seconds = time.perf_counter() - self._begun.began
            self._begun = None

    def _write_complete(self) -> None:
        """Writes passes whose backward has ended on the device; and the oldest, where none ever will."""
        complete = [pending for pending in self._pending if pending.noted.is_complete]
        if len(self._pending) - len(complete) > MOST_PENDING:
            complete += [pending for pending in self._pending[:1] if pending.noted.has_passed]
        self._write(complete)

    def _write(self, complete: Sequence[Pending]) -> None:
        for pending in complete:
            self._file.write(pending.number, pending.completed())
            self._pending.remove(pending)

    def _begun_trace(self, plan: LivePlan, step: int, device: torch.device, costs: PredictedCosts | None) -> RankTrace:
        """Returns the trace of a pass that begins: without calls."""
        facts, transport, grid = plan.facts, plan.transport, plan.transport.grid
        sent, received = self._bytes_of(plan)
        return RankTrace(
            step=step,
            micro_batch=plan.micro_batch,
            written=time.time(),
            rank=transport.rank,
            num_ranks=transport.world_size,
            stage=grid.stage,
            chunk=plan.chunk,
            tensor_rank=grid.tensor_rank,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            ranks_per_node=plan.config.topology(transport.world_size).ranks_per_node,
            placed=isinstance(plan, PlacedPlan),
            fingerprint=f"{plan.fingerprint:016x}",
            documents=facts.num_documents,
            num_tokens=facts.num_tokens,
            longest_document_tokens=facts.longest_document_tokens,
            tokens=0 if plan.document_tokens is None else int(plan.document_tokens.sum()),
            layers=self._layers,
            work_before=tuple(work / facts.rows_per_token for work in facts.work_before),
            work=tuple(work / facts.rows_per_token for work in facts.work),
            speeds=facts.speeds,
            sent_bytes=sent,
            received_bytes=received,
            calls=(),
            pass_seconds=0.0,
            step_seconds=None,
            is_complete=False,
            memory=memory_of(device),
            costs=costs,
        )

    def _bytes_of(self, plan: LivePlan) -> tuple[RankBytes, RankBytes]:
        """Returns (rank, bytes) that this rank sends and receives in the forward pass of one layer, mean over kinds of
        layers."""
        sent, received = Bytes(float), Bytes(float)
        layers = _layers_of_kinds(plan.facts)
        for kind in plan.kinds:
            share = layers.get(kind.plan.facts.window_tokens, 0) / sum(layers.values())
            if share:
                _add_bytes(sent, received, kind.plan, share, self._token_bytes)
        return _rounded(sent), _rounded(received)


def _layers_of_kinds(facts: PlanFacts) -> dict[int | None, int]:
    """Returns the number of layers by their window; None is full attention."""
    if not facts.kinds:
        return {facts.window_tokens: 1}
    return {kind.window_tokens: count for kind, count in facts.kinds}


def _add_bytes(sent: Bytes, received: Bytes, plan: DeviceRankPlan, share: float, token_bytes: TokenBytes) -> None:
    """Adds the bytes of one layer of a kind, weighted by its share of all layers: keys and values, queries that move,
    and outputs, which go the other way."""
    weight = share / plan.forward.rows_per_token
    for chunk in plan.forward.chunks:
        ways = (chunk.keys, token_bytes.key_value, 0), (chunk.queries, token_bytes.query, token_bytes.output)
        for splits, out_bytes, back_bytes in ways:
            for rank, (leaving, coming) in enumerate(zip(splits.send_counts, splits.receive_counts, strict=True)):
                if leaving or coming:
                    sent[rank] += weight * (leaving * out_bytes + coming * back_bytes)
                    received[rank] += weight * (coming * out_bytes + leaving * back_bytes)


def _rounded(of_ranks: Bytes) -> RankBytes:
    return tuple((rank, round(of_ranks[rank])) for rank in sorted(of_ranks) if of_ranks[rank])


def memory_of(device: torch.device) -> MemoryUse:
    """Returns the memory of this rank: of its GPU, as torch counts it, or of its process. Does not wait."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return MemoryUse("GPU", torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device), total)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse("process", peak, peak, sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES"))
