"""Documents of a training: a long one for every micro-batch, and short ones to fill it."""

import random

import torch
from datasets import Dataset


SHORT_TOKENS = (512, 1024, 2048, 4096, 8192)
MOST_WORDS = 32_000
STEP, NOISE = 7, 8


def training_documents(micro_batches: int, long_tokens: int, capacity_tokens: int, vocabulary: int) -> Dataset:
    """Returns documents whose tokens follow a rule that can be learnt: each is 7 above the one before, and some noise.

    Args:
        long_tokens: of the long document of each micro-batch. With more than half of the capacity no micro-batch has
            room for two.
        capacity_tokens: of a micro-batch, on all ranks together.
        vocabulary: of the model. Documents use 32,000 words of it at most: those that never come are unlearnt first.
    """
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(micro_batches):
        lengths.append(long_tokens)
        left = capacity_tokens - long_tokens
        while left:
            lengths.append(min(left, rng.choice(SHORT_TOKENS)))
            left -= lengths[-1]
    words = min(vocabulary, MOST_WORDS)
    rows = []
    for length in lengths:
        noise = torch.randint(0, NOISE, (length,), generator=generator)
        start = torch.randint(0, words, (1,), generator=generator)
        rows.append(((start + STEP * torch.arange(length) + noise) % words).to(torch.int32).numpy())
    return Dataset.from_dict({"input_ids": rows})
