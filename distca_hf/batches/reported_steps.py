"""Reported steps: chooses the passes of a model to trace, and writes each rank's traces of them.

    pass begins ──▶ NotedPass ──▶ attention calls note moments ──▶ pending ──▶ device has passed them ──▶ trace file
    every n-th step                                                            looked at when later passes begin

Ranks without tokens do the same with their own part of the pass, once they are told that it begins (`Posted.traced`).
Nothing waits for the device or for other ranks. Ranks trace the same steps, because they count alike: Trainer its
optimizer steps, a placed loader its micro-batches. Ranks also compare the setting.
"""

import atexit
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from distca_hf.batches.preview import PlacedPlan
from distca_hf.cost import LayerMasks, TokenBytes
from distca_hf.flops import StepFlops
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.runtime.pending_traces import (
    UNTRACED,
    NotedPass,
    PassTrace,
    Pending,
    PendingTraces,
    bytes_of_layer,
    device_name,
    is_routed_by,
    memory_of,
    tasks_of,
)
from distca_hf.trace_file import TraceFile
from distca_hf.traces import LayersTrace, ModelSizes, PredictedCosts, RankTrace


class Predictable(NamedTuple):
    """Data from which the seconds of a pass are predicted; None for what is not known.

    Attributes:
        costs: by rates of a GPU.
    """

    costs: PredictedCosts | None = None
    sizes: ModelSizes | None = None
    flops: StepFlops | None = None


class ReportedSteps:
    """Traces the passes of one model.

    Args:
        every_steps: optimizer steps from one reported step to the next; 0 to report none.
        token_bytes: bytes of one token in one layer of the model.
        layer_masks: masks of the model, each with the number of its layers.
    """

    def __init__(self, every_steps: int, file: TraceFile, token_bytes: TokenBytes, layer_masks: LayerMasks) -> None:
        self._every_steps, self._file = every_steps, file
        self._token_bytes, self._layer_masks = token_bytes, layer_masks
        self._pending = PendingTraces()
        self._begun: Pending | None = None

    def begin(self, plan: LivePlan, trains: bool, of_model: Callable[[], Predictable]) -> PassTrace:
        """Returns the trace that notes the moments of a pass that begins now.

        Args:
            trains: whether it is a training pass; no others are traced.
            of_model: returns what is predicted from the model; called only in reported steps.
        """
        if not self._every_steps or not trains:
            return UNTRACED
        if self._begun is not None:  # the time until another pass of training begins
            self._begun.step_seconds = time.perf_counter() - self._begun.began
            self._begun = None
        self._pending.write_complete()
        step = self._file.step  # Trainer's optimizer step; without one, counted from micro-batches
        if step is None:
            step = plan.micro_batch // (plan.data.micro_steps if isinstance(plan, PlacedPlan) else 1) + 1
        if step % self._every_steps:
            return UNTRACED
        plan.agree()
        plan.plan_anew()  # otherwise the plan might change before the pass attends
        atexit.unregister(self.flush)
        atexit.register(self.flush)
        device = next(iter(plan.kinds)).plan.forward.send_rows.device
        trace = self._begun_trace(plan, step, device, of_model())
        if plan.posted is None:
            noted = NotedPass(device)
        else:
            noted = plan.posted.traced(device, self._file, self._token_bytes, trace)
        self._begun = Pending(trace, noted, device, plan.transport.grid.rank, time.perf_counter())
        self._pending.add(self._file, self._begun)
        return noted

    def flush(self) -> None:
        """Writes everything that is left when training has ended. Waits briefly for the device, but not for other
        ranks."""
        atexit.unregister(self.flush)
        self._begun = None
        self._pending.flush()

    def _begun_trace(self, plan: LivePlan, step: int, device: torch.device, of_model: Predictable) -> RankTrace:
        """Returns the trace of a beginning pass, without calls."""
        facts, transport, grid = plan.facts, plan.transport, plan.transport.grid
        kinds = []  # with this rank's tasks if they are routed; long windows have full attention's
        for mask, count in self._layer_masks:
            kind = LayersTrace(mask.window_tokens or 0, count, None, mask.chunked)
            plans = [one.plan for one in plan.kinds if is_routed_by(kind, one.plan)]
            kinds.append(replace(kind, tasks=tasks_of(plans[0].tasks)) if plans else kind)
        step_work: tuple[tuple[float, ...], ...] = ((), ())
        if of_model.flops is not None and facts.tokens:
            step_work = tuple(tuple(work.tolist()) for work in facts.step_work(of_model.flops))
        sent, received = bytes_of_layer((kind.plan for kind in plan.kinds), kinds, self._token_bytes)
        return RankTrace(
            step=step,
            micro_batch=plan.micro_batch,
            written=time.time(),
            rank=transport.rank,
            num_ranks=transport.world_size,
            servers=() if plan.posted is None else plan.posted.ranks,
            stage=grid.stage,
            chunk=plan.part,
            tensor_rank=grid.tensor_rank,
            device=device_name(device),
            ranks_per_node=plan.config.topology(transport.world_size).ranks_per_node,
            placed=isinstance(plan, PlacedPlan),
            places_rows=plan.planned.moves is not None,
            fingerprint=f"{plan.fingerprint:016x}",
            documents=facts.num_documents,
            num_tokens=facts.num_tokens,
            longest_document_tokens=facts.longest_document_tokens,
            tokens=0 if plan.document_tokens is None else int(plan.document_tokens.sum()),
            kinds=tuple(kinds),
            work_before=tuple(work / facts.rows_per_token for work in facts.work_before),
            work=tuple(work / facts.rows_per_token for work in facts.work),
            tokens_before=facts.tokens_before,
            layer_tokens=facts.tokens,
            step_work_before=step_work[0],
            step_work=step_work[1],
            speeds=facts.speeds,
            sent_bytes=sent,
            received_bytes=received,
            calls=(),
            pass_seconds=0.0,
            step_seconds=None,
            is_complete=False,
            memory=memory_of(device),
            costs=of_model.costs if device.type == "cuda" else None,
            model=of_model.sizes,
            profile=str(Path(plan.config.kernel_times).absolute()) if plan.config.kernel_times else "",
        )
