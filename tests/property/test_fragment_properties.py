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
from distca_hf.planning.fragments import Fragments, Route


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

    def summaries(self) -> list[list[Segment]]:
        """On every rank, the fragment of each of its summaries, then of those received."""
        mine = [list(filter(self.is_followed, self.fragments(rank))) for rank in range(self.layout.num_ranks)]
        received = exchanged(mine, [fragments.summaries for fragments in self.ranks])
        return [own + others for own, others in zip(mine, received, strict=True)]


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


def check_runs(world: World) -> None:
    """Runs are all rows of a rank, in their order; each fragment is one, and says what comes before and after it."""
    for rank, fragments in enumerate(world.ranks):
        assert fragments.cut_documents == world.layout.cut_documents
        cut = {document for document, *_ in world.fragments(rank)}
        whole = [stop - start for document, start, stop in world.layout.held_by(rank) if document not in cut]
        assert fragments.whole_tokens.tolist() == whole + [world.padding(rank)] * (world.padding(rank) > 0)
        in_runs = [run.is_fragment for run in fragments.runs for _ in range(run.tokens)]
        assert in_runs == [token[0] in cut for token in world.rows(rank)]
        of_fragments = [run for run in fragments.runs if run.is_fragment]
        states = 0
        for run, segment in zip(of_fragments, world.fragments(rank), strict=True):
            _, start, stop = segment
            assert run.tokens == stop - start
            assert run.is_followed == world.is_followed(segment)
            assert run.state == (states if start else None), "states are numbered in row order"
            states += start > 0
        assert fragments.states == states


def check_chains(world: World) -> None:
    """A state follows from all fragments before this rank's fragment, in document order, and each state is known."""
    for rank, (fragments, summaries) in enumerate(zip(world.ranks, world.summaries(), strict=True)):
        found: dict[int, tuple[int, int]] = {}
        for chain in fragments.chains:
            reached = 0
            for place, state in zip(chain.summaries, chain.states, strict=True):
                document, start, stop = summaries[place]
                assert document == summaries[chain.summaries[0]][0]
                assert start == reached, "in document order, without a gap"
                reached = stop
                if state is not None:
                    assert state not in found
                    found[state] = document, stop
            assert chain.states[-1] is not None, "nothing is folded in vain"
        later = [(document, start) for document, start, _ in world.fragments(rank) if start]
        assert [found[state] for state in range(len(found))] == later


def check_what_travels(world: World) -> None:
    """A rank receives a summary once, if it holds a later fragment of the document and not this one."""
    summaries = world.summaries()
    for rank in range(len(world.ranks)):
        last: dict[int, int] = {}
        for document, start, _ in world.fragments(rank):
            last[document] = max(start, last.get(document, 0))
        elsewhere = {
            segment
            for other in range(len(world.ranks))
            for segment in world.fragments(other)
            if other != rank and segment[1] < last.get(segment[0], 0)
        }
        mine = sum(map(world.is_followed, world.fragments(rank)))
        assert sorted(summaries[rank][mine:]) == sorted(elsewhere)


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
def test_runs_are_the_rows_of_a_rank(world: World) -> None:
    check_runs(world)


@given(world=WORLDS)
def test_chains_go_through_all_fragments_before_a_later_one(world: World) -> None:
    check_chains(world)


@given(world=WORLDS)
def test_summaries_travel_once_to_the_ranks_that_need_them(world: World) -> None:
    check_what_travels(world)
