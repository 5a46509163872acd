"""Fragments: the parts of cut documents, and what layers that carry a state exchange for them.

A state runs through a document from its first token to its last one. Over the tokens of a fragment it is an affine
map, S_out = M S_in + B, which ranks make without knowing S_in.

    document    | f0 | f1     | f2  | f3 |      in document order, on ranks in any order
    summaries     f0 ──▶ ranks of f1, f2, f3    f1 ──▶ ranks of f2, f3    ...      (M, B), to each rank once
    state of f2   M1 B0 + B1                    on each rank that holds a later fragment
    halo of f2    the tokens just before it, wherever they are: a convolution sees them

All of it follows from the layout, so every rank derives the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca_hf.arrays import BoolArray, IntArray, ranges, run_starts, run_stops
from distca_hf.layout import Layout


# Sort keys are (document, position); positions have 31 bits.
POSITIONS = 2**31


@dataclass(frozen=True, eq=False)
class Route:
    """Items that this rank sends and receives. Those from one rank arrive in an order that both ranks derive.

    Attributes:
        sent: int64, indices of items of this rank, grouped by destination.
        sent_counts, received_counts: int64 `[ranks]`.
    """

    sent: IntArray
    sent_counts: IntArray
    received_counts: IntArray


@dataclass(frozen=True, eq=False)
class Halo:
    """How a convolution over W tokens sees the tokens before each segment of this rank.

    The first W - 1 tokens of a segment are convolved once more, each in a window of 2 (W - 1) tokens: those before the
    segment, then its own. Windows of whole documents begin with zeros.

    Attributes:
        route: of rows.
        taken: int64, rows of this rank that are in windows.
        windows: int64 `[segments * 2 (W - 1)]` places in `[rows taken | rows received | one row of zeros]`.
        kept: int64 `[tokens]` places of convolved tokens among `[segments * (W - 1)]`.
        rows: int64 `[tokens]` rows of this rank that they belong to.
    """

    route: Route
    taken: IntArray
    windows: IntArray
    kept: IntArray
    rows: IntArray


class Run(NamedTuple):
    """Neighbouring rows of this rank: a fragment, or whole documents and padding.

    Attributes:
        tokens: how many rows.
        is_fragment: whether they are a part of a cut document.
        is_followed: whether other fragments of the document come later, so that they need its summary.
        state: number of its state among those before this rank's fragments; None for a first fragment.
    """

    tokens: int
    is_fragment: bool
    is_followed: bool = False
    state: int | None = None


class Chain(NamedTuple):
    """States of one document before the fragments of this rank.

    Attributes:
        summaries: of all fragments before the last one that this rank holds, in document order, as places in
            `[summaries of this rank | summaries received]`.
        states: for each of them, the number of the state that follows it; None if this rank does not hold the fragment
            that begins there.
    """

    summaries: tuple[int, ...]
    states: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Fragments:
    """The rows of one rank as layers with a state see them.

    Attributes:
        cut_documents: cut documents of the micro-batch; the same on all ranks.
        runs: all rows, in their order.
        whole_tokens: int64 `[documents]` tokens of the documents in runs that are no fragments; padding is the last.
        summaries: route of summaries. This rank makes one for each followed fragment, in row order.
        chains: of each document of which this rank holds a later fragment.
        halo: of convolutions.
    """

    cut_documents: int
    runs: tuple[Run, ...]
    whole_tokens: IntArray
    summaries: Route
    chains: tuple[Chain, ...]
    halo: Halo

    @classmethod
    def of(cls, layout: Layout, rank: int, halo_tokens: int) -> "Fragments":
        """Returns the fragments of a layout on one rank.

        Args:
            halo_tokens: tokens before a segment that convolutions see: one less than the widest of them.
        """
        order = np.lexsort((layout.segment_start, layout.segment_document))
        opens = run_starts(layout.segment_document[order])
        stops = run_stops(opens)
        follows, is_followed = np.zeros((2, len(order)), dtype=bool)
        follows[order], is_followed[order] = ~opens, ~stops
        fragments = order[~(opens & stops)]
        route, places = _summaries(layout, rank, fragments, is_followed)
        runs, whole_tokens = _runs(layout, rank, follows, is_followed)
        chains = _chains(layout, rank, fragments, places, follows)
        halo = _halo(layout, rank, order, halo_tokens)
        return cls(layout.cut_documents, runs, whole_tokens, route, chains, halo)

    @property
    def states(self) -> int:
        """States before fragments of this rank."""
        return sum(run.state is not None for run in self.runs)


def _route(source: IntArray, item: IntArray, destination: IntArray, rank: int, num_ranks: int) -> Route:
    """Returns the route of one rank, given items in an order that all ranks know; none stays on its rank."""
    sends = source == rank
    by_destination = np.argsort(destination[sends], kind="stable")
    counts = (np.bincount(x, minlength=num_ranks) for x in (destination[sends], source[destination == rank]))
    return Route(item[sends][by_destination], *counts)


def _runs(layout: Layout, rank: int, follows: BoolArray, is_followed: BoolArray) -> tuple[tuple[Run, ...], IntArray]:
    """Returns the runs of a rank, and the tokens of its whole documents."""
    held = layout.segments_of(rank)
    tokens = layout.segment_tokens[held]
    is_fragment = follows[held] | is_followed[held]
    padding = int(layout.rank_rows[rank] - layout.rank_tokens[rank])
    if padding:
        tokens, is_fragment = np.append(tokens, padding), np.append(is_fragment, False)
    runs = list[Run]()
    state = 0
    opens = run_starts(is_fragment.astype(np.int64)) | is_fragment
    for first, after in zip(np.flatnonzero(opens), [*np.flatnonzero(opens)[1:], len(tokens)], strict=True):
        run_tokens = int(tokens[first:after].sum())
        if not is_fragment[first]:
            runs.append(Run(run_tokens, is_fragment=False))
            continue
        is_later = bool(follows[held.start + first])
        runs.append(Run(run_tokens, True, bool(is_followed[held.start + first]), state if is_later else None))
        state += is_later
    return tuple(runs), tokens[~is_fragment]


def _summaries(layout: Layout, rank: int, fragments: IntArray, is_followed: BoolArray) -> tuple[Route, IntArray]:
    """Returns the route of summaries, and `[segments]` the place of each summary on this rank; -1 if it is not here.

    Args:
        fragments: segments of cut documents, in document order.
    """
    document, rank_of = layout.segment_document[fragments], layout.segment_rank[fragments]
    # All pairs (fragment, later fragment) of each document.
    last = np.searchsorted(document, document, side="right")
    later = last - np.arange(len(fragments)) - 1
    earlier, after = np.repeat(np.arange(len(fragments)), later), ranges(np.arange(len(fragments)) + 1, later)
    source, destination = rank_of[earlier], rank_of[after]
    needed = np.unique(earlier[source != destination] * layout.num_ranks + destination[source != destination])
    earlier, destination = np.divmod(needed, layout.num_ranks)  # each rank once, in document order
    source = rank_of[earlier]

    held = layout.segments_of(rank)
    places = np.full(len(layout.segment_document), -1)
    mine = held.start + np.flatnonzero(is_followed[held])
    places[mine] = np.arange(len(mine))
    route = _route(source, places[fragments[earlier]], destination, rank, layout.num_ranks)
    arriving = destination == rank
    by_source = np.argsort(source[arriving], kind="stable")
    places[fragments[earlier[arriving][by_source]]] = len(mine) + np.arange(len(by_source))
    return route, places


def _chains(layout: Layout, rank: int, fragments: IntArray, places: IntArray, follows: BoolArray) -> tuple[Chain, ...]:
    """Returns the chains of a rank; arguments as in `_summaries`."""
    held = layout.segments_of(rank)
    numbers = np.cumsum(follows[held]) - 1  # of states, in row order
    document = layout.segment_document[fragments]
    chains = []
    for of_document in np.unique(layout.segment_document[held][follows[held]]):
        first, after = np.searchsorted(document, [of_document, of_document + 1])
        chain = fragments[first:after].tolist()
        states = [int(numbers[x - held.start]) if held.start <= x < held.stop else None for x in chain[1:]]
        length = max(number for number, state in enumerate(states) if state is not None) + 1
        chains.append(Chain(tuple(places[chain[:length]].tolist()), tuple(states[:length])))
    return tuple(chains)


def _halo(layout: Layout, rank: int, order: IntArray, halo_tokens: int) -> Halo:
    """Returns the halo of a rank's segments; `order` is that of all segments in their documents."""
    start, document = layout.segment_start, layout.segment_document
    # Tokens before segments, of all ranks: -halo_tokens, ..., -1 of each segment that has so many.
    segment = np.repeat(np.arange(len(start)), np.minimum(start, halo_tokens))
    position = ranges(np.maximum(start - halo_tokens, 0), np.minimum(start, halo_tokens))
    keys = document[order] * POSITIONS + start[order]
    holder = order[np.searchsorted(keys, document[segment] * POSITIONS + position, side="right") - 1]
    row = layout.segment_row[holder] + position - start[holder]
    source, destination = layout.segment_rank[holder], layout.segment_rank[segment]
    travels = source != destination
    route = _route(source[travels], row[travels], destination[travels], rank, layout.num_ranks)

    # Windows of this rank's segments, and of its padding: halo_tokens before, then as many from the segment.
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
    return Halo(route, taken, windows, kept, own_rows)
