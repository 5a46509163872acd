"""Placement for full attention and windows at once: tokens and full work are even, windows about even."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.lengths import read_lengths
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, Mask, imbalance
from distca_hf.layout import Layout, Topology
from distca_hf.placement.place import place
from distca_hf.placement.predicted import LayersByMask, PredictedTime
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import key_transfers
from distca_hf.recipe import LENGTHS
from support.thorough import is_thorough


MODELS: list[LayerMasks] = [
    ((Mask(), 1), (Mask(64), 5)),
    ((Mask(), 1), (Mask(1024), 5)),
    ((Mask(), 1), (Mask(4096), 3)),
    ((Mask(), 2), (Mask(256), 2), (Mask(2048), 4)),
    ((Mask(8192), 1), (Mask(1024), 3)),
    ((Mask(512), 1),),
]
# Promise of placement, and one token's cost in each line.
MOST_OFF = 0.008
TOKENS_OFF = 4
# Keys that move, in those of placement for full attention alone, where these are more than 100,000 tokens.
MOST_KEYS = 1.5


def mixed_lengths(rng: random.Random, tokens: int) -> list[int]:
    """Dust, documents of medium length and a few giants, in any proportion."""
    giants, medium = rng.choice([0.0, 0.01, 0.1]), rng.choice([0.0, 0.1, 0.9])
    lengths: list[int] = []
    while tokens:
        kind = rng.random()
        mean = tokens / 3 if kind < giants else 8_000 if kind < giants + medium else 600
        lengths.append(min(tokens, max(1, int(rng.lognormvariate(math.log(mean), 0.8)))))
        tokens -= lengths[-1]
    return lengths


def assert_every_token_is_placed_once(layout: Layout, lengths: list[int]) -> None:
    segments = sorted(segment for rank in range(layout.num_ranks) for segment in layout.held_by(rank))
    ends = {document: stop for document, _, stop in segments}
    starts = {document: start for document, start, _ in reversed(segments)}
    assert starts == dict.fromkeys(range(len(lengths)), 0)
    assert ends == dict(enumerate(lengths))
    assert all(one[2] == other[1] for one, other in pairwise(segments) if one[0] == other[0])


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 8, 13, 16, 32]),
    ranks_per_node=st.sampled_from([1, 4, 8, 32]),
    head_groups=st.sampled_from([1, 8]),
    layer_masks=st.sampled_from(MODELS),
)
def test_tokens_and_work_of_the_widest_mask_are_even(
    seed: int, num_ranks: int, ranks_per_node: int, head_groups: int, layer_masks: LayerMasks
) -> None:
    rng = random.Random(seed)
    lengths = mixed_lengths(rng, num_ranks * rng.choice([40, 3_000, 16_384]) - rng.randint(0, 30))
    topology = Topology(num_ranks, ranks_per_node)
    layout = place(lengths, num_ranks, topology=topology, head_groups=head_groups, layer_masks=layer_masks)
    kinds = LayersByMask.of(layer_masks, max(lengths))
    groups = head_groups if kinds.widest == Mask() else 1
    work = plan_in_place(layout, groups, mask=kinds.widest).work / groups

    assert_every_token_is_placed_once(layout, lengths)
    assert np.ptp(layout.rank_tokens) <= 1
    width = min(max(lengths), kinds.widest.window_tokens or max(lengths))
    assert np.abs(work - work.mean()).max() <= MOST_OFF * work.mean() + TOKENS_OFF * width


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([2, 8, 16]), layer_masks=st.sampled_from(MODELS[:4]))
def test_predicted_time_is_at_most_that_of_placement_for_full_attention(
    seed: int, num_ranks: int, layer_masks: LayerMasks
) -> None:
    lengths = mixed_lengths(random.Random(seed), num_ranks * 16_384)
    kinds = LayersByMask.of(layer_masks, max(lengths))
    for_all, for_full = (
        PredictedTime.of(place(lengths, num_ranks, layer_masks=layers), kinds, [1.0] * num_ranks)
        for layers in (layer_masks, CAUSAL_LAYERS)
    )

    assert for_all.total <= for_full.total
    assert for_all.attention >= for_all.even * (1 - 1e-9)


def shipped_batch(name: str, tokens: int, seed: int) -> list[int]:
    """Draws documents of a shipped file until a micro-batch is full; the last one is cut."""
    lengths = np.random.default_rng(seed).permutation(read_lengths(LENGTHS.find(name)).tokens)
    ends = np.cumsum(np.minimum(lengths, tokens))
    count = int(np.searchsorted(ends, tokens)) + 1
    batch = np.minimum(lengths[:count], tokens)
    batch[-1] -= ends[count - 1] - tokens
    return batch.tolist()


def key_tokens(layout: Layout, head_groups: int) -> int:
    """Counts tokens whose keys move in a layer with full attention, of all heads together."""
    plan = plan_in_place(layout, head_groups)
    return int(key_transfers(plan).rows_between(layout.num_ranks).sum()) // plan.tasks.head_groups


@pytest.mark.parametrize("name", ["pretrain", "prolong"])
@pytest.mark.parametrize("num_ranks", [2, 8, 64] if is_thorough() else [8, 64])
@pytest.mark.parametrize(
    ("window_tokens", "layers"),
    [(128, 1), (1024, 5), (2048, 3), (4096, 3)] if is_thorough() else [(128, 1), (4096, 3)],
)
def test_every_kind_of_layer_is_even_on_shipped_lengths(
    name: str, num_ranks: int, window_tokens: int, layers: int
) -> None:
    window = Mask(window_tokens)
    topology = Topology(num_ranks, min(num_ranks, 8))
    keys, keys_for_full = [], []
    for seed in range(3):
        lengths = shipped_batch(name, num_ranks * 65_536, seed)
        layout = place(
            lengths, num_ranks, topology=topology, head_groups=8, layer_masks=((Mask(), 1), (window, layers))
        )
        for_full = place(lengths, num_ranks, topology=topology, head_groups=8)
        keys.append(key_tokens(layout, 8))
        keys_for_full.append(key_tokens(for_full, 8))

        assert plan_in_place(layout, 8).imbalance <= 1.01
        assert imbalance(layout.rank_work_of(window)) <= 1.15
    if sum(keys_for_full) > 3 * 100_000:
        assert sum(keys) <= MOST_KEYS * sum(keys_for_full)
