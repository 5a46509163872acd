"""Published mixes: the batches that the planner of DistCA was measured on, from its own length files.

Its samplers (simulator/optimizers/samples.py) keep nine tenths of the documents below 64K tokens and take those above
twice; its batches (`batch_documents`) hold exactly the tokens of one rank, documents being rounded up to 16 tokens and
cut at the end of a batch. Where the file gives fewer batches than there are ranks, they come again.
"""

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np


FOLDER = Path(__file__).parents[2] / "examples" / "lengths"
LONG_TOKENS = 64 * 1024
SHORT_KEPT = 0.9
ALL_TOKENS = 128 * 1024  # lengths grow with the tokens of a rank, which are a multiple of this


@cache
def file_lengths(name: str) -> tuple[int, ...]:
    """Lengths of a shipped file."""
    return tuple(json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())))


def pretrain(tokens_per_rank: int) -> list[int]:
    """10,000 documents of the mix "Pretrain", in the published order."""
    short, long = _short_and_long("pretrain")
    chosen = np.random.default_rng(42).choice(short + 2 * long, size=10_000, replace=False)
    return (chosen * (tokens_per_rank // ALL_TOKENS)).tolist()


def prolong(tokens_per_rank: int) -> list[int]:
    """The mix "ProLong": half of the long documents have exactly half a rank's tokens. Shuffled."""
    short, long = _short_and_long("prolong")
    rng = np.random.default_rng(42)
    long = [tokens_per_rank // 2 if rng.random() < 0.5 else length for length in 2 * long]
    documents = long + short
    np.random.default_rng(0).shuffle(documents)
    return documents


def published_batches(mix: str, num_ranks: int, tokens_per_rank: int) -> np.ndarray:
    """Lengths of all documents of `num_ranks` batches."""
    if mix == "half":  # one document fills every other rank
        full, dust = [tokens_per_rank], [4096] * (tokens_per_rank // 4096)
        batches = [full if rank % 2 == 0 else dust for rank in range(num_ranks)]
    elif mix == "onelong":  # one document fills the first rank
        batches = [[tokens_per_rank], *[[4096] * (tokens_per_rank // 4096)] * (num_ranks - 1)]
    else:
        batches = _cut({"pretrain": pretrain, "prolong": prolong}[mix](tokens_per_rank), num_ranks, tokens_per_rank)
        batches = (batches * -(-num_ranks // len(batches)))[:num_ranks]
    return np.array([length for batch in batches for length in batch], dtype=np.int64)


def _short_and_long(name: str) -> tuple[list[int], list[int]]:
    """Documents below the threshold, nine tenths of them, and those above."""
    lengths = file_lengths(name)
    short = [length for length in lengths if length < LONG_TOKENS]
    return short[: int(len(short) * SHORT_KEPT)], [length for length in lengths if length >= LONG_TOKENS]


def _cut(documents: list[int], most_batches: int, tokens_per_batch: int) -> list[list[int]]:
    """Full batches."""
    batches: list[list[int]] = []
    batch, room = [], tokens_per_batch
    for document in documents:
        rest = -(-document // 16) * 16
        while rest:
            take = min(rest, room)
            batch.append(take)
            rest, room = rest - take, room - take
            if room == 0:
                batches.append(batch)
                batch, room = [], tokens_per_batch
        if len(batches) >= most_batches:
            break
    return batches[:most_batches]
