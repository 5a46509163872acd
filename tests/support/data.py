"""Datasets of random tokens with long-tailed lengths."""

import copy
import random
from functools import cache
from typing import Any

import torch
from datasets import Dataset

from support.models import VOCABULARY


LENGTHS = (1, 5, 9, 17, 30, 60, 150)


def random_documents(count: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Documents of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice(lengths))] for _ in range(count)]


def random_dataset(count: int = 60, seed: int = 0, lengths: tuple[int, ...] = LENGTHS, **columns: Any) -> Dataset:
    """A tokenised dataset of random documents, with further columns if given."""
    if not columns:
        return copy.copy(_dataset_of(count, seed, tuple(lengths)))
    return Dataset.from_dict({"input_ids": random_documents(count, seed, lengths), **columns})


@cache
def _dataset_of(count: int, seed: int, lengths: tuple[int, ...]) -> Dataset:
    """Makes each dataset once: Datasets hashes its rows, which takes as long as a small training."""
    return Dataset.from_dict({"input_ids": random_documents(count, seed, lengths)})


def square_mask(numbers: torch.Tensor, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Returns a mask `[B, 1, T, T]` of all pairs of tokens: causal inside of the documents that `[B, T]` numbers say,
    0 for padding, which attends to nothing."""
    same = (numbers[:, :, None] == numbers[:, None]) & (numbers[:, :, None] > 0)
    attends = (same & torch.ones_like(same[0]).tril())[:, None]
    if dtype == torch.bool:
        return attends
    return torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, torch.finfo(dtype).min)
