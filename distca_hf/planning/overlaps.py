"""Overlaps: which calls add to the gradients of stored keys that a larger call writes.

Most stored keys are read by one call, which writes their gradients where they are sent from. Where a rank holds two
pieces of a document, a second call reads the beginning of the same keys.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


Span = tuple[int, int]


def adding_calls(spans: Sequence[Span]) -> frozenset[int] | None:
    """Calls that read what a larger one reads, too; all others read keys of their own.

    Args:
        spans: [start, stop) rows of each call, none of them empty.

    Returns:
        Indices of calls, or None if that cannot be: more than two calls read a row, or one reads more than the other.
    """
    writing: list[Span] = []
    adding: list[Span] = []
    indices = set[int]()
    for index in sorted(range(len(spans)), key=lambda index: spans[index][0] - spans[index][1]):
        span = spans[index]
        written = _overlapping(writing, span)
        if written is None:
            insort(writing, span)
        elif written[0] <= span[0] and span[1] <= written[1] and _overlapping(adding, span) is None:
            insort(adding, span)
            indices.add(index)
        else:
            return None
    return frozenset(indices)


def _overlapping(apart: Sequence[Span], span: Span) -> Span | None:
    """The last of some ascending spans without common rows that has rows of `span`."""
    before = bisect_left(apart, (span[1],)) - 1
    return apart[before] if before >= 0 and apart[before][1] > span[0] else None
