"""Filled: sequential fill, the layout that published systems start from.

Ranks are filled one after the other with equal tokens. A document that crosses the border of two ranks is laid out
head and tail (DistCA, planner/planner.py `batch_to_items_general`): every rank it touches takes tokens from its
beginning and as many from its end, so that all of them have the document's mean cost per token.

    document 0 .......................................... L
             |  a  |   b   | c | c |   b   |  a  |           ranks a, b, c
"""

from collections.abc import Iterator

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.layout import Layout, check_document_tokens


def fill_head_and_tail(document_tokens: IntArray, num_ranks: int) -> Layout:
    """Sequential fill; tokens are equal to within one, documents that span ranks are laid out head and tail.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens).tolist()
    total_tokens = sum(lengths)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    rank, filled = 0, 0
    for document, tokens in enumerate(lengths):
        head, tail = 0, tokens
        while head < tail:
            while (room := total_tokens * (rank + 1) // num_ranks - filled) == 0:
                rank += 1
            take = min(tail - head, room)
            if take == tokens:
                segments[rank].append((document, 0, tokens))
            else:
                segments[rank].extend(_head_and_tail(document, head, tail, take))
            head, tail = head + take // 2, tail - (take - take // 2)
            filled += take
    return Layout.from_segments(lengths, segments)


def fill_groups(document_tokens: IntArray, num_groups: int) -> list[IntArray]:
    """Lengths of each group's documents: sequential fill with equal tokens.

    Attention of such a group knows nothing of the others: a document cut at the border of two groups goes on as a new
    one. That is less work than the documents ask for, in favour of whoever groups.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens)
    ends = np.cumsum(lengths)
    total_tokens = int(ends[-1]) if len(ends) else 0
    borders = np.array([total_tokens * group // num_groups for group in range(num_groups + 1)], dtype=np.int64)
    cuts = np.union1d(borders, ends)
    pieces = np.diff(cuts)
    first = np.searchsorted(cuts, borders)
    return [pieces[first[group] : first[group + 1]] for group in range(num_groups)]


def groups_of_ranks(document_tokens: IntArray, num_ranks: int, group_ranks: int) -> Iterator[tuple[slice, IntArray]]:
    """Ranks of each group of neighbours, and the lengths of its documents. The last group may have fewer ranks.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    first_ranks = range(0, num_ranks, group_ranks)
    for first, documents in zip(first_ranks, fill_groups(document_tokens, len(first_ranks)), strict=True):
        yield slice(first, min(first + group_ranks, num_ranks)), documents


def _head_and_tail(document: int, head: int, tail: int, take: int) -> list[tuple[int, int, int]]:
    """Segments of the outer `take` tokens of [head, tail), half of them from either end; one segment if that is all
    there is."""
    if take == tail - head:
        return [(document, head, tail)]
    from_head = take // 2
    ranges = [(document, head, head + from_head), (document, tail - (take - from_head), tail)]
    return [segment for segment in ranges if segment[1] < segment[2]]
