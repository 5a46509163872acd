"""Answer: all results of `distca plan` in one object: first optimizer step, epoch, estimates, and other choices.

A choice is another number of tokens per rank.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from distca_hf.analysis.epoch import EpochPlans, PackedEpoch, fit_lengths
from distca_hf.analysis.estimates import Assumptions, Estimates, make_estimates, memory_by_sharding
from distca_hf.analysis.first_step import StepReport
from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray
from distca_hf.errors import PackingError


# Tokens per rank of the other choices: 8K to 256K.
TOKENS_PER_RANK = tuple(2**power for power in range(13, 19))
# Most ranks on which other choices are simulated.
MOST_RANKS_OF_CHOICES = 1024


@dataclass(frozen=True)
class Choice:
    """One number of tokens per rank.

    Attributes:
        tokens_per_rank: tokens that a rank holds in a micro-step.
        longest_document_tokens: length of the longest document that all ranks together hold.
        too_long_documents: number of documents of the dataset that are longer.
        memory_bytes: estimated peak of a rank; None if the model's size is not known.
        fits: whether a GPU has that much memory; None likewise.
        over_plain: simulated time of plain packing over time as planned; None likewise, if there are too long
            documents and they are refused, or too few for a step; and for other choices than the requested one on
            more than `MOST_RANKS_OF_CHOICES` ranks.
    """

    tokens_per_rank: int
    longest_document_tokens: int
    too_long_documents: int
    memory_bytes: int | None
    fits: bool | None
    over_plain: float | None


@dataclass(frozen=True)
class Spread:
    """Mean, 95th percentile and largest value of a figure over micro-batches."""

    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """Returns the spread of `[micro_batches]` values."""
        return cls(float(values.mean()), float(np.percentile(values, 95)), float(values.max()))


@dataclass(frozen=True)
class EpochFigures:
    """Balance of all micro-batches of an epoch.

    Attributes:
        documents, tokens, longest_document_tokens: numbers of documents and tokens, and length of the longest
            document.
        imbalance_before: imbalance of documents in order, in all micro-batches.
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
        """Returns the figures of the plans of an epoch with `[documents]` lengths."""
        return cls(
            documents=len(document_tokens),
            tokens=int(document_tokens.sum()),
            longest_document_tokens=int(document_tokens.max()),
            micro_batches=len(plans.in_order.tokens),
            planned_micro_batches=len(plans.planned),
            imbalance_before=Spread.of(plans.in_order.imbalance),
            imbalance=Spread.of(plans.imbalance),
            bytes_max_rank=int(plans.received_bytes.max()),
        )


@dataclass(frozen=True, eq=False)
class PlanAnswer:
    """The results of `distca plan`.

    Attributes:
        step: the first optimizer step, planned in full.
        epoch: balance of all micro-batches of the epoch.
        imbalance_before: `[micro_batches]` float64 max/mean work of documents in order, for the picture.
        estimates: None if the model's size is not known.
        choices: other numbers of tokens per rank; none for documents that were given as a batch, and for a pipeline.
    """

    step: StepReport
    epoch: EpochFigures
    imbalance_before: np.ndarray
    assumptions: Assumptions
    estimates: Estimates | None
    choices: Sequence[Choice]

    def as_json(self) -> dict[str, object]:
        """Returns the JSON object of the first step, with `whole_epoch`, `estimates`, `choices` and `pipeline`."""
        estimates, pipeline = None, self.step.request.pipeline
        if self.estimates is not None:
            estimates = {
                **self.estimates.as_json(),
                "rank_seconds": [
                    self.estimates.rank_seconds(plan, self.assumptions.checkpointing) for plan in self.step.plans
                ],
                "assumptions": asdict(self.assumptions),
            }
        return {
            **self.step.as_json(),
            "whole_epoch": asdict(self.epoch),
            "estimates": estimates,
            "choices": [asdict(choice) for choice in self.choices],
            "pipeline": None if pipeline is None else {**asdict(pipeline), "gpus": self.step.request.num_gpus},
        }


def make_answer(
    step: StepReport,
    plans: EpochPlans,
    packed: PackedEpoch,
    given_tokens: IntArray,
    assumptions: Assumptions,
    compare: bool = False,
) -> PlanAnswer:
    """Collects all results.

    Args:
        given_tokens: `[documents]` its lengths before any were cut.
    """
    request = step.request
    given = () if packed.origin is not None else packed.first_step(request.micro_steps).micro_batches
    estimates = make_estimates(request, packed.document_tokens, assumptions, given, compare)
    return PlanAnswer(
        step=step,
        epoch=EpochFigures.of(plans, packed.document_tokens),
        imbalance_before=plans.in_order.imbalance,
        assumptions=assumptions,
        estimates=estimates,
        choices=_choices(step, plans, given_tokens, assumptions, estimates),
    )


def _choices(
    step: StepReport, plans: EpochPlans, given_tokens: IntArray, assumptions: Assumptions, estimates: Estimates | None
) -> list[Choice]:
    """Returns all choices, ordered by tokens per rank; none for documents that were given as a batch, and for a
    pipeline."""
    request = step.request
    if step.origin is None or request.pipeline is not None:
        return []

    def choice(tokens_per_rank: int) -> Choice:
        """Returns the choice of a number of tokens per rank; of the requested one as it was estimated."""
        other = replace(request, tokens_per_rank=tokens_per_rank, bytes_limit=None)
        of_choice = estimates
        if tokens_per_rank != request.tokens_per_rank:
            of_choice = _estimates(other, given_tokens, assumptions)
        memory = None if of_choice is None else of_choice.memory["fsdp2"].total
        if memory is None and request.model.size is not None:
            received = int(plans.received_bytes.max())
            memory = memory_by_sharding(assumptions.simulation(other), tokens_per_rank, received)["fsdp2"].total
        return Choice(
            tokens_per_rank=tokens_per_rank,
            longest_document_tokens=other.planner.longest_tokens,
            too_long_documents=int((given_tokens > other.planner.longest_tokens).sum()),
            memory_bytes=memory,
            fits=None if memory is None else memory <= assumptions.room_bytes,
            over_plain=None if of_choice is None else of_choice.ours.times_as_fast,
        )

    return [choice(tokens) for tokens in sorted({request.tokens_per_rank, *TOKENS_PER_RANK})]


def _estimates(request: PlanRequest, given_tokens: IntArray, assumptions: Assumptions) -> Estimates | None:
    """Returns estimates; None where documents do not fit, ranks are too many, or the model's size is not known."""
    if request.num_ranks > MOST_RANKS_OF_CHOICES:
        return None
    try:
        return make_estimates(request, fit_lengths(given_tokens, request), assumptions)
    except PackingError:
        return None
