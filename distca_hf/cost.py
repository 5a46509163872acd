"""What attention costs: attended pairs.

A query token at position p of its document attends p + 1 keys. Work is counted in such pairs, once for all heads: the
same factor for every task, and exact integers up to documents of 2 ** 31 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token in one layer, all heads together: of its query, its output, and its key and value.

    The defaults are those of an 8B Llama in bf16: 32 query heads, 8 KV heads, 128 dimensions each.
    """

    query: int = 8192
    output: int = 8192
    key_value: int = 4096


def causal_pairs(start: int, stop: int) -> int:
    """Attended pairs of the query range [start, stop) of one document."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def causal_pairs_of(starts: IntArray, stops: IntArray) -> IntArray:
    """`causal_pairs` for arrays of ranges."""
    return (stops * (stops + 1) - starts * (starts + 1)) // 2


def imbalance(work: Sequence[int] | IntArray) -> float:
    """Max over mean work of the ranks: 1.0 is perfect, and what an empty batch has."""
    total = sum(int(value) for value in work)
    return int(max(work)) * len(work) / total if total else 1.0
