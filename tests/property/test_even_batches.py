"""Batches that are even: rows stay if ranks take about the same time, and move if they do not."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, Mask
from distca_hf.data.documents import split_documents
from distca_hf.flops import LLAMA_8B_COSTS, StepCost, StepFlops, costs_to_place
from distca_hf.layout import Layout, Topology
from distca_hf.placement.given import place_given, rank_seconds, tokens_between
from support.published_mixes import file_lengths


LLAMA = LLAMA_8B_COSTS.both
# Qwen3-0.6B: 28 layers of 15.7 million weights, 16 heads of 128. Attention is a larger part of its work.
SMALL = costs_to_place(StepFlops.of(28 * 15_728_640, 28 * 15_728_640, 2 * 256 * 16 * 28)).both
PAIRS_ALONE = StepCost(0.0, 1.0)
WINDOWS: LayerMasks = ((Mask(), 2), (Mask(100), 6))
RANKS, PACK_TOKENS = 4, 65536


def uneven(layout: Layout, cost: StepCost, layer_masks: LayerMasks = CAUSAL_LAYERS) -> float:
    """Largest over mean time of the ranks."""
    seconds = rank_seconds(layout, layer_masks, cost)
    return float(seconds.max() / seconds.mean())


def moved(home: Layout, placed: Layout) -> int:
    """Tokens that are computed on another rank than their batch's."""
    between = tokens_between(home, placed)
    return int(between.sum() - between.trace())


@given(
    st.lists(st.lists(st.integers(1, 6000), min_size=1, max_size=8), min_size=2, max_size=6),
    st.sampled_from([CAUSAL_LAYERS, WINDOWS]),
    st.floats(0, 1e4),
    st.booleans(),
)
def test_rows_stay_exactly_if_tokens_and_time_are_even(
    packs: list[list[int]], layer_masks: LayerMasks, token_pairs: float, is_filled: bool
) -> None:
    """A token takes as long as `token_pairs` pairs. Filled, all ranks have the same tokens."""
    if is_filled:
        most = max(map(sum, packs))
        packs = [[*of_rank, *[most - sum(of_rank)] * (most > sum(of_rank))] for of_rank in packs]
    home, cost = Layout.from_packs(packs), StepCost(token_pairs, 1.0)
    is_even = uneven(home, cost, layer_masks) <= 1.02 and home.rank_tokens.max() <= 1.02 * home.rank_tokens.mean()
    placed = place_given(home, Topology(len(packs), len(packs)), 1, layer_masks, cost)

    assert (placed is home) == is_even
    if not is_even:
        assert placed.rank_tokens.max() - placed.rank_tokens.min() <= 1


def test_seconds_are_those_of_tokens_and_of_pairs_in_the_mean_layer() -> None:
    home, cost = Layout.from_packs([[3, 2], [200]]), StepCost(10.0, 2.0)

    assert rank_seconds(home, CAUSAL_LAYERS, cost).tolist() == [50 + 2 * (6 + 3), 2000 + 2 * 20_100]
    # A pair in a window of 100 takes 1 + 512 / 100 times as long; documents up to 100 tokens see no window.
    in_window = 100 * 101 // 2 + 100 * 100
    expected = 2000 + 2 * (2 * 20_100 + 6 * 6.12 * in_window) / 8
    assert rank_seconds(home, WINDOWS, cost)[1] == pytest.approx(expected)
    short = Layout.from_packs([[3, 2], [100]])
    assert rank_seconds(short, WINDOWS, cost).tolist() == rank_seconds(short, CAUSAL_LAYERS, cost).tolist()


def packed(longest_tokens: int) -> list[list[int]]:
    """Full packs of real documents of up to this length, each into the fullest pack with enough room."""
    random.seed(longest_tokens)
    documents = split_documents(np.array(random.sample(file_lengths("pretrain"), 3000)), longest_tokens)[2]
    packs, rooms = list[list[int]](), list[int]()
    for tokens in sorted(documents.tolist(), reverse=True):
        pack = min((at for at, room in enumerate(rooms) if room >= tokens), key=rooms.__getitem__, default=len(packs))
        if pack == len(packs):
            packs.append([])
            rooms.append(PACK_TOKENS)
        packs[pack].append(tokens)
        rooms[pack] -= tokens
    full = [pack for pack, room in zip(packs, rooms, strict=True) if room <= PACK_TOKENS // 200]
    random.shuffle(full)
    return full[: 40 * RANKS]


@pytest.mark.parametrize(
    ("cost", "longest_tokens", "share"),
    [(LLAMA, 2048, 0.0), (LLAMA, 4096, 0.15), (LLAMA, 8192, 0.8), (SMALL, 2048, 0.8), (SMALL, 8192, 1.0)],
    ids=["8B, 2K", "8B, 4K", "8B, 8K", "0.6B, 2K", "0.6B, 8K"],
)
def test_fewer_rows_of_real_documents_move_than_for_even_pairs(
    cost: StepCost, longest_tokens: int, share: float
) -> None:
    """Packs of 64K tokens; at most this share of the rows that even pairs alone would move."""
    packs, topology = packed(longest_tokens), Topology(RANKS, RANKS)
    moved_for_pairs = moved_for_time = 0
    for first in range(0, len(packs) - RANKS + 1, RANKS):
        home = Layout.from_packs(packs[first : first + RANKS])
        for_time = place_given(home, topology, 8, cost=cost)
        assert uneven(for_time, cost) <= 1.02
        moved_for_time += moved(home, for_time)
        moved_for_pairs += moved(home, place_given(home, topology, 8, cost=PAIRS_ALONE))

    assert moved_for_pairs > 0.1 * sum(map(sum, packs))
    assert moved_for_time <= share * moved_for_pairs
