"""Placement: which rank holds which tokens, so that all hold equal tokens *and* equal attention work. The accordion.

Documents are cut into pieces and sorted by mean cost per token into *the line*: short documents and beginnings of
documents at the light end, ends of long documents at the dense end. A rank takes a few dense pieces, tail first, and
fills up with light ones:

    light end                                                     dense end
    | d7 | d2 | d9 |     ...     | d5[0:60K] | d1[0:90K]  ·  d1[90K:120K] |
      ^^^^^^^^^                                               ^^^^^^^^^^^^
      fill up to the rank's tokens                            take up to the rank's work

Why it always works: read from the dense end, the first n tokens of the line weigh at least n times the mean, the last
n at most that. Exchanging one token at a time moves the work of (dense prefix + light suffix) across the goal in steps
of at most one token's context, so some mixture has exactly the rank's tokens and its work to within one token.
Removing a set of mean cost leaves a line with the same mean: repeat for the next rank. A tail needs the keys of its
whole document, the head that is left needs nothing, so tails are taken as large as they fit: at most three cuts per
rank, mostly one or two, and few bytes.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from distca_hf.cost import IntArray, causal_pairs
from distca_hf.layout import Layout, check_document_tokens


Segment = tuple[int, int, int]  # document, start, stop
Piece = tuple[int, int, int, int]  # start + stop (mean cost, twice), document, start, stop

# Cuts fall on multiples of this many tokens where they are free to: kernels work in tiles.
TILE_TOKENS = 128
# A rank's work may miss its goal by this share of the mean before more cuts are made.
NEAR = 1e-3
# If it, or what is left for each of the others, misses the mean by this share, the guaranteed mixture is used instead.
OFF = 5e-3
# The rest of a document cut at the light end stays there, for the next rank, up to this size.
LIGHT_REST_TOKENS = 8192


def place(document_tokens: Sequence[int] | IntArray, num_ranks: int) -> Layout:
    """Places documents on ranks: tokens equal to within one, work to within 0.5 % and one token's context.

    Args:
        document_tokens: length of each document of the global micro-batch, in tokens.
        num_ranks: ranks to place them on.

    Returns:
        A layout without padding, each rank's segments in the order its tasks are computed.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens).tolist()
    line = sorted((length, document, 0, length) for document, length in enumerate(lengths))
    total_tokens, work_left = sum(lengths), sum(causal_pairs(0, length) for length in lengths)
    mean_work = work_left / num_ranks
    placed: list[list[Segment]] = []
    for rank in range(num_ranks):
        tokens = total_tokens * (rank + 1) // num_ranks - total_tokens * rank // num_ranks
        if rank == num_ranks - 1:
            segments, line = [piece[1:] for piece in line], []
        else:
            goal = work_left / (num_ranks - rank)
            segments, rest = _fill(line, tokens, goal, mean_work)
            goal_of_others = (work_left - _work(segments)) / (num_ranks - rank - 1)
            if max(abs(_work(segments) - mean_work), abs(goal_of_others - mean_work)) > OFF * mean_work:
                segments, rest = _fill_exactly(line, tokens, goal)
            line = rest
        work_left -= _work(segments)
        placed.append(_in_task_order(segments))
    return Layout.from_segments(lengths, placed)


def fill_in_order(document_tokens: Sequence[int] | IntArray, num_ranks: int) -> Layout:
    """Plain packing: documents one after the other, ranks of equal tokens. What placement is compared with.

    Raises:
        PackingError: a length is not between 1 and 2 ** 31 - 1.
    """
    lengths = check_document_tokens(document_tokens)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    borders = np.array([total * (rank + 1) // num_ranks for rank in range(num_ranks)], dtype=np.int64)
    stops = np.union1d(ends, borders[borders > 0])
    starts = np.concatenate([[0], stops])[: len(stops)]
    document = np.searchsorted(ends, starts, side="right")
    first = (ends - lengths)[document]
    return Layout(
        document_tokens=lengths,
        segment_document=document,
        segment_start=starts - first,
        segment_stop=stops - first,
        rank_segments=np.concatenate([[0], np.searchsorted(stops, borders, side="right")]),
        rank_rows=np.diff(borders, prepend=0),
    )


def _fill(line: list[Piece], tokens: int, goal: float, mean_work: float) -> tuple[list[Segment], list[Piece]]:
    """Segments for one rank of `tokens` tokens and about `goal` work, and the line that is left."""
    line, used = list(line), 0
    segments: list[Segment] = []
    while tokens and line:
        light = _LightEnd(line, tokens)
        missing = goal - used - light.work(tokens)
        if segments and missing <= NEAR * mean_work:
            break
        fitting = _densest_fitting(line, tokens, goal - used, light)
        densest = fitting == len(line) - 1
        if fitting >= 0 and (segments or densest) and _gain(line[fitting], tokens, light) > NEAR / 4 * mean_work:
            take = line[fitting][3] - line[fitting][2]
            index, last_cut = fitting, False
        elif not segments:  # even the densest piece alone is too much: peel its tail
            index, last_cut = len(line) - 1, False
            take = _tail(line[index], tokens, goal - used, light)
        else:  # finish with the tail of the lightest piece that is dense enough
            index, last_cut = _dense_enough(line, fitting + 1, tokens, goal - used, light), True
            take = _tail(line[index], tokens, goal - used, light) if index < len(line) else 0
        if take == 0:
            break
        segments.append(_take_tail(line, index, take))
        used += causal_pairs(segments[-1][1], segments[-1][2])
        tokens -= take
        if last_cut:
            break
    segments.extend(_take_light(line, tokens))
    return segments, line


def _fill_exactly(line: list[Piece], tokens: int, goal: float) -> tuple[list[Segment], list[Piece]]:
    """The guaranteed mixture: a prefix of the line's dense end and a suffix of its light end."""
    line, used = _sorted_by_cost(line), 0
    segments: list[Segment] = []
    light = _LightEnd(line, tokens)
    while line and tokens:
        _, _, start, stop = line[-1]
        most = min(tokens, stop - start)
        take = _largest_tail(line[-1], tokens, goal - used, light)
        if take == 0:
            break
        segments.append(_take_tail(line, len(line) - 1, take, keep_order=False))
        used += causal_pairs(stop - take, stop)
        tokens -= take
        if take < most:
            break
    segments.extend(_take_light(line, tokens))
    return segments, _sorted_by_cost(line)


class _LightEnd:
    """Work of the lightest tokens of a line."""

    def __init__(self, line: list[Piece], most_tokens: int) -> None:
        enough = 0
        tokens = 0
        while enough < len(line) and tokens <= most_tokens:
            tokens += line[enough][3] - line[enough][2]
            enough += 1
        self._pieces = line[:enough]
        self._tokens = list(accumulate((stop - start for _, _, start, stop in self._pieces), initial=0))
        self._work = list(accumulate((causal_pairs(start, stop) for _, _, start, stop in self._pieces), initial=0))

    def work(self, tokens: int) -> int:
        """Attended pairs of the `tokens` lightest tokens, documents head first."""
        whole = bisect_right(self._tokens, tokens) - 1
        if whole >= len(self._pieces):
            return self._work[-1]
        start = self._pieces[whole][2]
        return self._work[whole] + causal_pairs(start, start + tokens - self._tokens[whole])


def _densest_fitting(line: list[Piece], tokens: int, missing_work: float, light: _LightEnd) -> int:
    """Index of the densest piece that fits whole, the lightest tokens beside it; -1 if there is none."""

    def fits(count: int) -> bool:
        _, _, start, stop = line[count - 1]
        return stop - start <= tokens and causal_pairs(start, stop) + light.work(tokens - stop + start) <= missing_work

    return _largest(len(line), fits) - 1


def _gain(piece: Piece, tokens: int, light: _LightEnd) -> int:
    """Work the rank gains by the piece, over the lightest tokens in its place."""
    _, _, start, stop = piece
    return causal_pairs(start, stop) + light.work(tokens - stop + start) - light.work(tokens)


def _tail(piece: Piece, tokens: int, missing_work: float, light: _LightEnd) -> int:
    """Tokens of the largest tail of the piece that fits, cut on a tile where that leaves a tail of some size."""
    _, _, start, stop = piece
    take = _largest_tail(piece, tokens, missing_work, light)
    if 2 * TILE_TOKENS < take < min(tokens, stop - start):
        take = stop - -(-(stop - take) // TILE_TOKENS) * TILE_TOKENS
    return take


def _largest_tail(piece: Piece, tokens: int, missing_work: float, light: _LightEnd) -> int:
    """Tokens of the largest tail that, with the lightest tokens beside it, stays within the rank's tokens and work."""
    _, _, start, stop = piece
    most = min(tokens, stop - start)
    return _largest(most, lambda n: causal_pairs(stop - n, stop) + light.work(tokens - n) <= missing_work)


def _dense_enough(line: list[Piece], first: int, tokens: int, missing_work: float, light: _LightEnd) -> int:
    """Index of the lightest piece whose tail alone can bring the missing work; `len(line)` if there is none."""
    for index in range(first, len(line)):
        _, _, start, stop = line[index]
        most = min(tokens, stop - start)
        if causal_pairs(stop - most, stop) + light.work(tokens - most) >= missing_work:
            return index
    return len(line)


def _take_tail(line: list[Piece], index: int, tokens: int, keep_order: bool = True) -> Segment:
    """Cuts `tokens` off the end of a piece; what is left goes back into the line."""
    key, document, start, stop = line.pop(index)
    cut = stop - tokens
    if cut > start:
        if keep_order:
            insort(line, (start + cut, document, start, cut))
        else:
            line.insert(index, (key, document, start, cut))
    return document, cut, stop


def _take_light(line: list[Piece], tokens: int) -> list[Segment]:
    """Takes `tokens` tokens off the light end, head first; the last document may be cut."""
    segments: list[Segment] = []
    whole = 0
    while tokens and whole < len(line):
        key, document, start, stop = line[whole]
        take = min(tokens, stop - start)
        segments.append((document, start, start + take))
        tokens -= take
        whole += 1
    line[:whole] = []
    if segments and (cut := segments[-1][2]) < stop:
        if stop - cut <= LIGHT_REST_TOKENS:
            line.insert(0, (key, document, cut, stop))
        else:
            insort(line, (cut + stop, document, cut, stop))
    return segments


def _sorted_by_cost(line: list[Piece]) -> list[Piece]:
    """The line in strict order, rests of cut documents included."""
    return sorted((start + stop, document, start, stop) for _, document, start, stop in line)


def _in_task_order(segments: list[Segment]) -> list[Segment]:
    """Segments that begin their document first, then by document: the order in which their tasks are computed.

    Neighbours are joined: the tail of a document and what the light end then gave of it to the same rank.
    """
    joined: list[Segment] = []
    for document, start, stop in sorted(segments):
        if joined and joined[-1][0] == document and joined[-1][2] == start:
            joined[-1] = (document, joined[-1][1], stop)
        else:
            joined.append((document, start, stop))
    return sorted(joined, key=lambda segment: (segment[1] > 0, segment[0], segment[1]))


def _work(segments: list[Segment]) -> int:
    return sum(causal_pairs(start, stop) for _, start, stop in segments)


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Largest n in [0, upper] for which `fits(n)`; `fits` is true up to some n and false beyond, `fits(0)` counts as
    true."""
    return bisect_left(range(1, upper + 1), True, key=lambda n: not fits(n))
