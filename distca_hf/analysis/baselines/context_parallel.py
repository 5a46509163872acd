"""Context parallelism: every document on all ranks of a group, zigzag, keys and values gathered from all.

A document is cut in two chunks per rank; rank r has the r-th and the r-th from the end, so that all ranks have its
mean cost (Llama 3, arXiv 2407.21783, section 3.3.2; for every document by itself as in WLB-LLM, arXiv 2503.17924).
Before attention each rank gathers keys and values of all tokens of the group, needed or not: balance is perfect, and
bytes grow with the group.

    document    | 0 | 1 | 2 | 2 | 1 | 0 |      ranks of its chunks, in a group of three
"""

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, nothing_sent
from distca_hf.analysis.baselines.sequential_fill import groups_of_ranks
from distca_hf.cost import IntArray, TokenBytes, causal_pairs_of


def context_parallel(
    document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes, group_ranks: int | None = None
) -> Baseline:
    """Zigzag context parallelism over groups of `group_ranks` neighbours, or over all ranks.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; the last group may have fewer than the others.
        token_bytes: bytes of a token.
        group_ranks: ranks that share their documents.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    group = min(group_ranks or num_ranks, num_ranks)
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    sent = nothing_sent(num_ranks)
    for ranks, documents in groups_of_ranks(document_tokens, num_ranks, group):
        work[ranks], tokens[ranks] = _zigzag(documents, ranks.stop - ranks.start)
        sent[ranks, ranks] = tokens[ranks, None] * token_bytes.key_value
    np.fill_diagonal(sent, 0)
    return Baseline("zigzag_cp" if group == num_ranks else f"zigzag_cp_{group}", work, tokens, sent)


def _zigzag(document_tokens: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """`[ranks]` work and tokens of the ranks of one group.

    Lengths that chunks do not divide make some chunks a token longer. Others pad; here the ranks of a document begin
    one further than those of the document before, so that nobody has all the longer ones.
    """
    chunks = 2 * num_ranks
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    turn = np.arange(len(document_tokens))
    for chunk in range(chunks):
        start, stop = document_tokens * chunk // chunks, document_tokens * (chunk + 1) // chunks
        rank = (min(chunk, chunks - 1 - chunk) + turn) % num_ranks
        np.add.at(work, rank, causal_pairs_of(start, stop))
        np.add.at(tokens, rank, stop - start)
    return work, tokens
