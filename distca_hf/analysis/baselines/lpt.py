"""Whole documents: longest processing time first (Graham 1969), the best that packing without cuts is given for.

Documents, the longest first, each go to the rank with the least work so far. Nothing is sent. Some rank has the work
of the longest document; and ranks hold unequal tokens, even more than they have room for.
"""

import heapq

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, nothing_sent
from distca_hf.cost import IntArray, TokenBytes, causal_pairs, causal_pairs_of
from distca_hf.layout import check_document_tokens


def whole_documents(document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes) -> Baseline:
    """Whole documents to the least loaded rank, the longest first; of equally loaded ranks to the first.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; how many tokens they have room for is not asked.
        token_bytes: not needed, nothing is sent.

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
        num_ranks: ranks; how many tokens they have room for is not asked.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    least = [(0, rank) for rank in range(num_ranks)]
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in np.argsort(-check_document_tokens(document_tokens), kind="stable").tolist():
        load, rank = least[0]
        heapq.heapreplace(least, (load + causal_pairs(0, int(document_tokens[number])), rank))
        numbers[rank].append(number)
    return [np.array(held, dtype=np.int64) for held in numbers]
