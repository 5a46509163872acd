"""Plan choices: what other numbers of tokens per rank would bring, need and allow."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca_hf.analysis.plan_epoch import pack_in_order
from distca_hf.analysis.plan_speed import speed_over_plain
from distca_hf.config import OverlongPolicy
from distca_hf.cost import IntArray
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.flops import StepCost


TOKENS_PER_RANK = tuple(2**power for power in range(13, 19))  # 8K to 256K
# Micro-batches that speed is estimated from, where the dataset has more.
SAMPLED_MICRO_BATCHES = 256


@dataclass(frozen=True)
class Choice:
    """One number of tokens per rank.

    Attributes:
        tokens_per_rank: that number.
        longest_document_tokens: of the longest document that all ranks together hold.
        too_long_documents: documents of the dataset that are longer.
        memory_bytes: estimated peak of a rank; None if the model's size is not known.
        fits: whether a GPU has room for that; None likewise.
        over_plain: estimated time of documents in order over time as planned; None likewise, or if documents that are
            too long are refused.
    """

    tokens_per_rank: int
    longest_document_tokens: int
    too_long_documents: int
    memory_bytes: int | None
    fits: bool | None
    over_plain: float | None


def make_choices(
    document_tokens: IntArray,
    num_ranks: int,
    cost: StepCost | None,
    memory_bytes: Callable[[int], int] | None,
    room_bytes: float,
    seed: int,
    known: Choice,
    overlong: OverlongPolicy = "error",
) -> list[Choice]:
    """Returns all choices, the one that was asked for among them.

    Args:
        document_tokens: `[documents]` lengths of the dataset, none of them cut.
        num_ranks: ranks that share each micro-batch.
        cost: of a token and a pair; None if the model's size is not known.
        memory_bytes: peak of a rank with so many tokens; None likewise.
        room_bytes: of a GPU.
        seed: of the sample.
        known: the choice that was asked for, from the whole epoch.
        overlong: what to do with documents that are too long.
    """
    shuffled = document_tokens[np.random.RandomState(seed & 0xFFFFFFFF).permutation(len(document_tokens))]

    def choice(tokens_per_rank: int) -> Choice:
        capacity_tokens = num_ranks * tokens_per_rank
        too_long = int((document_tokens > capacity_tokens).sum())
        refused = too_long > 0 and overlong == "error"
        fitted = fit_documents(shuffled, capacity_tokens, overlong)[2]
        needed = None if memory_bytes is None else memory_bytes(tokens_per_rank)
        return Choice(
            tokens_per_rank=tokens_per_rank,
            longest_document_tokens=capacity_tokens,
            too_long_documents=too_long,
            memory_bytes=needed,
            fits=None if needed is None else needed <= room_bytes,
            over_plain=None if cost is None or refused else _speed(fitted, num_ranks, capacity_tokens, cost),
        )

    others = (tokens for tokens in TOKENS_PER_RANK if tokens != known.tokens_per_rank)
    return sorted([known, *map(choice, others)], key=lambda each: each.tokens_per_rank)


def _speed(shuffled: IntArray, num_ranks: int, capacity_tokens: int, cost: StepCost) -> float:
    """Estimates the ratio from the first documents of a shuffled dataset."""
    enough = int(np.searchsorted(np.cumsum(shuffled), SAMPLED_MICRO_BATCHES * capacity_tokens)) + 1
    sample = shuffled[:enough]
    epoch = EpochPacker(sample, capacity_tokens).epoch(0)
    return speed_over_plain(pack_in_order(sample, epoch, num_ranks), cost)
