"""Shared prefixes: documents that begin with the same tokens, such as the completions of a prompt. Layers compute
these tokens once.

    d0    | prompt | answer 0 |                d0 holds the prompt
    d1    | prompt | answer 1 |                d1 and d2 continue it: their queries attend to keys of d0
    d2    | prompt | answer 2 | more 2 |       d2 holds its answer
    d3    | prompt | answer 2 | more 3 |       d3 continues d2, and so d0, too

Documents are a tree: one document holds the row of each token. Positions do not change: `answer 1` begins after the
prompt. Layers that carry a state continue from the state after the prefix (`planning.fragments`).

Equal prefixes are found by hashes: of the first tokens of a document, as many as the shortest shared prefix has, and
of every `BLOCK_TOKENS` more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, offsets, ranges


# Prefixes are compared in steps of this many tokens. So fewer equal tokens than this are computed again.
BLOCK_TOKENS = 16
# Seed of the factors of hashes: the same on all ranks.
SEED = 45
# Least share of a batch's tokens to save on one rank. Sharing moves rows there, which would stay otherwise.
LEAST_SAVED = 0.1
# Most prefixes that a document continues, one after the other: each takes a call of attention.
MOST_LEVELS = 8
# Sort keys are (document, position); positions have 31 bits.
POSITIONS = 2**31
# More tokens than any documents share.
NEVER = np.iinfo(np.int64).max


def never_shared(least_tokens: int, whole_documents: bool) -> str:
    """Returns why documents never share a prefix in this model; empty if they may.

    Args:
        least_tokens: shortest prefix to share, the setting `shared_prefix_tokens`.
        whole_documents: whether layers carry a state that cannot travel.
    """
    if not least_tokens:
        return "shared_prefix_tokens is 0"
    return "layers carry a state from token to token that cannot travel" if whole_documents else ""


def num_hashes(document_tokens: IntArray, least_tokens: int) -> IntArray:
    """Returns the number of hashes of each document: of its first `least_tokens`, and of every `BLOCK_TOKENS` more.
    None is of the whole document."""
    return np.maximum((document_tokens - 1 - least_tokens) // BLOCK_TOKENS + 1, 0)


def hashes_of(tokens: IntArray, document_tokens: IntArray, least_tokens: int) -> IntArray:
    """Returns the hashes of all documents, one document after the other. No hash is 0. `tokens` has a number for each
    token of all documents, made of everything that layers compute from."""
    # Sums of tokens x random factors, modulo 2 ** 64. Different tokens have equal sums with a chance of 2 ** -64, or
    # 2 ** (n - 64) if all differences are multiples of 2 ** n.
    counts, first = num_hashes(document_tokens, least_tokens), offsets(document_tokens)
    factors = random_factors(int(document_tokens.max(initial=1)))
    of_tokens = [factors[:length] for length in document_tokens.tolist()]  # quicker than an index
    sums = offsets(tokens * np.concatenate([*of_tokens, factors[:0]]))
    document = np.repeat(np.arange(len(counts)), counts)
    hashed = least_tokens + BLOCK_TOKENS * ranges(0, counts)
    hashes = sums[first[document] + hashed] - sums[first[document]]
    return np.where(hashes == 0, 1, hashes)


def random_factors(count: int, seed: int = SEED) -> IntArray:
    """Returns `[count]` random factors, the same on all ranks."""
    return _drawn(max(0, count - 1).bit_length(), seed)[:count]


@lru_cache(maxsize=32)
def _drawn(bits: int, seed: int) -> IntArray:
    return np.random.PCG64(seed).random_raw(2**bits).view(np.int64)


Span = tuple[int, int, int]  # document that holds the rows, start, stop


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Which documents hold the rows of others. All arrays are int64."""

    # `[spans]` tokens [start, stop) of a document are rows of `holder`. Spans cover a document in order, and it holds
    # the last one itself.
    holder: IntArray
    start: IntArray
    stop: IntArray
    document_spans: IntArray  # `[documents + 1]` document d has spans `document_spans[d]` to `document_spans[d + 1]`
    order: IntArray  # `[documents]` all documents; documents with a common prefix follow each other

    @classmethod
    def of_spans(cls, spans: Sequence[Sequence[Span]], order: Sequence[int] | IntArray) -> Self:
        """Makes shared prefixes of the spans of each document, and of an order."""
        flat = np.array([span for of_document in spans for span in of_document], dtype=np.int64).reshape(-1, 3)
        counts = np.array([len(of_document) for of_document in spans], dtype=np.int64)
        holder, start, stop = flat.T.copy()
        return cls(holder, start, stop, offsets(counts), np.asarray(order, dtype=np.int64))

    @classmethod
    def find(cls, document_tokens: IntArray, hashes: Sequence[IntArray], least_tokens: int) -> Self | None:
        """Finds prefixes that documents share. Returns None if no prefix is shared.

        Args:
            document_tokens: `[documents]` lengths.
            hashes: of each document (`num_hashes`), or none. Documents share a prefix if its hashes are equal and not
                0.
            least_tokens: shortest prefix. A longer one that fewer documents share has at least as many more tokens.
        """
        counts = np.array([len(of_document) for of_document in hashes], dtype=np.int64)
        if np.count_nonzero(counts) < 2:
            return None
        # A row for each document with hashes. No document shares hashes that only the longest one has.
        hashed, columns = np.flatnonzero(counts), int(np.partition(counts, -2)[-2])
        known = np.minimum(counts[hashed], columns)
        table = np.zeros((len(hashed), columns), dtype=np.int64)
        for row, document in enumerate(hashed.tolist()):
            table[row, : known[row]] = hashes[document][: known[row]]
        order = np.argsort(table.view(f"V{columns * table.itemsize}").ravel(), kind="stable")
        equal = (table[order[1:]] == table[order[:-1]]) & (table[order[1:]] != 0)
        blocks = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        tokens = np.where(blocks > 0, least_tokens + (blocks - 1) * BLOCK_TOKENS, 0)
        if not tokens.any():
            return None
        others = np.flatnonzero(counts == 0)
        order, shared = np.append(others, hashed[order]), [0] * (len(others) + 1) + tokens.tolist()
        return cls.of_spans(_spans(order.tolist(), shared, document_tokens.tolist(), least_tokens), order)

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """All arrays except the order, which layouts follow."""
        return self.holder, self.start, self.stop, self.document_spans

    @cached_property
    def first_own(self) -> IntArray:
        """`[documents]` first token that each document holds: the length of its shared prefix."""
        return self.start[self.document_spans[1:] - 1]

    @cached_property
    def root(self) -> IntArray:
        """`[documents]` the document that holds the first token of each one; documents of a tree have the same."""
        return self.holder[self.document_spans[:-1]]

    @cached_property
    def _span_keys(self) -> IntArray:
        """Document and start of each span as one number."""
        document = np.repeat(np.arange(len(self.document_spans) - 1), np.diff(self.document_spans))
        return document * POSITIONS + self.start

    def holders(self, document: IntArray, position: IntArray) -> IntArray:
        """Returns the documents that hold the rows of some tokens. All arrays are int64 `[tokens]`."""
        return self.holder[np.searchsorted(self._span_keys, document * POSITIONS + position, side="right") - 1]

    def held(
        self, document: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Divides ranges of tokens into parts that one document holds. Returns the index of the range, document, start
        and stop of each part that is not empty."""
        counts = np.diff(self.document_spans)[document]
        index, span = np.repeat(np.arange(len(document)), counts), ranges(self.document_spans[document], counts)
        start, stop = np.maximum(start[index], self.start[span]), np.minimum(stop[index], self.stop[span])
        some = start < stop
        return index[some], self.holder[span][some], start[some], stop[some]


def _spans(order: list[int], shared: list[int], lengths: list[int], least_tokens: int) -> list[list[Span]]:
    """Returns the spans of each document.

    Args:
        order: documents, sorted by their hashes.
        shared: tokens that each of them, in this order, shares with the one before.
        least_tokens: see `SharedPrefixes.find`.
    """
    spans: list[list[Span]] = [[] for _ in lengths]
    # Documents [first, stop) of the order share tokens [0, begin), which these spans hold.
    todo: list[tuple[int, int, int, list[Span]]] = [(0, len(order), 0, [])]
    while todo:
        first, stop, begin, before = todo.pop()
        least = begin + least_tokens if len(before) < MOST_LEVELS else NEVER
        borders = [at for at in range(first + 1, stop) if shared[at] < least]
        for part, end in pairwise([first, *borders, stop]):
            document = order[part]
            spans[document] = [*before, (document, begin, lengths[document])]
            # The first document of a part holds what each of the others shares with it.
            while end > part + 1:
                common = min(shared[part + 1 : end])
                closer = next(at for at in range(part + 1, end) if shared[at] < common + least_tokens)
                todo.append((closer, end, common, [*before, (document, begin, common)]))
                end = closer
    return spans
