"""Served traces: attention servers trace their part of the passes that trainers report.

    trainer                                                server
    reported pass begins ── begin: step, folder, layers ──▶ NotedPass ──▶ calls note moments ──▶ pending
    its forward pass ends ── end: calls of backward ──────▶                                        │
    next plan, or the membership is closed ───────────────────▶ complete ones go to the server's file ◀┘

An order of a trainer has all that is the same for all ranks of the pass, as the trainer's own trace. A server fills in
what is its own. Other passes cost nothing: there is no order.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from distca_hf.cost import TokenBytes
from distca_hf.runtime.forward_pass import ForwardPass
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pending_traces import (
    NotedPass,
    Pending,
    PendingTraces,
    bytes_of_layer,
    device_name,
    is_routed_by,
    memory_of,
    tasks_of,
)
from distca_hf.telemetry import OF_THIS_RANK, get_logger
from distca_hf.trace_file import TraceFile
from distca_hf.traces import RankTrace


log = get_logger(__name__)


class OrderedPass(NotedPass):
    """Notes moments of a trainer, and tells servers when forward ends.

    Args:
        device: that attention runs on.
        tell: tells servers, of the number of calls of backward.
    """

    def __init__(self, device: torch.device, tell: Callable[[int], None]) -> None:
        super().__init__(device)
        self._tell: Callable[[int], None] | None = tell

    def end_forward(self, backward_calls: int) -> None:
        """Ends the forward pass; `backward_calls` follow it."""
        super().end_forward(backward_calls)
        if self._tell is not None:
            self._tell(backward_calls)
        self._tell = None  # servers keep a plan for as long as trainers hold it, and moments may be held for longer


class ReportedPass(NamedTuple):
    """All that a server must know of a pass to trace its part of it.

    Attributes:
        folder: of the traces.
        token_bytes: bytes of one token in one layer of the model.
        trace: of the trainer that says so; without calls.
    """

    folder: str
    token_bytes: TokenBytes
    trace: RankTrace

    def text(self) -> str:
        """Returns it as text, for an order."""
        return json.dumps([self.folder, *vars(self.token_bytes).values(), self.trace.line()])

    @classmethod
    def of(cls, text: str) -> Self:
        """Returns the pass of a text."""
        folder, query, output, key_value, line = json.loads(text)
        return cls(folder, TokenBytes(query, output, key_value), RankTrace.read(line, "an order of a trainer"))


@dataclass
class ServedTraces:
    """The traces of an attention server about one membership.

    Args:
        server: its number.
        device: that it attends on.
        root: folder that traces may be written below: the setting `report_folder`, or the working directory.
    """

    server: int
    device: torch.device
    root: Path

    def __post_init__(self) -> None:
        self._pending = PendingTraces()
        self._file, self._folder, self._refused = TraceFile(""), "", ""

    def begin(self, plan: LivePlan, text: str) -> None:
        """Traces the pass that begins.

        Args:
            text: of a `ReportedPass`.
        """
        reported = ReportedPass.of(text)
        if not self._may_write(reported.folder):
            return
        noted = NotedPass(self.device)
        plan.forward_pass = ForwardPass(plan.transport, plan.micro_batch, trace=noted)
        if reported.folder != self._folder:
            self._file, self._folder = TraceFile(reported.folder), reported.folder
        trace = self._own(reported, plan)
        self._pending.add(self._file, Pending(trace, noted, self.device, self.server, time.perf_counter()))

    def write_complete(self) -> None:
        """Writes what is complete; does not wait."""
        self._pending.write_complete()

    def end(self) -> None:
        """Writes the last traces; a pass that has not made all its calls is left out: its step did not count."""
        self._pending.drop_incomplete()
        self._pending.flush()

    def _may_write(self, folder: str) -> bool:
        """Returns whether a folder lies below the root; warns if not."""
        root = self.root.resolve()
        if Path(folder).resolve().is_relative_to(root):
            return True
        if folder == self._refused:
            return False
        self._refused = folder
        log.warning(
            "attention server %d writes no traces to %s, which is not below %s: set report_folder in the recipe, or "
            "DISTCA_REPORT_FOLDER",
            *(self.server, folder, root),
            extra=OF_THIS_RANK,
        )
        return False

    def _own(self, reported: ReportedPass, plan: LivePlan) -> RankTrace:
        """Returns the trainer's trace with what is different on this server. Layers with a window leave it alone."""
        full = next(kind.plan for kind in plan.kinds if kind.plan.facts.window_tokens is None)
        kinds = tuple(
            replace(kind, tasks=tasks_of(full.tasks) if is_routed_by(kind, full) else ())
            for kind in reported.trace.kinds
        )
        sent, received = bytes_of_layer([full], kinds, reported.token_bytes)
        return replace(
            reported.trace,
            written=time.time(),
            rank=plan.transport.rank,
            device=device_name(self.device),
            tokens=0,
            kinds=kinds,
            sent_bytes=sent,
            received_bytes=received,
            memory=memory_of(self.device),
        )
