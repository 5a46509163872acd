"""Fragments: the parts of cut documents, and the rows of one rank as layers with a state see them.

A state runs through a document from its first token to its last one. `planning.folds` says what ranks exchange to give
each fragment the state before it.

    document         | f0 | f1     | f2  | f3 |      in document order, on ranks in any order
    rows of a rank   | f2 | d1 | d5 | f0 | d2 |      d: whole documents
    groups           whole: d1 d5 d2    followed: f2 f0    last: none

    first            sends a summary, needs no state     followed
    middle           sends a summary, needs a state      followed
    last             sends no summary, needs a state
    halo of f2       the tokens just before it, on any rank: a convolution sees them

If documents share a prefix (`prefixes`), the document that holds it is cut after the prefix, and all of them follow
that fragment:

    d0    | prompt | answer 0 |                d0 is cut after the prompt: f0 | f1
    d1             | answer 1 |                follows f0, too
    d2             | answer 2 | more 2 |       follows f0, too

Every rank derives all this from the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from distca_hf.arrays import BoolArray, IndexRanges, IntArray, offsets, ranges, run_starts
from distca_hf.layout import Layout
from distca_hf.planning.folds import CutFragments, Route, route_of
from distca_hf.prefixes import POSITIONS


# Whole documents and padding; fragments that others follow; fragments that none follows.
GroupName = Literal["whole", "followed", "last"]
GROUPS: tuple[GroupName, ...] = ("whole", "followed", "last")


@dataclass(frozen=True, eq=False)
class Halo:
    """How a convolution over W tokens sees the tokens before each segment of this rank.

    The first W - 1 tokens of a segment are convolved again, in a window of 2 (W - 1) tokens: W - 1 before the segment,
    then its own. Windows begin with zeros if the document begins there, and end with zeros if the segment is short.

    Attributes:
        tokens: W - 1.
        route: route of rows.
        taken: int64, this rank's rows in windows.
        windows: int64 `[segments * 2 (W - 1)]` places in `[rows taken | rows received | one row of zeros]`.
        kept: int64 `[tokens]` places of tokens that exist, among `[segments * (W - 1)]`.
        rows: int64 `[tokens]` this rank's rows of these tokens.
    """

    tokens: int
    route: Route
    taken: IntArray
    windows: IntArray
    kept: IntArray
    rows: IntArray


class Run(NamedTuple):
    """Adjacent rows of this rank in the same group."""

    tokens: int
    group: GroupName


@dataclass(frozen=True, eq=False)
class Fragments:
    """The rows of one rank as layers with a state see them.

    Attributes:
        rank: this rank of the micro-batch.
        is_cut: whether the micro-batch has any fragments; the same on all ranks.
        runs: all rows, in their order.
        groups: int64 `[parts]` tokens of each group's documents or fragments, in row order; padding counts as a
            document.
        middle_numbers: numbers of middle fragments among the followed ones.
        cut: fragments of all ranks. Each rank makes summaries of its followed fragments, in row order. It needs states
            before its middle fragments, then before its last ones, both in row order.
        halo: halo of convolutions.
    """

    rank: int
    is_cut: bool
    runs: tuple[Run, ...]
    groups: dict[GroupName, IntArray]
    middle_numbers: list[int]
    cut: CutFragments
    halo: Halo

    @cached_property
    def run_tokens(self) -> list[int]:
        """Tokens of each run."""
        return [run.tokens for run in self.runs]

    @classmethod
    def of(cls, layout: Layout, rank: int, halo_tokens: int) -> "Fragments":
        """Returns the fragments of a layout on one rank.

        Args:
            halo_tokens: tokens before a segment that the widest convolution sees.
        """
        layout = _cut_where_others_continue(layout)
        document, start, find = layout.segment_document, layout.segment_start, _finder(layout)
        before, later = np.full(len(start), -1), np.flatnonzero(start)
        before[later] = find(document[later], start[later] - 1)
        follows, is_followed = before >= 0, np.zeros(len(start), dtype=bool)
        is_followed[before[later]] = True
        tree = document if layout.shared is None else layout.shared.root[document]
        fragments = np.lexsort((document, start, tree))
        fragments = fragments[(follows | is_followed)[fragments]]
        number = np.full(len(start) + 1, -1)  # the last entry stands for no fragment
        number[fragments] = np.arange(len(fragments))
        runs, groups, middle = _groups(layout, rank, follows, is_followed)
        cut = CutFragments(
            np.cumsum(run_starts(tree[fragments])) - 1,
            layout.segment_rank[fragments],
            number[before[fragments]],
            _numbers(layout, is_followed)[fragments],
            _numbers(layout, follows & is_followed, follows & ~is_followed)[fragments],
            layout.num_ranks,
        )
        return cls(rank, bool(len(fragments)), runs, groups, middle, cut, _halo(layout, rank, find, halo_tokens))


def _cut_where_others_continue(layout: Layout) -> Layout:
    """Returns the layout with segments that end where other documents continue theirs."""
    if (shared := layout.shared) is None:
        return layout
    last_shared = shared.document_spans[1:][np.diff(shared.document_spans) > 1] - 2  # the span before a document's own
    borders = np.unique(shared.holder[last_shared] * POSITIONS + shared.stop[last_shared])
    keys, tokens = layout.segment_document * POSITIONS + layout.segment_start, layout.segment_tokens
    parts = IndexRanges.of(keys, tokens).cut_at(borders)
    document, start = np.divmod(parts.starts, POSITIONS)
    rank_segments = np.searchsorted(offsets(parts.lengths), offsets(tokens)[layout.rank_segments])
    return replace(
        layout,
        segment_document=document,
        segment_start=start,
        segment_stop=start + parts.lengths,
        rank_segments=rank_segments,
    )


def _finder(layout: Layout) -> Callable[[IntArray, IntArray], IntArray]:
    """Returns a function that finds the segments which hold tokens, given their documents and positions."""
    order = np.lexsort((layout.segment_start, layout.segment_document))
    keys = layout.segment_document[order] * POSITIONS + layout.segment_start[order]
    shared = layout.shared

    def find(document: IntArray, position: IntArray) -> IntArray:
        if shared is not None:
            document = shared.holders(document, position)
        return order[np.searchsorted(keys, document * POSITIONS + position, side="right") - 1]

    return find


def _numbers(layout: Layout, *chosen: BoolArray) -> IntArray:
    """Returns `[segments]` numbers of the chosen segments on their ranks, in row order; -1 for others.

    Args:
        chosen: disjoint choices. On a rank, the first choice is numbered first.
    """
    segments = np.concatenate([np.flatnonzero(one) for one in chosen])
    choice = np.repeat(np.arange(len(chosen)), [int(one.sum()) for one in chosen])
    rank = layout.segment_rank[segments]
    order = np.lexsort((segments, choice, rank))
    first = np.searchsorted(rank[order], rank[order])
    numbers = np.full(len(layout.segment_rank), -1)
    numbers[segments[order]] = np.arange(len(order)) - first
    return numbers


def _groups(
    layout: Layout, rank: int, follows: BoolArray, is_followed: BoolArray
) -> tuple[tuple[Run, ...], dict[GroupName, IntArray], list[int]]:
    """Returns `Fragments.runs`, `groups` and `middle_numbers` of a rank."""
    held = layout.segments_of(rank)
    tokens, later = layout.segment_tokens[held], follows[held]
    whole, followed, last = map(GROUPS.index, GROUPS)
    group = np.select([is_followed[held], later], [followed, last], whole)
    padding = int(layout.rank_rows[rank] - layout.rank_tokens[rank])
    if padding:
        tokens, group = np.append(tokens, padding), np.append(group, whole)
    opens = np.flatnonzero(run_starts(group))
    names = [GROUPS[number] for number in group[opens]]
    runs = tuple(map(Run, np.add.reduceat(tokens, opens).tolist() if names else [], names))
    groups = {name: tokens[group == number] for number, name in enumerate(GROUPS)}
    return runs, groups, np.flatnonzero(later[is_followed[held]]).tolist()


def _halo(layout: Layout, rank: int, find: Callable[[IntArray, IntArray], IntArray], halo_tokens: int) -> Halo:
    """Returns the halo of a rank's segments."""
    start, document = layout.segment_start, layout.segment_document
    # Up to halo_tokens before each segment of all ranks, as far as its document goes back.
    segment = np.repeat(np.arange(len(start)), np.minimum(start, halo_tokens))
    position = ranges(np.maximum(start - halo_tokens, 0), np.minimum(start, halo_tokens))
    held_by = find(document[segment], position)
    row = layout.segment_row[held_by] + position - start[held_by]
    source, destination = layout.segment_rank[held_by], layout.segment_rank[segment]
    travels = source != destination
    route = route_of(source[travels], row[travels], destination[travels], rank, layout.num_ranks)

    # Windows of this rank's segments and padding: halo_tokens before, then as many from the segment.
    held, num_rows = layout.segments_of(rank), int(layout.rank_rows[rank])
    first, tokens = layout.segment_row[held], layout.segment_tokens[held]
    padding = num_rows - int(layout.rank_tokens[rank])
    if padding:
        first, tokens = np.append(first, num_rows - padding), np.append(tokens, padding)
    own = np.minimum(tokens, halo_tokens)
    own_rows = ranges(first, own)
    own_places = ranges(np.arange(len(own)) * 2 * halo_tokens + halo_tokens, own)

    mine = destination == rank
    place = (segment[mine] - held.start) * 2 * halo_tokens + halo_tokens + (position - start[segment])[mine]
    stays = ~travels[mine]
    taken = np.concatenate([own_rows, row[mine][stays]])
    windows = np.full(len(own) * 2 * halo_tokens, len(taken) + int(route.received_counts.sum()))  # zeros
    windows[own_places] = np.arange(len(own_rows))
    windows[place[stays]] = len(own_rows) + np.arange(int(stays.sum()))
    by_source = np.argsort(source[mine][~stays], kind="stable")
    windows[place[~stays][by_source]] = len(taken) + np.arange(len(by_source))
    kept = ranges(np.arange(len(own)) * halo_tokens, own)
    return Halo(halo_tokens, route, taken, windows, kept, own_rows)
