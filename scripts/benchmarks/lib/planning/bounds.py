"""A lower bound of the keys and values that layouts as balanced as a given one have to move, however they are placed.

Keys are counted for one document at a time. Let b1 = length >= b2 >= b3 ... be the last positions that ranks hold of
it. A rank that holds position b - 1 needs the keys of all b tokens before, of which it has its own. So the ranks
together receive at least b2 + b3 + ... tokens. All tokens after b(j+1) are on j ranks. These hold no more than j
ranks' tokens and compute no more than j ranks' work. The other tokens that they hold have at least the work of the
lightest tokens of the batch:

    work(b .. length) + lightest(j x fewest_tokens - (length - b))  <=  j x most_work
    length - b                                                      <=  j x most_tokens

The smallest b that satisfies both bounds b(j+1) from below. It is valid for all layouts whose ranks compute the
queries they hold, in any number of segments. Layouts that divide heads (stripes) may need less.
"""

from collections.abc import Sequence

import numpy as np

from distca_hf.arrays import IntArray
from distca_hf.cost import TokenBytes, causal_pairs_of
from distca_hf.layout import Layout, check_document_tokens


# Number of parts of the range in each step of the search for the smallest position; two steps find 1/65,536 of it.
PARTS = 256


def key_value_bytes_bound(layout: Layout, token_bytes: TokenBytes | None = None) -> int:
    """Returns the fewest forward bytes of one layer of any layout of the same documents whose ranks have at most the
    largest work of this one, and tokens in its range."""
    token_bytes = token_bytes or TokenBytes()
    return token_bytes.key_value * key_tokens_bound(
        layout.document_tokens,
        layout.num_ranks,
        most_work=int(layout.rank_work.max()),
        fewest_tokens=int(layout.rank_tokens.min()),
        most_tokens=int(layout.rank_tokens.max()),
    )


def key_tokens_bound(
    document_tokens: Sequence[int] | IntArray, num_ranks: int, most_work: int, fewest_tokens: int, most_tokens: int
) -> int:
    """Returns the tokens whose keys and values have to move, of all ranks together, if a rank has at most so many
    attended pairs and its tokens are in this range."""
    lengths = check_document_tokens(document_tokens)
    light = _LightestTokens(lengths)
    moved = 0
    for length, documents in zip(*np.unique(lengths, return_counts=True), strict=True):
        for ranks in range(1, num_ranks):
            tail = _longest_tail(int(length), light, ranks * most_work, ranks * fewest_tokens, ranks * most_tokens)
            if tail >= length:
                break
            moved += int(documents) * (int(length) - tail)
    return moved


class _LightestTokens:
    """Work of the lightest tokens of a batch: the tokens at position 0 of all documents, then at 1, and so on."""

    def __init__(self, lengths: IntArray) -> None:
        lengths = np.sort(lengths)
        self._reach = np.concatenate([[0], np.unique(lengths)])  # positions at which documents end
        self._documents = len(lengths) - np.searchsorted(lengths, self._reach, side="right")  # how many are longer
        steps = np.diff(self._reach)
        self._tokens = np.concatenate([[0], np.cumsum(steps * self._documents[:-1])])
        self._work = np.concatenate(
            [[0], np.cumsum(causal_pairs_of(self._reach[:-1], self._reach[1:]) * self._documents[:-1])]
        )

    def work(self, tokens: IntArray) -> IntArray:
        """Returns the attended pairs of a number of lightest tokens; of all tokens if there are fewer."""
        tokens = np.clip(tokens, 0, self._tokens[-1])
        at = np.minimum(np.searchsorted(self._tokens, tokens, side="right") - 1, len(self._tokens) - 2)
        if at.size and len(self._reach) == 1:
            return np.zeros_like(tokens)
        # Positions before `position` are full in all longer documents; `more` tokens are at that position.
        full, more = np.divmod(tokens - self._tokens[at], np.maximum(1, self._documents[at]))
        position = self._reach[at] + full
        pairs = causal_pairs_of(self._reach[at], position) * self._documents[at]
        return self._work[at] + pairs + more * (position + 1)


def _longest_tail(length: int, light: _LightestTokens, most_work: int, fewest_tokens: int, most_tokens: int) -> int:
    """Returns the most tokens at the end of a document that may fit some ranks together with these limits, or a few
    more."""

    def may_fit(fewest: IntArray, most: IntArray) -> np.ndarray:
        """Checks whether a tail of `fewest` to `most` tokens may fit: work of the fewest, and room for the most."""
        tail_work = causal_pairs_of(length - fewest, np.full_like(fewest, length))
        return (fewest <= most_tokens) & (tail_work + light.work(fewest_tokens - most) <= most_work)

    low, high = 0, length
    if may_fit(np.array([high]), np.array([high])).all():
        return length
    while high - low > 1:
        borders = np.unique(np.linspace(low, high, PARTS + 1).astype(np.int64))
        fitting = np.flatnonzero(may_fit(borders[:-1], borders[1:]))
        if len(fitting) == 0:
            return low
        finer = int(borders[fitting[-1]]), int(borders[fitting[-1] + 1])
        if finer == (low, high):
            break
        low, high = finer
    return high
