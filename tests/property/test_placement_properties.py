"""Placement of any batch: every token once, equal tokens, equal work, rows read in their order, few cuts."""

import math
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.layout import Layout, Topology
from distca_hf.placement.given import near_home
from distca_hf.placement.place import fill_in_order, place
from distca_hf.planning.plan import plan_in_place
from support.layouts import padding_rows, reads_rows_in_order


KINDS = ("equal", "giants and dust", "log-normal", "uniform")
RANKS = (2, 3, 4, 5, 7, 8, 16, 24, 32, 64)
SEEDS = st.integers(0, 2**32 - 1)
# A rank that is filled to less than this is no normal batch.
NORMAL_TOKENS_PER_RANK = 4096 * 0.3
MOST_DOCUMENTS = 4000


@dataclass(frozen=True)
class Batch:
    """A batch by what it was drawn from, so that a failing one can be read and drawn again."""

    kind: str
    num_ranks: int
    tokens: int
    seed: int

    @property
    def lengths(self) -> list[int]:
        """Lengths that sum to `tokens`, or a little less when all are equal."""
        rng = random.Random(self.seed)
        if self.kind == "equal":
            count = min(self.tokens, rng.choice([1, 2, 3, 5, 7, 16, 64, 100]))
            return [self.tokens // count] * count
        lengths: list[int] = []
        left = self.tokens
        longest = max(2, self.tokens // rng.choice([2, 10, 50, 300]))
        if self.kind == "giants and dust":
            longest = max(2, self.tokens // 200)
            for _ in range(min(left, rng.randint(1, 3))):
                lengths.append(max(1, int(left * rng.uniform(0.1, 0.6))))
                left -= lengths[-1]
        mu, sigma = math.log(max(2, self.tokens / rng.choice([5, 20, 100, 400]))), rng.uniform(0.1, 2)
        while left > 0:
            drawn = int(rng.lognormvariate(mu, sigma)) if self.kind == "log-normal" else rng.randint(1, longest)
            lengths.append(min(left, max(1, drawn) if len(lengths) < MOST_DOCUMENTS else left))
            left -= lengths[-1]
        rng.shuffle(lengths)
        return lengths


def draw_batch(kind: str, seed: int, normal: bool) -> Batch:
    """Normal: ranks of 4K to 128K tokens, filled to a third at least. Else a few thousand tokens, fewer than ranks at
    times."""
    rng = random.Random(seed)
    num_ranks = rng.choice(RANKS if normal else (1, *RANKS))
    filled = rng.choice([1, rng.uniform(0.35, 1)])
    tokens = num_ranks * int(4096 * 2 ** rng.uniform(0, 5) * filled) if normal else int(2 ** rng.uniform(0, 13))
    return Batch(kind, num_ranks, tokens, seed)


NORMAL_BATCH = st.builds(draw_batch, st.sampled_from(KINDS), SEEDS, st.just(True))
TINY_BATCH = st.builds(draw_batch, st.sampled_from(KINDS), SEEDS, st.just(False))
ANY_BATCH = st.one_of(NORMAL_BATCH, TINY_BATCH)


def assert_every_token_is_placed_once(layout: Layout, lengths: list[int]) -> None:
    """Checked here, not with `Layout.validate`."""
    segments = sorted(
        zip(
            layout.segment_document.tolist(),
            layout.segment_start.tolist(),
            layout.segment_stop.tolist(),
            strict=True,
        )
    )
    at = 0
    for document, tokens in enumerate(lengths):
        reached = 0
        while reached < tokens:
            assert segments[at][:2] == (document, reached)
            assert segments[at][2] > reached
            reached = segments[at][2]
            at += 1
        assert reached == tokens
    assert at == len(segments)
    assert layout.document_tokens.tolist() == lengths
    assert layout.rank_segments[0] == 0
    assert layout.rank_segments[-1] == len(segments)


def deviations(layout: Layout) -> np.ndarray:
    """How far each rank's work is from the mean, in pairs."""
    return np.abs(layout.rank_work - layout.rank_work.sum() / layout.num_ranks)


@given(batch=NORMAL_BATCH)
def test_work_of_a_normal_batch_is_equal_within_the_promised_share(batch: Batch) -> None:
    lengths, num_ranks = batch.lengths, batch.num_ranks
    assert sum(lengths) >= num_ranks * NORMAL_TOKENS_PER_RANK
    layout = place(lengths, num_ranks)

    assert deviations(layout).max() <= 0.008 * layout.rank_work.mean()


@given(batch=ANY_BATCH)
def test_rows_of_every_placed_rank_are_read_in_order(batch: Batch) -> None:
    assert reads_rows_in_order(place(batch.lengths, batch.num_ranks))


@given(batch=ANY_BATCH)
def test_documents_are_cut_at_most_three_times_per_rank(batch: Batch) -> None:
    """Once where the first tail begins, once where the last one does, once at the light end. Tasks beyond one per
    document are cuts; neighbouring segments on one rank are none."""
    lengths, num_ranks = batch.lengths, batch.num_ranks
    tasks = plan_in_place(place(lengths, num_ranks)).tasks

    assert len(tasks) - len(lengths) <= 3 * num_ranks


@given(batch=ANY_BATCH)
def test_plain_packing_fills_ranks_in_order(batch: Batch) -> None:
    lengths, num_ranks = batch.lengths, batch.num_ranks
    layout = fill_in_order(lengths, num_ranks)

    assert_every_token_is_placed_once(layout, lengths)
    assert not padding_rows(layout).any()
    first = np.cumsum([0, *lengths])
    starts = first[layout.segment_document] + layout.segment_start
    assert starts.tolist() == sorted(starts.tolist())
    total = sum(lengths)
    assert np.cumsum(layout.rank_tokens).tolist() == [total * (rank + 1) // num_ranks for rank in range(num_ranks)]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), num_ranks=st.integers(1, 12))
def test_plain_packing_cuts_only_where_a_rank_is_full(lengths: list[int], num_ranks: int) -> None:
    layout = fill_in_order(lengths, num_ranks)
    ends = np.cumsum(layout.segment_tokens)
    borders = {*np.cumsum(lengths).tolist(), *np.cumsum(layout.rank_tokens).tolist()} - {0}

    assert ends.tolist() == sorted(borders)


@given(st.sampled_from(KINDS), SEEDS, st.sampled_from([(2, 2), (5, 2), (8, 8), (16, 4), (24, 8)]))
@settings(max_examples=20, deadline=None)
def test_ranks_numbered_near_home_hold_the_same_parts(kind: str, seed: int, sizes: tuple[int, int]) -> None:
    num_ranks, ranks_per_node = sizes
    rng, topology = random.Random(seed), Topology(num_ranks, ranks_per_node)
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    for length in Batch(kind, num_ranks, rng.randint(num_ranks, 8192 * num_ranks), seed).lengths:
        packs[rng.randrange(num_ranks)].append(length)
    home = Layout.from_packs(packs)
    placed = place(home.document_tokens, num_ranks, topology=topology, head_groups=4)
    near = near_home(home, placed, topology)

    near.validate()
    held = [placed.held_by(rank) for rank in range(num_ranks)]
    order = [held.index(near.held_by(rank)) if near.held_by(rank) else -1 for rank in range(num_ranks)]
    for node in range(topology.num_nodes):  # a node's parts stay together, and the last node may be smaller
        nodes = {int(topology.node_of[part]) for part in order[slice_of(topology.ranks_of(node))] if part >= 0}
        assert len(nodes) <= 1
    parts = [sorted(zip(layout.rank_rows, layout.rank_work, strict=True)) for layout in (placed, near)]
    assert parts[0] == parts[1]
    plans = [plan_in_place(layout, 4) for layout in (placed, near)]
    plans[1].validate()
    # Shares of a stripe are equal up to one query, with the heads of one group.
    assert abs(plans[1].work.max() - plans[0].work.max()) <= max(home.document_tokens) * max(1, len(near.stripes))
    assert len(near.stripes) == len(placed.stripes)
    if topology.num_nodes == 1:  # the best match is at least half of any other
        assert 2 * tokens_at_home(home, near) >= tokens_at_home(home, placed)


def test_ranks_take_the_parts_that_share_most_tokens_with_their_batches() -> None:
    home = Layout.from_packs([[6], [5], [4], [3]])
    placed = Layout.from_segments([6, 5, 4, 3], [[(3, 0, 3)], [(2, 0, 4)], [(1, 0, 5)], [(0, 0, 6)]])
    assert tokens_at_home(home, placed) == 0
    assert tokens_at_home(home, near_home(home, placed, Topology(4, 4))) == 18
    assert tokens_at_home(home, near_home(home, placed, Topology(4, 2))) == 18
    assert tokens_at_home(home, near_home(home, placed, Topology(4, 2**31 - 1))) == 18
    # Where the last node is smaller, ranks 0 to 2 are one node, and the part of rank 3 is far from its home.
    assert tokens_at_home(home, near_home(home, placed, Topology(4, 3))) == 9


def tokens_at_home(home: Layout, placed: Layout) -> int:
    """Tokens on the rank whose batch holds them."""
    return int(placed.segment_tokens[home.segment_rank[placed.segment_document] == placed.segment_rank].sum())


def slice_of(ranks: range) -> slice:
    return slice(ranks.start, ranks.stop)
