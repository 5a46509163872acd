"""Shared prefixes: documents that begin with the same tokens, such as the completions of one prompt. Layers compute a
prefix once.

    d0    | prompt | answer 0 |                d0 holds the prompt
    d1    | prompt | answer 1 |                d1 and d2 continue it: their queries attend to keys of d0
    d2    | prompt | answer 2 | more 2 |       d2 holds its answer
    d3    | prompt | answer 2 | more 3 |       d3 continues d2, and with it d0

Layers that carry a state go on from the state after the prefix (`planning.fragments`). Documents are a tree: each
of its tokens is a row of one document. Positions stay as they are: `answer 1` begins where the prompt ends.

Equal prefixes are found by hashes of first tokens: of as many as a shared prefix has at least, and of every
`BLOCK_TOKENS` more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

import numpy as np

from distca_hf.arrays import IntArray, offsets, ranges


# Prefixes are compared in steps of this many tokens, from the shortest one that is shared. So fewer than this many
# equal tokens are computed again.
BLOCK_TOKENS = 16
# Seed of the factors of hashes: the same on all ranks.
SEED = 45
# Share of the tokens of a batch that one rank must save: its rows do not move otherwise.
LEAST_SAVED = 0.1
# Most prefixes that a document continues, one after the other: each is attended to in a call by itself.
MOST_LEVELS = 8
# Sort keys are (document, position); positions have 31 bits.
POSITIONS = 2**31
# More tokens than any documents share.
NEVER = np.iinfo(np.int64).max


def never_shared(least_tokens: int, whole_documents: bool) -> str:
    """Returns why no documents of a model share a prefix; empty if some may.

    Args:
        least_tokens: shortest prefix that documents share, as the settings say.
        whole_documents: whether a state of the model's layers cannot travel.
    """
    if not least_tokens:
        return "shared_prefix_tokens is 0"
    return "layers carry a state from token to token that cannot travel" if whole_documents else ""


def num_hashes(document_tokens: IntArray, least_tokens: int) -> IntArray:
    """Returns the number of hashes of each document: of its first `least_tokens`, and of every `BLOCK_TOKENS` more,
    as long as fewer tokens than all are hashed."""
    return np.maximum((document_tokens - 1 - least_tokens) // BLOCK_TOKENS + 1, 0)


def hashes_of(tokens: IntArray, document_tokens: IntArray, least_tokens: int) -> IntArray:
    """Returns the hashes of documents, one document after the other; none of them is 0.

    Args:
        tokens: `[tokens of all documents]` a number for each token, made of everything that layers compute from.
    """
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
    """Where the rows of documents are held. All arrays are int64.

    Attributes:
        holder, start, stop: `[spans]` tokens [start, stop) of a document are rows of `holder`. Spans cover a document
            in order; the document itself holds the last one.
        document_spans: `[documents + 1]` document d has spans `document_spans[d]` to `document_spans[d + 1]`.
        order: `[documents]` documents in an order in which those with a common prefix follow each other.
    """

    holder: IntArray
    start: IntArray
    stop: IntArray
    document_spans: IntArray
    order: IntArray

    @classmethod
    def of_spans(cls, spans: Sequence[Sequence[Span]], order: Sequence[int] | IntArray) -> Self:
        """Makes shared prefixes from the spans of each document, and an order of documents."""
        flat = np.array([span for of_document in spans for span in of_document], dtype=np.int64).reshape(-1, 3)
        counts = np.array([len(of_document) for of_document in spans], dtype=np.int64)
        holder, start, stop = flat.T.copy()
        return cls(holder, start, stop, offsets(counts), np.asarray(order, dtype=np.int64))

    @classmethod
    def find(cls, document_tokens: IntArray, hashes: Sequence[IntArray], least_tokens: int) -> Self | None:
        """Finds prefixes that documents share.

        Args:
            document_tokens: `[documents]` lengths.
            hashes: of each document, of its first `least_tokens`, `least_tokens + BLOCK_TOKENS`, ... tokens, but never
                of all its tokens. Documents share a prefix if its hashes are equal and not 0.
            least_tokens: fewest tokens of a prefix, beyond a shorter one that more documents share.

        Returns:
            None if no prefix is shared.
        """
        counts = np.array([len(of_document) for of_document in hashes], dtype=np.int64)
        if np.count_nonzero(counts) < 2:
            return None
        # A row for each document with hashes; what only the longest one has is shared with none.
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
        """`[documents]` the document that holds the first token of each document: equal for documents of a tree."""
        return self.holder[self.document_spans[:-1]]

    @cached_property
    def _span_keys(self) -> IntArray:
        """Document and start of each span as one number."""
        document = np.repeat(np.arange(len(self.document_spans) - 1), np.diff(self.document_spans))
        return document * POSITIONS + self.start

    def holders(self, document: IntArray, position: IntArray) -> IntArray:
        """Finds the documents that hold the rows of some tokens; all arrays are int64 `[tokens]`."""
        return self.holder[np.searchsorted(self._span_keys, document * POSITIONS + position, side="right") - 1]

    def held(
        self, document: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Finds the documents that hold the rows of some ranges of tokens.

        Returns:
            Index of the range, document, start and stop of each part; leaves out empty ones.
        """
        counts = np.diff(self.document_spans)[document]
        index, span = np.repeat(np.arange(len(document)), counts), ranges(self.document_spans[document], counts)
        start, stop = np.maximum(start[index], self.start[span]), np.minimum(stop[index], self.stop[span])
        some = start < stop
        return index[some], self.holder[span][some], start[some], stop[some]


def _spans(order: list[int], shared: list[int], lengths: list[int], least_tokens: int) -> list[list[Span]]:
    """Returns the spans of each document.

    Args:
        order: documents in the order of their tokens.
        shared: tokens that each of them, in this order, shares with the one before it.
        lengths: tokens of each document.
        least_tokens: see `SharedPrefixes.find`.
    """
    spans: list[list[Span]] = [[] for _ in lengths]
    # Documents [first, stop) in order, tokens [0, begin) that all of them share, and the spans that hold these.
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
