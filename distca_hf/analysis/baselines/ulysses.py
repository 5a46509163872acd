"""Ulysses: tokens are divided among a group of ranks, and for attention heads are (arXiv 2309.14509, section 3).

An all-to-all gives every rank some heads of all the group's tokens, another brings outputs back. All ranks of a group
compute the same, if they can have equally many heads; groups differ, as their documents do. A key and value head goes
to every rank that has a query head of it.
"""

import numpy as np

from distca_hf.analysis.baselines.baseline import Baseline, nothing_sent
from distca_hf.analysis.baselines.sequential_fill import groups_of_ranks
from distca_hf.cost import IntArray, TokenBytes, causal_pairs_of
from distca_hf.errors import ConfigError


def ulysses(
    document_tokens: IntArray,
    num_ranks: int,
    token_bytes: TokenBytes,
    heads: int,
    key_value_heads: int,
    group_ranks: int | None = None,
) -> Baseline:
    """Ulysses over groups of `group_ranks` neighbours, or over all ranks; ranks beyond the number of heads are idle.

    Args:
        document_tokens: `[documents]` lengths, in tokens.
        num_ranks: ranks; the last group may have fewer than the others.
        token_bytes: bytes of a token, of all heads together.
        heads, key_value_heads: query heads, and heads of keys and values.
        group_ranks: ranks that share their documents.

    Raises:
        ConfigError: heads are not a multiple of those of keys and values.
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    if min(heads, key_value_heads) < 1 or heads % key_value_heads:
        raise ConfigError(f"{heads} query heads are not a multiple of {key_value_heads} key and value heads")
    group = min(group_ranks or num_ranks, num_ranks)
    work, tokens = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    sent = nothing_sent(num_ranks)
    for ranks, documents in groups_of_ranks(document_tokens, num_ranks, group):
        borders = np.arange(ranks.stop - ranks.start + 1)
        of_query = np.diff(heads * borders // borders[-1])
        of_key_value = _key_value_heads(heads * borders // borders[-1], heads // key_value_heads)
        pairs = int(causal_pairs_of(np.zeros_like(documents), documents).sum())
        work[ranks] = pairs * of_query
        tokens[ranks] = np.diff(int(documents.sum()) * borders // borders[-1])
        there = of_query * token_bytes.query // heads + of_key_value * token_bytes.key_value // key_value_heads
        back = of_query * token_bytes.output // heads
        sent[ranks, ranks] = np.outer(tokens[ranks], there) + np.outer(back, tokens[ranks])
    np.fill_diagonal(sent, 0)
    return Baseline("ulysses" if group == num_ranks else f"ulysses_{group}", work, tokens, sent)


def _key_value_heads(borders: IntArray, queries_per_key: int) -> IntArray:
    """`[ranks]` heads of keys and values that the query heads [borders[r], borders[r + 1]) attend."""
    begin, end = borders[:-1], borders[1:]
    return np.where(end > begin, -(-end // queries_per_key) - begin // queries_per_key, 0)
