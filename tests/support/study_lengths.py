"""Document lengths as the scheduler study draws them: `pretrain`, `prolong`, and one giant among dust."""

import numpy as np

from distca_hf.layout import Layout
from distca_hf.placement.place import fill_in_order


TOKENS_PER_RANK = 262_144
MIXES = ("pretrain", "prolong", "giant")


def study_layout(mix: str, num_ranks: int, seed: int, tokens_per_rank: int = TOKENS_PER_RANK) -> Layout:
    """Documents of one global micro-batch, none longer than a rank's tokens, filled in order: cut where ranks end."""
    tokens = num_ranks * tokens_per_rank
    rng = np.random.default_rng(seed)
    draw = {"pretrain": _pretrain, "prolong": _prolong, "giant": _giant}[mix]
    return fill_in_order(draw(rng, tokens, tokens_per_rank), num_ranks)


def _pretrain(rng: np.random.Generator, tokens: int, longest: int) -> list[int]:
    """99 % lognormal around 3200, 1 % log-uniform from 16K to the longest."""
    lengths = []
    while tokens:
        long = np.exp(rng.uniform(np.log(16_384), np.log(longest)))
        length = long if rng.random() < 0.01 else rng.lognormal(np.log(3200), 0.5)
        lengths.append(min(int(np.clip(length, 64, longest)), tokens))
        tokens -= lengths[-1]
    return lengths


def _prolong(rng: np.random.Generator, tokens: int, longest: int) -> list[int]:
    """60 % of tokens in documents above 64K, 30 % of these of the greatest length; others lognormal around 1914."""
    long_tokens, lengths = int(0.6 * tokens), []
    short_tokens = tokens - long_tokens
    while long_tokens:
        length = longest
        if rng.random() >= 0.3:
            length = int(np.exp(rng.uniform(np.log(min(65_536, longest / 2)), np.log(longest))))
        lengths.append(min(length, long_tokens))
        long_tokens -= lengths[-1]
    while short_tokens:
        length = int(np.clip(rng.lognormal(np.log(1914), 0.9), 1, 65_536))
        lengths.append(min(length, short_tokens))
        short_tokens -= lengths[-1]
    return [lengths[at] for at in rng.permutation(len(lengths))]


def _giant(rng: np.random.Generator, tokens: int, longest: int) -> list[int]:
    return [longest] + [1024] * ((tokens - longest) // 1024)
