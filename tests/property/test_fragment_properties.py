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
from distca_hf.prefixes import SharedPrefixes, Span


Item = TypeVar("Item")
Segment = tuple[int, int, int]
# What a row holds: (document, position), or padding. A window has zeros before a document and after a segment.
Token = tuple[int, int] | str
PADDING, ZEROS = "padding", "zeros"


def cut_layout(rng: random.Random, num_ranks: int) -> Layout:
    """Documents cut into up to nine fragments, on any rank in any order; some ranks empty, some padded. Some continue
    others, which may continue others."""
    longest_tokens, sharing = rng.choice([3, 40]), rng.choice([0, 0.3, 0.9])
    lengths, spans = list[int](), list[list[Span]]()
    for document in range(rng.randint(1, 12)):
        prefix = list[Span]()
        if spans and rng.random() < sharing:
            continued = rng.randrange(document)
            stop = rng.randint(1, lengths[continued])
            prefix = [(holder, start, min(end, stop)) for holder, start, end in spans[continued] if start < stop]
        first = prefix[-1][2] if prefix else 0
        lengths.append(first + rng.randint(1, longest_tokens))
        spans.append([*prefix, (document, first, lengths[-1])])
    held: list[list[Segment]] = [[] for _ in range(num_ranks)]
    holders = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
    for document, tokens in enumerate(lengths):
        first = spans[document][-1][1]
        inside = {rng.randint(first, tokens) for _ in range(rng.choice([0, 0, 1, 4, 8]))}
        for start, stop in pairwise(sorted({first, tokens, *inside})):
            held[rng.choice(holders)].append((document, start, stop))
    for segments in held:
        rng.shuffle(segments)
    tokens_of_ranks = [sum(stop - start for _, start, stop in segments) for segments in held]
    rows = [max(1, tokens + rng.choice([0, 0, 1, 3])) for tokens in tokens_of_ranks]  # models run on a row at least
    columns = np.array([segment for segments in held for segment in segments], dtype=np.int64).T.copy()
    shared = None if all(len(one) == 1 for one in spans) else SharedPrefixes.of_spans(spans, range(len(spans)))
    borders = np.cumsum([0, *map(len, held)])
    layout = Layout(np.array(lengths), *columns, borders, np.array(rows), shared=shared)
    layout.validate()
    return layout


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

    @cached_property
    def paths(self) -> list[list[Token]]:
        """What the row of each token of each document holds, whichever document holds the row."""
        if (shared := self.layout.shared) is None:
            return [[(document, at) for at in range(tokens)] for document, tokens in enumerate(self.document_tokens)]
        spans = list(zip(*(x.tolist() for x in (shared.holder, shared.start, shared.stop)), strict=True))
        return [
            [(holder, at) for holder, start, stop in spans[slice(*bounds)] for at in range(start, stop)]
            for bounds in pairwise(shared.document_spans.tolist())
        ]

    @cached_property
    def document_tokens(self) -> list[int]:
        """Tokens of each document."""
        lengths: list[int] = self.layout.document_tokens.tolist()
        return lengths

    def held_by(self, rank: int) -> list[Segment]:
        """Segments of a rank, cut where others continue them."""
        first = self.layout.first_own.tolist()
        continued = {self.paths[document][at - 1] for document, at in enumerate(first) if at}
        held = list[Segment]()
        for document, start, stop in self.layout.held_by(rank):
            inside = [at for at in range(start + 1, stop) if (document, at - 1) in continued]
            held += [(document, *bounds) for bounds in pairwise([start, *inside, stop])]
        return held

    @cached_property
    def last_before(self) -> set[Token]:
        """Tokens just before fragments."""
        every = [segment for rank in range(self.layout.num_ranks) for segment in self.held_by(rank)]
        return {self.paths[document][start - 1] for document, start, _ in every if start}

    def segments(self, rank: int) -> list[list[Token]]:
        """What the rows of each segment hold, and those of padding."""
        held = self.held_by(rank)
        segments: list[list[Token]] = [[(document, at) for at in range(start, stop)] for document, start, stop in held]
        return segments + [[PADDING] * self.padding(rank)] * (self.padding(rank) > 0)

    def fragments(self, rank: int) -> list[Segment]:
        """Parts of cut documents that a rank holds, in row order."""
        return [segment for segment in self.held_by(rank) if segment[1] > 0 or self.is_followed(segment)]

    def is_followed(self, segment: Segment) -> bool:
        """Whether other fragments follow."""
        document, _, stop = segment
        return (document, stop - 1) in self.last_before

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
            expected = [world.paths[document][at] if at >= 0 else ZEROS for at in range(start - before, start)]
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
        assert fragments.is_cut == any(map(world.fragments, range(world.layout.num_ranks)))
        group_of = {
            token: "followed" if world.is_followed((document, start, stop)) else "last" if start else "whole"
            for document, start, stop in world.held_by(rank)
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
    """Every rank gets the states before its fragments, from chains through all fragments before, without a gap. A
    state is named by the token that it is after."""
    units = [*range(heads)] if heads else [None]
    ranks = range(world.layout.num_ranks)
    folds = [Fold.of(world.ranks[rank].cut, rank, heads) for rank in ranks]
    mine = [[(segment, unit) for segment in world.summaries(rank) for unit in units] for rank in ranks]
    received = exchanged(mine, [fold.gathered for fold in folds])
    computed: list[list[tuple[Token, int | None]]] = []
    for rank, fold in enumerate(folds):
        assert len({*received[rank]}) == len(received[rank]), "each summary once"
        found = [*mine[rank], *received[rank]]
        items = [found[place] for place in fold.placed.tolist()]
        assert sum(fold.steps) == len(items)
        assert not fold.branches or world.layout.shared is not None
        places = iter(fold.before.tolist())
        of_step: list[tuple[Token, int | None]] = []
        of_rank: list[tuple[Token, int | None]] = []
        for number, step in enumerate(fold.steps):
            before, of_step = of_step, []
            for place, ((document, start, stop), unit) in enumerate(items[len(of_rank) :][:step]):
                if number:
                    at = next(places)
                    assert fold.branches or at == place
                    assert before[at] == (world.paths[document][start - 1], unit)
                else:
                    assert start == 0
                of_step.append(((document, stop - 1), unit))
            of_rank += of_step
        assert next(places, None) is None
        assert len({*of_rank}) == len(of_rank), "each state is computed once on a rank"
        computed.append(of_rank)
    if heads:
        every = [one for of_rank in computed for one in of_rank]
        assert len(every) == len({*every}), "each head of a document is folded once"
    else:
        assert not any(len(fold.returned.sent) for fold in folds)
    arrived = exchanged(computed, [fold.returned for fold in folds])
    for rank, fold in enumerate(folds):
        assert len({*arrived[rank]}) == len(arrived[rank]), "each state once"
        states = [[*computed[rank], *arrived[rank]][place] for place in fold.states.tolist()]
        before_later = [world.paths[document][start - 1] for document, start, _ in world.later(rank)]
        assert states == [(token, unit) for token in before_later for unit in units]
        needed = {token for document, start, _ in world.later(rank) for token in world.paths[document][:start]}
        assert heads or {token for token, _ in computed[rank]} <= needed, "nothing in vain"
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
