"""Plan answer: everything that `distca plan` says: the first optimizer step, the epoch, estimates, other choices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distca_hf.analysis.plan_choices import Choice, make_choices
from distca_hf.analysis.plan_epoch import EpochPlans
from distca_hf.analysis.plan_estimates import Assumptions, Estimates, make_estimates
from distca_hf.analysis.plan_report import PlanReport
from distca_hf.cost import IntArray


@dataclass(frozen=True)
class Spread:
    """A figure over micro-batches."""

    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """Returns mean, 95th percentile and largest of `[micro_batches]` values."""
        return cls(float(values.mean()), float(np.percentile(values, 95)), float(values.max()))


@dataclass(frozen=True)
class EpochFigures:
    """All micro-batches of an epoch.

    Attributes:
        documents, tokens, longest_document_tokens: what it trains on.
        micro_batches: how many there are.
        planned_micro_batches: of how many plans were made.
        imbalance_before: of documents in order, in all micro-batches.
        imbalance: as planned.
        bytes_max_rank: most bytes that any rank receives in one layer's forward pass.
    """

    documents: int
    tokens: int
    longest_document_tokens: int
    micro_batches: int
    planned_micro_batches: int
    imbalance_before: Spread
    imbalance: Spread
    bytes_max_rank: int

    @classmethod
    def of(cls, plans: EpochPlans, document_tokens: IntArray) -> "EpochFigures":
        """Sums up the plans of an epoch with these `[documents]` lengths."""
        return cls(
            documents=len(document_tokens),
            tokens=int(document_tokens.sum()),
            longest_document_tokens=int(document_tokens.max()),
            micro_batches=len(plans.in_order.tokens),
            planned_micro_batches=len(plans.looked_at),
            imbalance_before=Spread.of(plans.in_order.imbalance),
            imbalance=Spread.of(plans.imbalance),
            bytes_max_rank=int(plans.received_bytes.max()),
        )


@dataclass(frozen=True, eq=False)
class PlanAnswer:
    """Everything.

    Attributes:
        step: the first optimizer step, planned in full.
        epoch: all of its micro-batches.
        imbalance_before: `[micro_batches]` float64 of the epoch, for the picture.
        assumptions: how the model is trained.
        estimates: None if the model's size is not known.
        choices: other numbers of tokens per rank; none for documents that were given as a batch.
    """

    step: PlanReport
    epoch: EpochFigures
    imbalance_before: np.ndarray
    assumptions: Assumptions
    estimates: Estimates | None
    choices: Sequence[Choice]

    def as_json(self) -> dict[str, Any]:
        """Returns the object of the first step, with three more inside: `whole_epoch`, `estimates`, `choices`."""
        estimates = None
        if self.estimates is not None:
            memory = {
                sharding: {**asdict(memory), "total": memory.total}
                for sharding, memory in self.estimates.memory.items()
            }
            estimates = {
                **asdict(self.estimates.speed),
                "memory_bytes": memory,
                "room_bytes": round(self.estimates.room_bytes),
                "assumptions": asdict(self.assumptions),
            }
        return {
            **self.step.as_json(),
            "whole_epoch": asdict(self.epoch),
            "estimates": estimates,
            "choices": [asdict(choice) for choice in self.choices],
        }


def make_answer(
    step: PlanReport, plans: EpochPlans, packed_tokens: IntArray, given_tokens: IntArray, assumptions: Assumptions
) -> PlanAnswer:
    """Puts an answer together.

    Args:
        step: the first optimizer step.
        plans: of the epoch.
        packed_tokens: `[documents]` lengths that were packed.
        given_tokens: `[documents]` the same before any were cut.
        assumptions: how the model is trained.
    """
    request, model = step.request, step.request.model
    estimates = make_estimates(model, plans, assumptions, request.tokens_per_rank)
    choices: Sequence[Choice] = ()
    if step.drawn is not None:
        fsdp2 = estimates.memory["fsdp2"].total if estimates else None
        known = Choice(
            tokens_per_rank=request.tokens_per_rank,
            longest_document_tokens=request.capacity_tokens,
            too_long_documents=int((given_tokens > request.capacity_tokens).sum()),
            memory_bytes=fsdp2,
            fits=None if fsdp2 is None else fsdp2 <= assumptions.room_bytes,
            over_plain=estimates.speed.over_plain if estimates else None,
        )
        memory = assumptions.memory(model, request.num_ranks, int(plans.received_bytes.max())).get("fsdp2")
        choices = make_choices(
            given_tokens,
            request.num_ranks,
            assumptions.cost(model),
            None if memory is None else lambda tokens: memory(tokens).total,
            assumptions.room_bytes,
            step.drawn.seed,
            known,
            request.overlong,
        )
    return PlanAnswer(
        step=step,
        epoch=EpochFigures.of(plans, packed_tokens),
        imbalance_before=plans.in_order.imbalance,
        assumptions=assumptions,
        estimates=estimates,
        choices=choices,
    )
