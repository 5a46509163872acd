"""Cost of attention: attended pairs of a mask, and bytes of the rows that move.

A causal query token at position p of its document attends p + 1 keys. Work is counted in these pairs, once for all
heads: heads are the same factor for every task, and pairs are exact integers up to documents of 2 ** 31 tokens.

    keys        0 1 2 3 4 5        0 1 2 3 4 5        0 1 2 3 4 5
    query 0     x                  x                  x
    query 1     x x                x x                x x
    query 2     x x x              x x x              x x x
    query 3     x x x x              x x x                  x         pairs(2, 5): 3 + 4 + 5; 3 + 3 + 3; 3 + 1 + 2
    query 4     x x x x x              x x x                x x       first_key(4): 0; 2; 3
                Mask()             Mask(window_tokens=3)    Mask(3, chunked=True)

Planning and placement get pairs and positions only from a `Mask`. A `DocumentCost` is the quantity that placement
balances: a sum over the masks of a model's layers (`Cost`), or one weighted by kernel times.

Bytes of a token follow from a model's heads, and so do the groups into which plans divide heads. Training reads them
from the model's configuration, `distca plan` from a config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isqrt, sqrt
from typing import Any, Protocol, Self

import numpy as np

from distca_hf.arrays import IntArray, Integers, ranges
from distca_hf.errors import ConfigError


Work = Callable[[int, int, int], int]  # (document, start, stop) -> work of these query tokens

# Maximum number of head groups: eight parts of a document balance eight ranks; more only make index tensors longer.
ENOUGH_GROUPS = 8


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token in one layer, for all heads: of its query, its output, and its key and value.

    The defaults are from an 8B Llama in bf16: 32 query heads, 8 KV heads, 128 dimensions each.
    """

    query: int = 8192
    output: int = 8192
    key_value: int = 4096


def causal_pairs(start: int, stop: int) -> int:
    """Counts attended pairs of the query range [start, stop) of one document, under the causal mask."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def causal_pairs_of(starts: IntArray, stops: IntArray) -> IntArray:
    """Counts `causal_pairs` for arrays of ranges."""
    return (stops * (stops + 1) - starts * (starts + 1)) // 2


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query attends to: its own and earlier ones of its document, all of them or those in a window.
    Raises ConfigError if the window is below 1, or chunks have no length."""

    # Most keys that a query attends to, including its own; None for the whole causal prefix.
    window_tokens: int | None = None
    # Whether documents are divided into chunks of `window_tokens`, and a query attends only to its chunk (Llama
    # 4). Otherwise the window slides.
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ConfigError(f"window_tokens={self.window_tokens} must be at least 1")
        if self.window_tokens is None and self.chunked:
            raise ConfigError("chunked=True needs window_tokens, the length of a chunk")

    @property
    def in_words(self) -> str:
        """The mask as text: "no window", "a window of 1024 tokens", "chunks of 8192 tokens"."""
        if self.window_tokens is None:
            return "no window"
        return f"{'chunks' if self.chunked else 'a window'} of {self.window_tokens} tokens"

    def within(self, longest_document_tokens: int) -> "Mask":
        """Returns the mask in documents up to this length: the causal one if none is longer than the window."""
        if self.window_tokens is None or self.window_tokens < longest_document_tokens:
            return self
        return CAUSAL_MASK

    def first_key(self, start: Integers) -> Integers:
        """Returns the first key that the query at `start` attends; an int, or an int64 array of any shape."""
        if self.window_tokens is None:
            return start * 0
        if self.chunked:
            return start // self.window_tokens * self.window_tokens
        if isinstance(start, int):
            return max(0, start + 1 - self.window_tokens)
        return np.maximum(0, start + 1 - self.window_tokens)

    def cuts(self, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
        """Finds queries inside ranges [start, stop) that attend to no earlier key: they begin a chunk. Returns
        `[cuts]` index of the range, and position of the query; sorted by both."""
        if self.window_tokens is None or not self.chunked:
            none = np.zeros(0, dtype=np.int64)
            return none, none
        first = starts // self.window_tokens + 1
        counts = (stops - 1) // self.window_tokens + 1 - first
        return np.repeat(np.arange(len(starts)), counts), ranges(first, counts) * self.window_tokens

    def before(self, tokens: IntArray, distance: IntArray) -> tuple[IntArray, IntArray]:
        """Returns how the queries of ranges attend to keys before the range. Ranges must already be cut at `cuts`.

            keys        2 3 4    (5 is between keys and queries: distance 1)     window of 5 tokens
            query 6     x x x    its first key is 6 + 1 - 5 = 2
            query 7       x x
            query 8         x    three of the queries see keys, the last of them one key

        Args:
            tokens: `[n]` queries of each range.
            distance: `[n]` tokens between the last of the keys and the first query.

        Returns:
            `[n]` number of queries that attend to any of these keys, and `[n]` number of keys that the last of these
            queries attends; each query before it attends one more. The second number is 0 if all attend all keys.
        """
        if self.window_tokens is None or self.chunked:
            return tokens, np.zeros_like(tokens)
        queries = np.minimum(tokens, self.window_tokens - 1 - distance)
        return queries, self.window_tokens - distance - queries

    def pairs(self, start: int, stop: int) -> int:
        """Counts attended pairs of the query range [start, stop) of a document; exact for any integers."""
        return self.pairs_before(stop) - self.pairs_before(start)

    def pairs_before(self, position: int) -> int:
        """Counts attended pairs of the first queries of a document, up to a position; exact for any integers."""
        window_tokens = self.window_tokens
        if window_tokens is None or position <= window_tokens:
            return position * (position + 1) // 2
        if self.chunked:
            chunks, rest = divmod(position, window_tokens)
            return (chunks * window_tokens * (window_tokens + 1) + rest * (rest + 1)) // 2
        return window_tokens * (2 * position - window_tokens + 1) // 2

    def pairs_of(self, starts: IntArray, stops: IntArray) -> IntArray:
        """Counts `pairs` for arrays of ranges; below 2 ** 63."""
        if self.window_tokens is None:
            return causal_pairs_of(starts, stops)
        if self.chunked:
            (first, start), (last, stop) = (np.divmod(x, self.window_tokens) for x in (starts, stops))
            return causal_pairs_of(start, stop) + (last - first) * self.pairs_before(self.window_tokens)
        rising_starts, rising_stops = np.minimum(starts, self.window_tokens), np.minimum(stops, self.window_tokens)
        queries_in_full = (stops - rising_stops) - (starts - rising_starts)
        return causal_pairs_of(rising_starts, rising_stops) + queries_in_full * self.window_tokens

    def pairs_inside(self, starts: IntArray, stops: IntArray) -> IntArray:
        """Counts the pairs whose query and key are in the same range [start, stop); below 2 ** 63."""
        if self.window_tokens is not None and self.chunked:
            border = np.minimum(self.first_key(starts) + self.window_tokens, stops)
            return causal_pairs_of(np.zeros_like(starts), border - starts) + self.pairs_of(border, stops)
        return self.pairs_of(np.zeros_like(starts), stops - starts)

    def queries_of(self, pairs: int) -> int:
        """Returns the largest n for which the first n queries of a document have at most `pairs` pairs; exact."""
        if self.window_tokens is None or pairs <= (rising_pairs := self.pairs_before(self.window_tokens)):
            return (isqrt(8 * pairs + 1) - 1) // 2
        if self.chunked:
            chunks, rest = divmod(pairs, rising_pairs)
            return chunks * self.window_tokens + (isqrt(8 * rest + 1) - 1) // 2
        return self.window_tokens + (pairs - rising_pairs) // self.window_tokens

    def area(self, position: float) -> float:
        """Approximates the pairs of the queries before a position by the area under the mask, without the diagonal:
        position² / 2 for the causal mask. It has an inverse for any number of pairs, `position`."""
        if self.window_tokens is None or position <= self.window_tokens:
            return position * position / 2
        if self.chunked:
            chunks, rest = divmod(position, self.window_tokens)
            return (chunks * self.window_tokens**2 + rest * rest) / 2
        return (position - self.window_tokens / 2) * self.window_tokens

    def position(self, area: float) -> float:
        """Returns the position with this `area`."""
        if self.window_tokens is None or 2 * area <= self.window_tokens * self.window_tokens:
            return sqrt(2 * area)
        if self.chunked:
            chunks, rest = divmod(2 * area, self.window_tokens**2)
            return chunks * self.window_tokens + sqrt(rest)
        return area / self.window_tokens + self.window_tokens / 2


CAUSAL_MASK = Mask()
# Masks of a model's layers, each with the number of layers that attend with it.
LayerMasks = tuple[tuple[Mask, int], ...]
CAUSAL_LAYERS: LayerMasks = ((CAUSAL_MASK, 1),)


class DocumentCost(Protocol):
    """The cost that placement balances: exact integers. A token costs at least as much as the token before it, except
    at the beginning of a chunk (`Mask`): costs with chunks are balanced less well."""

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """Returns the work of query ranges [start, stop) of documents of these lengths; below 2 ** 63."""

    def of_documents(self, document_tokens: Sequence[int]) -> Work:
        """Returns a function (document, start, stop) of the same work, for code that calls it a million times."""


@dataclass(frozen=True)
class Cost:
    """Sum over the layers of a model; by default every layer is causal, and counted once.

    One full layer to five with a window of 1024 tokens is `Cost(((Mask(), 1), (Mask(1024), 5)))`.

    Raises:
        ConfigError: layers are missing, or fewer than 1 of a mask.
    """

    layers: LayerMasks = CAUSAL_LAYERS  # each mask with the number of layers that have it, or their weight

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a cost needs at least one mask with its number of layers")
        few = [(mask, count) for mask, count in self.layers if count < 1]
        if few:
            raise ConfigError(f"{few[0][1]} layers have {few[0][0].in_words}; the number must be at least 1")

    def work(self, start: int, stop: int) -> int:
        """Counts attended pairs of the query range [start, stop) of a document in all layers; exact."""
        return sum(count * mask.pairs(start, stop) for mask, count in self.layers)

    def work_of(self, starts: IntArray, stops: IntArray, document_tokens: IntArray) -> IntArray:
        """Counts `work` for arrays; below 2 ** 63. Lengths of documents do not matter."""
        work = [count * mask.pairs_of(starts, stops) for mask, count in self.layers]
        return np.sum(work, axis=0, dtype=np.int64)

    def of_documents(self, document_tokens: Sequence[int]) -> Work:
        """Returns a function (document, start, stop) of `work`."""
        if self == CAUSAL:  # avoids a call of another function
            return lambda document, start, stop: (stop * (stop + 1) - start * (start + 1)) // 2
        return lambda document, start, stop: self.work(start, stop)


CAUSAL = Cost()


def imbalance(work: Sequence[float] | IntArray, speeds: Sequence[float] = ()) -> float:
    """Returns maximum over mean work of the ranks: 1.0 is perfect, and the value of an empty batch.

    Args:
        speeds: `[ranks]` relative speeds, 0 for a rank that computes nothing. The longest time is then divided by the
            time in which all ranks together do the work. Empty if all ranks are equally fast.
    """
    total = sum(int(value) for value in work)
    if not total:
        return 1.0
    if not len(speeds):
        return int(max(work)) * len(work) / total
    longest = max(int(value) / speed for value, speed in zip(work, speeds, strict=True) if value)
    return longest * sum(speeds) / total


@dataclass(frozen=True)
class Heads:
    """Heads of one layer's attention."""

    query: int
    key_value: int  # heads of keys and values; several query heads may share one
    dim: int  # numbers of one head of a query or key
    value_dim: int  # numbers of one head of a value or output
    groups: int  # groups into which plans divide the heads

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads the numbers by their names in Transformers' configurations. Raises KeyError if the configuration has
        no `num_attention_heads`, or neither `head_dim` nor `hidden_size`."""
        query = config["num_attention_heads"]
        if config.get("kv_lora_rank") is not None:  # multi-head latent attention: keys carry two parts
            dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        else:  # JetMoe writes kv_channels
            dim = config.get("head_dim") or config.get("kv_channels") or config["hidden_size"] // query
        return cls(
            query=query,
            key_value=config.get("num_key_value_heads") or query,
            dim=dim,
            value_dim=config.get("v_head_dim") or dim,
            groups=head_groups(config),
        )

    def groups_of_rank(self, tensor_ranks: int) -> int:
        """Returns the number of groups into which plans divide the heads of a tensor rank."""
        return self.groups if tensor_ranks == 1 else divide_heads(max(1, self.key_value // tensor_ranks))

    def token_bytes(self, number_bytes: int = 2) -> TokenBytes:
        """Returns bytes of a token in one layer. Plans depend only on their proportion."""
        return TokenBytes(
            query=self.query * self.dim * number_bytes,
            output=self.query * self.value_dim * number_bytes,
            key_value=self.key_value * (self.dim + self.value_dim) * number_bytes,
        )


def head_groups(config: Mapping[str, Any], ranks: int = 1) -> int:
    """Returns the number of groups into which plans divide heads; 1 if the configuration has no number of heads.

    A group is one KV head, or several of them, with the query heads that share them. Each of `ranks` tensor ranks that
    divide the heads of a layer has its own groups.
    """
    key_value = 0
    for name, value in config.items():  # some models have other numbers in some layers
        if name.endswith("key_value_heads") and isinstance(value, int):
            key_value = gcd(key_value, value)
    return divide_heads((key_value or config.get("num_attention_heads") or ranks) // ranks)


def divide_heads(key_value_heads: int) -> int:
    """Returns the largest divisor of the KV heads up to `ENOUGH_GROUPS`, or their number if that divisor is 1."""
    groups = max(divisor for divisor in range(1, ENOUGH_GROUPS + 1) if key_value_heads % divisor == 0)
    return groups if groups > 1 else key_value_heads


def heads_of_tiles(key_value_heads: int, most: int) -> list[int]:
    """Returns the number of KV heads of each tile, `most` or fewer, the larger tiles first; one tile of all heads if
    `most` is 0."""
    tiles = -(-key_value_heads // most) if most else 1
    return [key_value_heads // tiles + (tile < key_value_heads % tiles) for tile in range(tiles)]
