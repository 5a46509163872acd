"""Datasets of random tokens with long-tailed lengths."""

import random
from typing import Any

from datasets import Dataset

from support.models import VOCABULARY


LENGTHS = (1, 5, 9, 17, 30, 60, 150)


def random_documents(count: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Documents of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice(lengths))] for _ in range(count)]


def random_dataset(count: int = 60, seed: int = 0, lengths: tuple[int, ...] = LENGTHS, **columns: Any) -> Dataset:
    """A tokenised dataset of random documents, with further columns if given."""
    return Dataset.from_dict({"input_ids": random_documents(count, seed, lengths), **columns})
