"""Packing alone: whole documents or whole packs are assigned to ranks; no token and no task moves.

**Whole documents**: longest processing time first (Graham 1969), the reference for packing without cuts. Documents,
the longest first, each go to the rank with the least work so far. Some rank has the work of the longest document.
Ranks hold unequal tokens, possibly more than they have room for.

**Sorted packs**: the order of packs within one optimizer step changes no gradient, so packs of equal cost run at the
same time. Documents fill packs in order; a document cut at a pack's border continues as a new one. Packs are sorted by
attention work and assigned micro-step by micro-step.
"""

import heapq

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, fill_groups, nothing_sent
from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes, causal_pairs, causal_pairs_of
from distca_hf.layout import check_document_tokens


def whole_documents(document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes) -> Baseline:
    """Assigns whole documents to the least loaded rank, the longest first; of equally loaded ranks to the first.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks, without a limit of tokens.
        token_bytes: unused: nothing is sent. All baselines have this argument.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    document_tokens = check_document_tokens(document_tokens)
    held = [document_tokens[numbers] for numbers in assign_whole_documents(document_tokens, num_ranks)]
    work = np.array([causal_pairs_of(np.zeros_like(lengths), lengths).sum() for lengths in held])
    return Baseline("lpt", work, np.array([lengths.sum() for lengths in held]), nothing_sent(num_ranks))


def assign_whole_documents(document_tokens: IntArray, num_ranks: int) -> list[IntArray]:
    """Returns the numbers of the documents of each rank, the longest first; documents of one length stay in order.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks, without a limit of tokens.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    least = [(0, rank) for rank in range(num_ranks)]  # a heap: the least loaded rank is first
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in np.argsort(-check_document_tokens(document_tokens), kind="stable").tolist():
        load, rank = least[0]
        heapq.heapreplace(least, (load + causal_pairs(0, int(document_tokens[number])), rank))
        numbers[rank].append(number)
    return [np.array(held, dtype=np.int64) for held in numbers]


def sorted_packs(document_tokens: IntArray, num_ranks: int, micro_steps: int) -> list[Baseline]:
    """Returns the micro-steps of one optimizer step, packs of most work first.

    Args:
        document_tokens: `[documents]` lengths of all micro-steps together, in tokens.
        num_ranks: ranks; each runs one pack per micro-step.
        micro_steps: micro-steps of an optimizer step. With one there is nothing to sort.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    packs = fill_groups(document_tokens, num_ranks * micro_steps)
    tokens = np.array([int(pack.sum()) for pack in packs], dtype=np.int64)
    work = np.array([int(causal_pairs_of(np.zeros_like(pack), pack).sum()) for pack in packs], dtype=np.int64)
    order = np.argsort(-work, kind="stable").reshape(micro_steps, num_ranks)
    return [Baseline("sorted_packs", work[packs], tokens[packs], nothing_sent(num_ranks)) for packs in order]
