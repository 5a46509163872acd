"""Fragments: the parts of cut documents, and the rows of one rank as layers with a state see them.

A state runs through a document from its first token to its last one. `planning.folds` says what ranks exchange to give
each fragment the state before it.

    document         | f0 | f1     | f2  | f3 |      in document order, on ranks in any order
    rows of a rank   | f2 | d1 | d5 | f0 | d2 |      d: whole documents
    groups           whole: d1 d5 d2    followed: f2 f0    last: none

    first            sends a summary, needs no state     followed
    middle           sends a summary, needs a state      followed
    last             sends no summary, needs a state
    halo of f2       the tokens just before it, wherever they are: a convolution sees them

All this follows from the layout, so every rank derives the same.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from distca_hf.arrays import BoolArray, IntArray, ranges, run_starts, run_stops
from distca_hf.layout import Layout
from distca_hf.planning.folds import CutFragments, Route, route_of


# Sort keys are (document, position); positions have 31 bits.
POSITIONS = 2**31
# Whole documents and padding; fragments with a later one in their document; last fragments of documents.
GroupName = Literal["whole", "followed", "last"]
GROUPS: tuple[GroupName, ...] = ("whole", "followed", "last")


@dataclass(frozen=True, eq=False)
class Halo:
    """How a convolution over W tokens sees the tokens before each segment of this rank.

    The first W - 1 tokens of a segment are convolved again, in a window of 2 (W - 1) tokens: W - 1 before the segment,
    then its own. Windows at the start of a document begin with zeros, and windows of short segments end with zeros.

    Attributes:
        tokens: W - 1.
        route: route of rows.
        taken: int64, this rank's rows in windows.
        windows: int64 `[segments * 2 (W - 1)]` places in `[rows taken | rows received | one row of zeros]`.
        kept: int64 `[tokens]` places of convolved tokens among `[segments * (W - 1)]`.
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
        cut_documents: cut documents of the micro-batch; the same on all ranks.
        runs: all rows, in their order.
        groups: int64 `[parts]` tokens of each group's documents or fragments, in row order; padding counts as a
            document.
        middle_numbers: numbers of the followed fragments that follow others.
        cut: fragments of all ranks. Each rank makes summaries of its followed fragments. It needs states before its
            middle fragments, then before its last ones; each in row order.
        halo: halo of convolutions.
    """

    rank: int
    cut_documents: int
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
        order = np.lexsort((layout.segment_start, layout.segment_document))
        opens = run_starts(layout.segment_document[order])
        stops = run_stops(opens)
        follows, is_followed = np.zeros((2, len(order)), dtype=bool)
        follows[order], is_followed[order] = ~opens, ~stops
        fragments = order[~(opens & stops)]
        runs, groups, middle = _groups(layout, rank, follows, is_followed)
        states = _numbers(layout, follows & is_followed, follows & ~is_followed)
        cut = CutFragments(
            layout.segment_document[fragments],
            layout.segment_rank[fragments],
            _numbers(layout, is_followed)[fragments],
            states[fragments],
            layout.num_ranks,
        )
        return cls(rank, layout.cut_documents, runs, groups, middle, cut, _halo(layout, rank, order, halo_tokens))


def _numbers(layout: Layout, *chosen: BoolArray) -> IntArray:
    """Returns `[segments]` numbers of the chosen segments on their ranks, in row order; -1 for others.

    Args:
        chosen: disjoint choices; numbers of the second follow those of the first.
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
    """Returns the runs and groups of a rank, and numbers of middle fragments."""
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


def _halo(layout: Layout, rank: int, order: IntArray, halo_tokens: int) -> Halo:
    """Returns the halo of a rank's segments; `order` sorts all segments within their documents."""
    start, document = layout.segment_start, layout.segment_document
    # Tokens before the segments of all ranks: -halo_tokens, ..., -1 of each, as far as its document goes back.
    segment = np.repeat(np.arange(len(start)), np.minimum(start, halo_tokens))
    position = ranges(np.maximum(start - halo_tokens, 0), np.minimum(start, halo_tokens))
    keys = document[order] * POSITIONS + start[order]
    holder = order[np.searchsorted(keys, document[segment] * POSITIONS + position, side="right") - 1]
    row = layout.segment_row[holder] + position - start[holder]
    source, destination = layout.segment_rank[holder], layout.segment_rank[segment]
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
