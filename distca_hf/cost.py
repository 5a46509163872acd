"""What attention costs: attended pairs.

A causal query token at position p of its document attends p + 1 keys. Work is counted in such pairs, once for all
heads: the same factor for every task, and exact integers up to documents of 2 ** 31 tokens.

A `Cost` is what placement balances. Layers may differ: some attend the last tokens only (a sliding window), and some
models attend their whole document from every token. A cost is then the sum over the types of layers, which in every
case does not fall from one token of a document to the next; this is all that placement needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca_hf.arrays import IntArray as IntArray
from distca_hf.errors import ConfigError


Work = Callable[[int, int, int], int]  # (document, start, stop) -> work of these query tokens


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


class DocumentCost(Protocol):
    """What placement balances: exact integers, which do not fall from one token of a document to the next."""

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """Work of query ranges [start, stop) of documents of such lengths; below 2 ** 63."""

    def of_documents(self, document_tokens: Sequence[int]) -> Work:
        """The same for one range, as a function of (document, start, stop), for code that asks a million times."""


@dataclass(frozen=True)
class LayerType:
    """Layers that attend alike.

    Attributes:
        layers: how many there are, or how much one of them weighs.
        window_tokens: a token attends this many tokens at most, itself included; None for all before it.
        causal: whether a token attends only itself and tokens before it, or its whole document.

    Raises:
        ConfigError: a number is below 1, or a window without causality.
    """

    layers: int = 1
    window_tokens: int | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if self.layers < 1 or (self.window_tokens is not None and self.window_tokens < 1):
            raise ConfigError(f"layers={self.layers} and window_tokens={self.window_tokens} must be at least 1")
        if not self.causal and self.window_tokens is not None:
            raise ConfigError(f"window_tokens={self.window_tokens} needs causal=True")

    def work(self, start: int, stop: int, document_tokens: int) -> int:
        """Attended pairs of the query range [start, stop) in all these layers; exact for any integers."""
        if not self.causal:
            return self.layers * (stop - start) * document_tokens
        if self.window_tokens is None:
            return self.layers * causal_pairs(start, stop)
        rising_start, rising_stop = min(start, self.window_tokens), min(stop, self.window_tokens)
        flat_tokens = stop - rising_stop - (start - rising_start)
        return self.layers * (causal_pairs(rising_start, rising_stop) + flat_tokens * self.window_tokens)

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """`work` for arrays; below 2 ** 63."""
        if not self.causal:
            return self.layers * (stops - starts) * document_tokens
        if self.window_tokens is None:
            return self.layers * causal_pairs_of(starts, stops)
        rising_starts, rising_stops = np.minimum(starts, self.window_tokens), np.minimum(stops, self.window_tokens)
        flat_tokens = stops - rising_stops - (starts - rising_starts)
        return self.layers * (causal_pairs_of(rising_starts, rising_stops) + flat_tokens * self.window_tokens)


@dataclass(frozen=True)
class Cost:
    """Sum over the types of layers of a model; by default every layer is causal, and counted once.

    One full layer to five with a window of 1024 tokens is `Cost((LayerType(1), LayerType(5, window_tokens=1024)))`.

    Raises:
        ConfigError: there are no layers.
    """

    layer_types: tuple[LayerType, ...] = (LayerType(),)

    def __post_init__(self) -> None:
        if not self.layer_types:
            raise ConfigError("a cost needs at least one type of layers")

    def work(self, start: int, stop: int, document_tokens: int) -> int:
        """Attended pairs of the query range [start, stop) of a document, all layers together; exact."""
        return sum(layer_type.work(start, stop, document_tokens) for layer_type in self.layer_types)

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """`work` for arrays; below 2 ** 63."""
        work = [layer_type.work_of(starts, stops, document_tokens) for layer_type in self.layer_types]
        return np.sum(work, axis=0, dtype=np.int64)

    def of_documents(self, document_tokens: Sequence[int]) -> Work:
        """`work` as a function of (document, start, stop)."""
        if self == CAUSAL:
            return _causal_work
        return lambda document, start, stop: self.work(start, stop, document_tokens[document])


CAUSAL = Cost()


def _causal_work(document: int, start: int, stop: int) -> int:
    return (stop * (stop + 1) - start * (start + 1)) // 2


def imbalance(work: Sequence[int] | IntArray) -> float:
    """Max over mean work of the ranks: 1.0 is perfect, and what an empty batch has."""
    total = sum(int(value) for value in work)
    return int(max(work)) * len(work) / total if total else 1.0
