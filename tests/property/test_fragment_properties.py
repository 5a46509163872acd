"""Fragments of random layouts against their definition: every token and every summary has a name here, and exchanges
move names."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.layout import Layout
from distca_hf.planning.folds import Fold, Route
from distca_hf.planning.fragments import Fragments


Item = TypeVar("Item")
Segment = tuple[int, int, int]
# What a row holds: (document, position), or padding. A window has zeros before a document and after a segment.
Token = tuple[int, int] | str
PADDING, ZEROS = "padding", "zeros"


def cut_layout(rng: random.Random, num_ranks: int) -> Layout:
    """Documents cut into up to nine fragments, on any rank in any order; some ranks empty, some padded."""
    longest_tokens = rng.choice([3, 40])
    lengths = [rng.randint(1, longest_tokens) for _ in range(rng.randint(1, 12))]
    held: list[list[Segment]] = [[] for _ in range(num_ranks)]
    holders = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
    for document, tokens in enumerate(lengths):
        inside = {rng.randint(0, tokens) for _ in range(rng.choice([0, 0, 1, 4, 8]))}
        for start, stop in pairwise(sorted({0, tokens, *inside})):
            held[rng.choice(holders)].append((document, start, stop))
    for segments in held:
        rng.shuffle(segments)
    tokens_of_ranks = [sum(stop - start for _, start, stop in segments) for segments in held]
    rows = [max(1, tokens + rng.choice([0, 0, 1, 3])) for tokens in tokens_of_ranks]  # models run on a row at least
    return Layout.from_segments(lengths, held, rows)


@dataclass(frozen=True, eq=False)
class World:
    """Fragments of all ranks, and what their rows hold.

    Attributes:
        halo_tokens: tokens that convolutions see before a token.
    """

    layout: Layout
    halo_tokens: int

    @cached_property
    def ranks(self) -> list[Fragments]:
        """Fragments of every rank."""
        return [Fragments.of(self.layout, rank, self.halo_tokens) for rank in range(self.layout.num_ranks)]

    def padding(self, rank: int) -> int:
        """Rows of padding; they come last."""
        return int(self.layout.rank_rows[rank] - self.layout.rank_tokens[rank])

    def rows(self, rank: int) -> list[Token]:
        """What each row of a rank holds."""
        held = self.layout.held_by(rank)
        tokens: list[Token] = [(document, at) for document, start, stop in held for at in range(start, stop)]
        return tokens + [PADDING] * self.padding(rank)

    def segments(self, rank: int) -> list[list[Token]]:
        """What the rows of each segment hold, and those of padding."""
        held = self.layout.held_by(rank)
        segments: list[list[Token]] = [[(document, at) for at in range(start, stop)] for document, start, stop in held]
        return segments + [[PADDING] * self.padding(rank)] * (self.padding(rank) > 0)

    def fragments(self, rank: int) -> list[Segment]:
        """Parts of cut documents that a rank holds, in row order."""
        return [segment for segment in self.layout.held_by(rank) if segment[1] > 0 or self.is_followed(segment)]

    def is_followed(self, segment: Segment) -> bool:
        """Whether other fragments of the document come later."""
        document, _, stop = segment
        return stop < int(self.layout.document_tokens[document])

    def summaries(self, rank: int) -> list[Segment]:
        """Fragments that a rank makes summaries of, in row order."""
        return list(filter(self.is_followed, self.fragments(rank)))

    def later(self, rank: int) -> list[Segment]:
        """Fragments that need a state: middle ones, then last ones, in row order."""
        later = [segment for segment in self.fragments(rank) if segment[1]]
        return sorted(later, key=lambda segment: not self.is_followed(segment))


def exchanged(items: Sequence[Sequence[Item]], routes: Sequence[Route]) -> list[list[Item]]:
    """Items that every rank receives, by the rank that they come from."""
    received: list[list[Item]] = [[] for _ in routes]
    for source, (held, route) in enumerate(zip(items, routes, strict=True)):
        parts = np.split(route.sent, np.cumsum(route.sent_counts)[:-1])
        for destination, part in enumerate(parts):
            assert len(part) == route.sent_counts[destination] == routes[destination].received_counts[source]
            received[destination] += [held[item] for item in part.tolist()]
        assert route.sent_counts[source] == 0, "nothing travels to the rank that has it"
        assert route.sent_counts.sum() == len(route.sent)
    return received


def check_windows(world: World) -> None:
    """A window has the tokens before its segment, wherever they are, and its first ones; zeros if there are none."""
    rows_of_ranks = [world.rows(rank) for rank in range(len(world.ranks))]
    received = exchanged(rows_of_ranks, [one.halo.route for one in world.ranks])
    before, size = world.halo_tokens, 2 * world.halo_tokens
    for rank, fragments in enumerate(world.ranks):
        halo, rows = fragments.halo, world.rows(rank)
        found = [*(rows[row] for row in halo.taken.tolist()), *received[rank], ZEROS]
        windows = [found[place] for place in halo.windows.tolist()]
        segments = world.segments(rank)
        assert len(windows) == len(segments) * size
        for number, segment in enumerate(segments):
            document, start = segment[0] if segment[0] != PADDING else (None, 0)
            expected = [(document, at) if at >= 0 else ZEROS for at in range(start - before, start)]
            expected += [*segment[:before], *[ZEROS] * (before - len(segment))]
            assert windows[number * size : (number + 1) * size] == expected


def check_convolved_rows(world: World) -> None:
    """The first tokens of each segment are taken from the second halves of windows, and go to their rows."""
    for rank, fragments in enumerate(world.ranks):
        second_halves: list[Token | None] = []
        expected: list[tuple[int, Token]] = []
        row = 0
        for segment in world.segments(rank):
            first = segment[: world.halo_tokens]
            second_halves += [*first, *[None] * (world.halo_tokens - len(first))]
            expected += enumerate(first, row)
            row += len(segment)
        halo = fragments.halo
        kept = [second_halves[place] for place in halo.kept.tolist()]
        assert list(zip(halo.rows.tolist(), kept, strict=True)) == expected


def check_groups(world: World) -> None:
    """Runs are all rows of a rank, in their order, and groups the parts that they hold."""
    for rank, fragments in enumerate(world.ranks):
        assert fragments.cut_documents == world.layout.cut_documents
        group_of = {
            token: "followed" if world.is_followed((document, start, stop)) else "last" if start else "whole"
            for document, start, stop in world.layout.held_by(rank)
            for token in ((document, at) for at in range(start, stop))
        }
        in_runs = [run.group for run in fragments.runs for _ in range(run.tokens)]
        assert in_runs == [group_of.get(token, "whole") for token in world.rows(rank)]
        assert all(one.group != other.group for one, other in pairwise(fragments.runs))
        for name, tokens in fragments.groups.items():
            parts = [part for part in world.segments(rank) if group_of.get(part[0], "whole") == name]
            assert tokens.tolist() == [*map(len, parts)]
        followed = world.summaries(rank)
        assert fragments.middle_numbers == [number for number, (_, start, _) in enumerate(followed) if start]


def check_fold(world: World, heads: int | None) -> None:
    """Every rank gets the states before its fragments, from chains through all fragments before, without a gap."""
    units = [*range(heads)] if heads else [None]
    ranks = range(world.layout.num_ranks)
    folds = [Fold.of(world.ranks[rank].cut, rank, heads) for rank in ranks]
    mine = [[(segment, unit) for segment in world.summaries(rank) for unit in units] for rank in ranks]
    received = exchanged(mine, [fold.gathered for fold in folds])
    computed: list[list[tuple[int, int, int | None]]] = []
    for rank, fold in enumerate(folds):
        assert len({*received[rank]}) == len(received[rank]), "each summary once"
        found = [*mine[rank], *received[rank]]
        items = [found[place] for place in fold.placed.tolist()]
        assert sum(fold.steps) == len(items)
        assert sorted(fold.steps, reverse=True) == [*fold.steps]
        chains: list[list[tuple[Segment, int | None]]] = [[] for _ in range(max(fold.steps, default=0))]
        of_rank: list[tuple[int, int, int | None]] = []
        for step in fold.steps:
            for number, (segment, unit) in enumerate(items[len(of_rank) :][:step]):
                document, start, stop = segment
                before, unit_before = chains[number][-1] if chains[number] else ((document, 0, 0), unit)
                assert (before[0], before[2], unit_before) == (document, start, unit)
                chains[number].append((segment, unit))
                of_rank.append((document, stop, unit))
        computed.append(of_rank)
    if heads:
        every = [one for of_rank in computed for one in of_rank]
        assert len(every) == len({*every}), "each head of a document is folded once"
    else:
        assert not any(len(fold.returned.sent) for fold in folds)
    arrived = exchanged(computed, [fold.returned for fold in folds])
    for rank, fold in enumerate(folds):
        states = [[*computed[rank], *arrived[rank]][place] for place in fold.states.tolist()]
        assert states == [(document, start, unit) for document, start, _ in world.later(rank) for unit in units]
        last = {
            document: max(start for other, start, _ in world.later(rank) if other == document)
            for document, *_ in world.later(rank)
        }
        assert heads or all(stop <= last[document] for document, stop, _ in computed[rank]), "nothing in vain"
    sent = [[int(route.sent_counts.sum()) for route in (fold.gathered, fold.returned)] for fold in folds]
    got = [[int(route.received_counts.sum()) for route in (fold.gathered, fold.returned)] for fold in folds]
    assert {fold.busiest for fold in folds} == {int(np.max([sent, got], axis=(0, 1)).sum())}


def drawn(seed: int, num_ranks: int, halo_tokens: int) -> World:
    return World(cut_layout(random.Random(seed), num_ranks), halo_tokens)


WORLDS = st.builds(drawn, st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 8), halo_tokens=st.integers(1, 5))


@given(world=WORLDS)
def test_every_window_holds_the_tokens_before_its_segment_and_its_first_ones(world: World) -> None:
    check_windows(world)


@given(world=WORLDS)
def test_first_tokens_of_segments_are_convolved_in_their_windows(world: World) -> None:
    check_convolved_rows(world)


@given(world=WORLDS)
def test_groups_are_the_rows_of_a_rank(world: World) -> None:
    check_groups(world)


@given(world=WORLDS)
def test_ranks_fold_what_they_need(world: World) -> None:
    check_fold(world, None)


@given(world=WORLDS, heads=st.integers(1, 12))
def test_ranks_divide_heads_and_return_states(world: World, heads: int) -> None:
    check_fold(world, heads)
