"""Packed epoch: the micro-batches of an epoch, packed from lengths as training packs them, and its first step.

Training packs all documents into the micro-batches of an epoch, in an order that follows from the seed. The first
optimizer step takes the first of them, one for each micro-step.
"""

from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray, ceil_div, exclusive_cumsum
from distca_hf.data.accumulation import group_documents
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import Epoch, EpochPacker
from distca_hf.errors import PackingError, and_more


@dataclass(frozen=True)
class Origin:
    """Place of an optimizer step in training: it is the first one of this epoch.

    Attributes:
        seed: seed of the order of documents, together with the epoch's number.
        epoch: number of the epoch, from 0.
        epoch_micro_batches: number of micro-batches of every epoch.
    """

    seed: int
    epoch: int
    epoch_micro_batches: int


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """Documents of one optimizer step.

    Attributes:
        micro_batches: for each `[documents]` lengths in the order of packing.
        origin: place in training; None if the documents were given as a batch.
    """

    micro_batches: list[IntArray]
    origin: Origin | None = None

    def as_epoch(self) -> "PackedEpoch":
        """Returns an epoch that has only this step."""
        lengths = np.concatenate(self.micro_batches)
        ends = np.cumsum([0] + [len(batch) for batch in self.micro_batches])
        return PackedEpoch(lengths, Epoch(np.arange(len(lengths)), ends), self.origin)


@dataclass(frozen=True, eq=False)
class PackedEpoch:
    """Micro-batches of an epoch.

    Attributes:
        document_tokens: `[documents]` lengths, after overlong documents were cut.
        epoch: numbers of the documents of each micro-batch.
        origin: place in training; None if the documents were given as a batch.
    """

    document_tokens: IntArray
    epoch: Epoch
    origin: Origin | None

    def first_step(self, micro_steps: int) -> OptimizerStep:
        """Returns the first optimizer step."""
        numbers = range(micro_steps)
        batches = [self.document_tokens[self.epoch.micro_batch(number)] for number in numbers]
        return OptimizerStep(batches, self.origin)


def pack_epoch(document_tokens: IntArray, request: PlanRequest, seed: int) -> PackedEpoch:
    """Packs the first epoch of a training on these documents.

    Raises:
        PackingError: a document is longer than a micro-batch, or the epoch has fewer micro-batches than a step.
    """
    document_tokens = _fit(document_tokens, request)
    packer = EpochPacker(document_tokens, request.capacity_tokens, seed)
    if packer.num_micro_batches < request.micro_steps:
        raise PackingError(
            f"{len(document_tokens)} documents with {int(document_tokens.sum())} tokens fill "
            f"{packer.num_micro_batches} of {request.micro_steps} micro-steps of {request.capacity_tokens} tokens; "
            "choose fewer micro-steps"
        )
    return PackedEpoch(document_tokens, packer.epoch(0), Origin(seed, 0, packer.num_micro_batches))


def pack_first_step(document_tokens: IntArray, request: PlanRequest, seed: int) -> OptimizerStep:
    """Returns the first optimizer step of a training on these documents.

    Raises:
        PackingError: as `pack_epoch`.
    """
    return pack_epoch(document_tokens, request, seed).first_step(request.micro_steps)


def divide_batch(document_tokens: IntArray, request: PlanRequest) -> OptimizerStep:
    """Divides all documents, in order, among the micro-steps with nearly equal tokens.

    If that gives a micro-step more tokens than it holds, documents are grouped as training groups them.

    Raises:
        PackingError: the documents do not fit.
    """
    document_tokens = _fit(document_tokens, request)
    total_tokens, steps = int(document_tokens.sum()), request.micro_steps
    if total_tokens > request.capacity_tokens * steps:
        raise PackingError(
            f"the batch has {total_tokens} tokens, but {request.num_ranks} ranks x {request.tokens_per_rank} tokens"
            f"{f' x {steps} micro-steps' if steps > 1 else ''} hold {request.capacity_tokens * steps}; "
            f"{ceil_div(total_tokens, request.num_ranks * steps)} tokens per rank would hold it"
        )
    goals = [ceil_div(total_tokens * (step + 1), steps) for step in range(steps)]
    step_of = np.searchsorted(goals, exclusive_cumsum(document_tokens), side="right")
    micro_batches = [document_tokens[step_of == step] for step in range(steps)]
    if max(int(batch.sum()) for batch in micro_batches) > request.capacity_tokens:
        groups = group_documents(document_tokens, steps, request.capacity_tokens)
        micro_batches = [document_tokens[group.documents] for group in groups]
    return OptimizerStep(micro_batches)


def _fit(document_tokens: IntArray, request: PlanRequest) -> IntArray:
    """Returns lengths after the policy for documents that are longer than a micro-batch.

    Raises:
        PackingError: there are such documents, and the policy refuses them.
    """
    longest, capacity_tokens = int(document_tokens.max()), request.capacity_tokens
    if request.overlong == "error" and longest > capacity_tokens:
        others = int((document_tokens > capacity_tokens).sum()) - 1
        raise PackingError(
            f"a document of {longest} tokens{and_more(others)} does not fit on {request.num_ranks} ranks x "
            f"{request.tokens_per_rank} tokens = {capacity_tokens}; {ceil_div(longest, request.num_ranks)} tokens per "
            f"rank or {ceil_div(longest, request.tokens_per_rank)} ranks would hold it, or --overlong split or "
            "truncate cuts it"
        )
    return fit_documents(document_tokens, capacity_tokens, request.overlong)[2]
