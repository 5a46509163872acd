"""Base of loaders: hands out placed micro-batches, once all ranks have agreed to take the same one."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from distca_hf.batches.agreement import agree_to_take, check_cuts, shared_facts
from distca_hf.batches.known_batch import KnownBatch
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import HostPlans, Prepared, Replanner
from distca_hf.batches.preview import PlacedData, PlacedPlan
from distca_hf.comm.agreement import Announced, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.planning.kinds import PlanTotals
from distca_hf.planning.plan import PlanFacts
from distca_hf.runtime.live_plan import LivePlan, PlanUse
from distca_hf.runtime.posted import PostingTransport
from distca_hf.telemetry import REMEMBERED_MICRO_BATCHES, LoaderTimes, get_logger


log = get_logger(__name__)

# Consecutive micro-batches that a program may only look at, without using them, before a warning.
UNUSED_BATCHES = 4


class BaseLoader:
    """Hands out micro-batches. A loader is a subclass that prepares them.

    Args:
        planner: settings and facts about the model.
        transport: connects the ranks of the planner.
        device: device of the batches.
        micro_steps: micro-batches of an optimizer step.
        prefetch: micro-batches that are prepared ahead.

    Attributes:
        documents_truncated: documents that lost their end to `overlong="truncate"`.
        writes_epochs: whether rank 0 writes a line at the end of every epoch that a model was trained on.
    """

    batch_size = 1
    # For Accelerate: whether the last batch of an epoch was handed out, and how many of its rows ranks hold twice.
    end_of_dataloader, remainder = False, 0
    preparer: HostPlans
    documents_truncated: int

    def __init__(
        self, planner: PlacedPlanner, transport: Transport, device: torch.device, micro_steps: int, prefetch: int
    ) -> None:
        assert planner.num_ranks == transport.world_size, (planner.num_ranks, transport.world_size)
        self.writes_epochs = True
        self.times, self.totals = LoaderTimes(), PlanTotals()
        self.history: deque[PlanFacts] = deque(maxlen=REMEMBERED_MICRO_BATCHES)
        self._planner, self._transport, self._device = planner, transport, device
        self._micro_steps, self._prefetch = micro_steps, prefetch
        self._warned_of_labels = self._warned_of_use = False
        taken_ahead = max(prefetch, micro_steps)  # a training loop may take these before it runs on the first
        self._latest: deque[PlanUse] = deque(maxlen=UNUSED_BATCHES + taken_ahead)

    def _deliver(
        self, prepared: Prepared, data: PlacedData, number: int, facts: Mapping[str, object]
    ) -> dict[str, Any]:
        """Returns the batch on the device, with its plan, once all ranks have agreed to take the same one.

        Args:
            number: of the micro-batch, in messages.
            facts: of the data, by name; must be the same on all ranks.
        """
        posting = self._transport if isinstance(self._transport, PostingTransport) else None
        with Announced(self._transport, number, Occasion.TAKE):
            if posting is not None:
                prepared = self.preparer.planned_for(posting.extra_ranks, prepared)
            facts = {**shared_facts(self._planner.config), **facts, "micro_steps": self._micro_steps}
        self.times.micro_batches += 1
        self.times.plan_seconds += prepared.plan_seconds
        self.totals = self.totals.plus(prepared.facts)
        self.history.append(prepared.facts)
        agreement = agree_to_take(self._transport, prepared, number, facts)
        posted, replan = None, None
        if posting is not None:
            posted = posting.post(prepared.plan, number, self.preparer.planner.num_chunks)
            replan = Replanner(posting, self.preparer, prepared, number)
        plan = PlacedPlan(
            data,
            prepared.kinds.whole_tokens,
            micro_batch=number,
            planned=prepared.kinds.planned(self._device, prepared.fingerprint, posted),
            transport=self._transport,
            config=self._planner.config,
            agreement=agreement,
            replan=replan,
            document_tokens=prepared.kinds.document_tokens,
        )
        batch = {
            **{name: column.to(self._device, non_blocking=True) for name, column in prepared.columns.items()},
            "distca_plan": plan,
        }
        KnownBatch(batch, plan, is_loaded=True)
        plan.agree()  # here, before the training framework's own collectives could meet a lost rank
        check_cuts(self._transport, prepared, number, plan.numbers)
        self._note_use(plan)
        if not plan.label_tokens and not self._warned_of_labels:
            self._warned_of_labels = True
            log.warning(
                "micro-batch %d holds no label to learn, on any rank: its loss is 0. If all are like it, look at the "
                "dataset's labels and masks (a chat template without assistant tokens, for example)",
                number,
            )
        return batch

    @property
    def _sizes(self) -> dict[str, int]:
        """Sizes that decide which documents are in a micro-batch."""
        return {
            "capacity_tokens": self._planner.capacity_tokens,
            "num_ranks": self._transport.world_size,
            "micro_steps": self._micro_steps,
        }

    def _note_use(self, plan: LivePlan) -> None:
        """Warns, once, if no enabled model has run on any of the latest batches; then notes this one."""
        is_full = len(self._latest) == self._latest.maxlen
        if is_full and not self._warned_of_use and not any(use.begun for use in self._latest):
            self._warned_of_use = True
            log.warning(
                "the last %d micro-batches were handed out, and no enabled model ran on them. Another model must not "
                "train on placed batches: it would see parts of documents. Call "
                "distca_hf.enable(model, plugin) for it",
                len(self._latest),
            )
        self._latest.append(plan.use)
