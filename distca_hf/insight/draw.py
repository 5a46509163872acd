"""Draw: global batches out of a file of lengths.

Documents come in a random order that the seed decides, each once. A batch of at most ranks x tokens per rank tokens
takes them whole: one that does not fit into what is left is skipped and comes first for the next batch; after so many
that did not fit in a row, the batch is full.
"""

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.errors import PackingError
from distca_hf.insight.plan_request import PlanRequest
from distca_hf.packing.source import split_documents


# A batch that so many documents in a row did not fit into is full.
MISFITS = 100


def draw_batches(document_tokens: IntArray, request: PlanRequest, seed: int) -> list[IntArray]:
    """Lengths of the documents of every micro-step, in the order they were drawn.

    Raises:
        PackingError: a document that was drawn is longer than a global batch, or there are too few documents to put
            one in every batch.
    """
    document_tokens = _cut_overlong(document_tokens, request)
    waiting = document_tokens[np.random.default_rng(seed).permutation(len(document_tokens))].tolist()
    batches = []
    for number in range(request.micro_steps):
        batch, waiting = _fill(waiting, request)
        if not batch:
            raise PackingError(
                f"{len(document_tokens)} documents with {int(document_tokens.sum())} tokens fill {number} of "
                f"{request.micro_steps} micro-steps of {request.capacity_tokens} tokens; choose fewer micro-steps"
            )
        batches.append(np.array(batch, dtype=np.int64))
    return batches


def divide_batch(document_tokens: IntArray, request: PlanRequest) -> list[IntArray]:
    """All documents, in order, divided among the micro-steps with nearly equal tokens.

    Raises:
        PackingError: they do not fit.
    """
    document_tokens = _cut_overlong(document_tokens, request)
    total_tokens, steps = int(document_tokens.sum()), request.micro_steps
    if total_tokens > request.capacity_tokens * steps:
        raise PackingError(
            f"the batch has {total_tokens} tokens, but {request.num_ranks} ranks x {request.tokens_per_rank} tokens"
            f"{f' x {steps} micro-steps' if steps > 1 else ''} hold {request.capacity_tokens * steps}; "
            f"{-(-total_tokens // (request.num_ranks * steps))} tokens per rank would hold it"
        )
    for length in document_tokens.tolist():
        _check_fits(length, request)
    goals = [-(-total_tokens * (step + 1) // steps) for step in range(steps)]
    step_of = np.searchsorted(goals, np.cumsum(document_tokens) - document_tokens, side="right")
    return [document_tokens[step_of == step] for step in range(steps)]


def _cut_overlong(document_tokens: IntArray, request: PlanRequest) -> IntArray:
    """Lengths after the policy for documents that are longer than a global batch."""
    if request.overlong == "split":
        return split_documents(document_tokens, request.capacity_tokens)[2]
    if request.overlong == "truncate":
        return np.minimum(document_tokens, request.capacity_tokens)
    return document_tokens


def _fill(waiting: list[int], request: PlanRequest) -> tuple[list[int], list[int]]:
    """Documents of the next batch, and those that still wait."""
    batch: list[int] = []
    skipped: list[int] = []
    room, misfits, at = request.capacity_tokens, 0, 0
    while at < len(waiting) and room and misfits < MISFITS:
        length = waiting[at]
        _check_fits(length, request)
        if length <= room:
            batch.append(length)
            room, misfits = room - length, 0
        else:
            skipped.append(length)
            misfits += 1
        at += 1
    return batch, skipped + waiting[at:]


def _check_fits(length: int, request: PlanRequest) -> None:
    """Raises PackingError if a document is longer than a global batch."""
    if length > request.capacity_tokens:
        raise PackingError(
            f"a document of {length} tokens does not fit on {request.num_ranks} ranks x {request.tokens_per_rank} "
            f"tokens = {request.capacity_tokens}; {-(-length // request.num_ranks)} tokens per rank or "
            f"{-(-length // request.tokens_per_rank)} ranks would hold it, or --overlong split or truncate cuts it"
        )
