"""Sequence parallelism: a group of ranks shares every document, by context parallelism or Ulysses.

**Context parallelism** (Llama 3, arXiv 2407.21783, section 3.3.2; for each document separately as in WLB-LLM, arXiv
2503.17924). A document is cut into two chunks per rank. Rank r has the r-th chunk and the r-th from the end, so that
all ranks have its mean cost. Before attention each rank gathers keys and values of all tokens of the group, needed or
not. Balance is perfect, and bytes grow with the group.

    document    | 0 | 1 | 2 | 2 | 1 | 0 |      ranks of its chunks, in a group of three

**Ulysses** (arXiv 2309.14509, section 3). Tokens are divided among a group of ranks; for attention the heads are
divided instead. One all-to-all gives every rank some heads of all tokens of the group, another one returns outputs.
All ranks of a group have equal work if they can have equally many heads. Work differs between groups, because their
documents do. A key and value head is sent to every rank that has one of its query heads.
"""

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, groups_of_ranks, nothing_sent
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.cost import TokenBytes, causal_pairs_of
from distca_hf.errors import ConfigError


def context_parallel(
    document_tokens: IntArray, num_ranks: int, token_bytes: TokenBytes, group_ranks: int | None = None
) -> Baseline:
    """Runs documents under zigzag context parallelism in groups of `group_ranks` neighbours, or over all ranks.

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
    """Returns `[ranks]` work and tokens of the ranks of one group.

    If chunks do not divide a length, some chunks are a token longer. Implementations pad; here every document starts
    one rank further than the document before, so that the longer chunks spread over all ranks.
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


def ulysses(
    document_tokens: IntArray,
    num_ranks: int,
    token_bytes: TokenBytes,
    heads: int,
    key_value_heads: int,
    group_ranks: int | None = None,
) -> Baseline:
    """Runs documents under Ulysses in groups of `group_ranks` neighbours, or over all ranks.

    Ranks beyond the number of heads are idle.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; the last group may have fewer than the others.
        token_bytes: bytes of a token, of all heads together.
        heads, key_value_heads: query heads, and heads of keys and values.
        group_ranks: ranks that share their documents.

    Raises:
        ConfigError: query heads are not a multiple of key and value heads.
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    if min(heads, key_value_heads) < 1 or heads % key_value_heads:
        raise ConfigError(f"{heads} query heads are not a multiple of {key_value_heads} key and value heads")
    group = min(group_ranks or num_ranks, num_ranks)
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    sent = nothing_sent(num_ranks)
    for ranks, documents in groups_of_ranks(document_tokens, num_ranks, group):
        # 1. Heads of each rank, as equally many as possible.
        borders = np.arange(ranks.stop - ranks.start + 1)
        of_query = np.diff(heads * borders // borders[-1])
        of_key_value = _key_value_heads(heads * borders // borders[-1], heads // key_value_heads)
        # 2. Work: all pairs of the group, times heads. Tokens: equal.
        pairs = int(causal_pairs_of(np.zeros_like(documents), documents).sum())
        work[ranks] = pairs * of_query
        tokens[ranks] = np.diff(int(documents.sum()) * borders // borders[-1])
        # 3. Bytes of one token to each rank, and of its outputs back.
        there = of_query * token_bytes.query // heads + of_key_value * token_bytes.key_value // key_value_heads
        back = of_query * token_bytes.output // heads
        sent[ranks, ranks] = np.outer(tokens[ranks], there) + np.outer(back, tokens[ranks])
    np.fill_diagonal(sent, 0)
    return Baseline("ulysses" if group == num_ranks else f"ulysses_{group}", work, tokens, sent)


def _key_value_heads(borders: IntArray, queries_per_key: int) -> IntArray:
    """Returns `[ranks]` numbers of key and value heads that query heads [borders[r], borders[r + 1]) attend."""
    begin, end = borders[:-1], borders[1:]
    return np.where(end > begin, ceil_div(end, queries_per_key) - begin // queries_per_key, 0)
