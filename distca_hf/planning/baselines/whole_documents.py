"""Whole documents: longest processing time first (Graham 1969), the best that packing without cuts is given for.

Documents, the longest first, each go to the rank with the least work so far. Nothing is sent. Some rank has the work
of the longest document; and ranks hold unequal tokens, even more than they have room for.
"""

import heapq

import numpy as np

from distca_hf.cost import IntArray, TokenBytes, causal_pairs
from distca_hf.layout import check_document_tokens
from distca_hf.planning.baselines.result import Baseline, nothing_sent


def whole_documents(document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes) -> Baseline:
    """Whole documents to the least loaded rank, the longest first; of equally loaded ranks to the first.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; how many tokens they have room for is not asked.
        token_bytes: not needed, nothing is sent.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    least = [(0, rank) for rank in range(num_ranks)]
    for length in np.sort(check_document_tokens(document_tokens))[::-1].tolist():
        load, rank = least[0]
        heapq.heapreplace(least, (load + causal_pairs(0, length), rank))
        tokens[rank] += length
    for load, rank in least:
        work[rank] = load
    return Baseline("lpt", work, tokens, nothing_sent(num_ranks))
