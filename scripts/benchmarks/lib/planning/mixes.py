"""Length mixes: the documents that planning is measured on.

Files are the shipped ones (examples/lengths). Documents of a file mix are drawn with the seed until the ranks are
full; the last is cut, and so is whatever is longer than `longest_tokens`. `pretrain_256k` and `prolong_256k` are drawn
from distributions of the same shape, for layouts whose tokens stay where they are.
"""

from functools import cache

import numpy as np

from distca_hf.analysis.lengths import read_lengths
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.recipe import LENGTHS


MIXES = (
    *("pretrain", "pretrain_up", "pretrain_256k", "prolong", "prolong_up", "prolong_256k"),
    *("one", "equal", "equal_3001", "lognormal"),
)
LONG_TOKENS = 10_000  # longer ones count twice in up-sampled mixes
SHORTEST_TOKENS = 64


@cache
def file_lengths(name: str) -> IntArray:
    """Returns all lengths of a shipped file, in tokens."""
    return read_lengths(LENGTHS.find(name)).tokens


def batch(mix: str, num_ranks: int, tokens_per_rank: int, longest_tokens: int, seed: int) -> IntArray:
    """Returns lengths of documents, int64 `[documents]`, of exactly `num_ranks * tokens_per_rank` tokens, the longest
    of at most `longest_tokens`."""
    rng = np.random.default_rng([seed, num_ranks, tokens_per_rank])
    total_tokens = num_ranks * tokens_per_rank
    if mix == "one":
        documents = np.concatenate([[longest_tokens], rng.integers(500, 4001, total_tokens // 500)])
    elif mix in ("equal", "equal_3001"):
        tokens = longest_tokens if mix == "equal" else 3001
        documents = np.full(ceil_div(total_tokens, tokens), tokens)
    elif mix == "lognormal":
        documents = np.exp(rng.normal(np.log(4096), 1.6, total_tokens // 1000 + 100)).astype(np.int64)
    elif mix in ("pretrain_256k", "prolong_256k"):
        return _like(mix, rng, num_ranks, tokens_per_rank)
    else:
        documents = _from_file(mix, rng, longest_tokens)
    return _fill(np.clip(documents, 1, longest_tokens), total_tokens)


def _from_file(mix: str, rng: np.random.Generator, longest_tokens: int) -> IntArray:
    """Returns documents of a file in random order, again and again. Up-sampled mixes have the long ones twice, half of
    them at the limit."""
    lengths = file_lengths(mix.removesuffix("_up"))
    long = lengths[lengths >= LONG_TOKENS]
    if mix == "pretrain_up":
        lengths = np.concatenate([lengths, long])
    elif mix == "prolong_up":
        long = np.tile(long, 2)
        long = np.where(rng.random(len(long)) < 0.5, longest_tokens, long)
        lengths = np.concatenate([lengths[lengths < LONG_TOKENS], long])
    return np.concatenate([rng.permutation(lengths) for _ in range(8)])


def _like(mix: str, rng: np.random.Generator, num_ranks: int, tokens_per_rank: int) -> IntArray:
    """Draws 99 documents in 100 short, and a few of any length; or three tokens in five in long documents."""
    total_tokens, longest = num_ranks * tokens_per_rank, tokens_per_rank
    documents: list[int] = []
    filled = long_tokens = 0
    while filled < total_tokens:
        if mix == "pretrain_256k":
            is_long = rng.random() < 0.01
            length = _log_uniform(rng, 16_384, longest) if is_long else rng.lognormal(np.log(3200), 0.5)
        elif long_tokens <= 0.6 * filled:
            at_limit = rng.random() < 0.3
            length = longest if at_limit else _log_uniform(rng, min(65_536, longest // 2), longest)
            long_tokens += int(length)
        else:
            length = min(rng.lognormal(np.log(1914), 0.9), 65_536)
        documents.append(int(np.clip(length, SHORTEST_TOKENS, longest)))
        filled += documents[-1]
    return _fill(rng.permutation(np.array(documents, dtype=np.int64)), total_tokens)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _fill(documents: IntArray, total_tokens: int) -> IntArray:
    """Returns the first documents, the last one cut; if they are too few, again from the first on."""
    documents = np.tile(documents, ceil_div(total_tokens, int(documents.sum())))
    ends = np.cumsum(documents)
    count = int(np.searchsorted(ends, total_tokens)) + 1
    chosen = documents[:count].copy()
    chosen[-1] -= int(ends[count - 1]) - total_tokens
    return chosen
