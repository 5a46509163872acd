"""Even windows: pairs left out, kinds of layers, what a deal does where it has no room, and refusals."""

import random
from pathlib import Path

import numpy as np
import pytest

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, Cost, LayerMasks, Mask, imbalance
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout, Topology
from distca_hf.placement.accordion import Goal
from distca_hf.placement.even_windows import EvenWindows
from distca_hf.placement.piece_pool import PiecePool, work_of
from distca_hf.placement.place import place
from distca_hf.placement.predicted import LayersByMask, PredictedTime, pair_time


WINDOW = Mask(1024)
LAYERS = ((Mask(), 1), (WINDOW, 5))


def one_giant_and_others(seed: int, num_ranks: int) -> list[int]:
    rng = random.Random(seed)
    lengths = [40_000, 60_000]
    while sum(lengths) < num_ranks * 32_768:
        lengths.append(max(1, int(rng.lognormvariate(7.5, 1.2))))
    return lengths


def dealt_evenly(lengths: list[int], shares: int, may_miss: float) -> list[tuple[int, int, float]]:
    """Returns tokens, work and pairs left out of each share."""
    kinds = LayersByMask.of(LAYERS, max(lengths))
    pool = PiecePool.of_documents(np.sort(lengths), kinds.cost, np.zeros_like(lengths))
    work, tokens = pool.work_left, sum(lengths)
    goals = [
        Goal(tokens * (share + 1) // shares - tokens * share // shares, work / shares, work / shares)
        for share in range(shares)
    ]
    even = EvenWindows(kinds, window_time=0.0, time_left_out=0.0, may_miss=may_miss, alike=1.0)
    dealt = even.deal(pool, goals, off=3e-3)
    return [(sum(stop - start for _, _, start, stop, _ in held), work_of(held), even.left_out(held)) for held in dealt]


@pytest.mark.parametrize("seed", range(5))
def test_every_share_gets_its_tokens_its_work_and_its_part_of_the_pairs_left_out(seed: int) -> None:
    lengths, shares = one_giant_and_others(seed, 8), 8
    dealt = dealt_evenly(lengths, shares, may_miss=0.05)

    work = Cost().work_of(np.zeros(len(lengths), dtype=np.int64), np.array(lengths), np.array(lengths)).sum() / shares
    left_out = sum(of_share for _, _, of_share in dealt) / shares
    for tokens, of_share, pairs in dealt:
        assert abs(tokens - sum(lengths) / shares) < 1
        assert of_share == pytest.approx(work, rel=3e-3)
        assert pairs >= left_out - 0.05 * work


def test_where_no_part_works_lines_are_equal_parts_of_both() -> None:
    """Shares may miss nothing, which no deal of whole documents achieves."""
    lengths = one_giant_and_others(3, 8)
    dealt = dealt_evenly(lengths, 8, may_miss=0.0)

    assert max(tokens for tokens, _, _ in dealt) - min(tokens for tokens, _, _ in dealt) <= 1
    assert imbalance([work for _, work, _ in dealt]) <= 1.01
    assert imbalance([int(pairs) for _, _, pairs in dealt]) <= 1.1


@pytest.mark.parametrize(
    "layers", [LAYERS, ((Mask(), 2), (Mask(256), 2), (Mask(2048), 4)), ((Mask(4096), 1), (Mask(64), 3))]
)
def test_work_in_windows_is_work_of_the_widest_mask_without_the_pairs_left_out(layers: LayerMasks) -> None:
    lengths = np.array([1, 63, 64, 65, 300, 5000, 70_000])
    kinds = LayersByMask.of(layers, 70_000)
    starts = np.zeros_like(lengths)
    widest = sum(count * pair_time(mask) * kinds.widest.pairs_of(starts, lengths) for mask, count in kinds.windows)
    left_out = np.array([kinds.left_out_before(length) for length in lengths.tolist()])

    assert kinds.window_time(lengths) == pytest.approx(float((widest - left_out).sum()))
    assert np.all(np.diff(left_out) >= 0)


def test_windows_as_long_as_every_document_are_full_attention() -> None:
    assert LayersByMask.of(LAYERS, 1024) == LayersByMask(Mask(), 6, ())
    assert LayersByMask.of(LAYERS, 1025) == LayersByMask(Mask(), 1, ((WINDOW, 5),))
    assert LayersByMask.of(((WINDOW, 2), (Mask(64), 1), (WINDOW, 1)), 9000) == LayersByMask(
        WINDOW, 3, ((Mask(64), 1),)
    )


@pytest.mark.parametrize("layer_masks", [(), ((Mask(), 0),)])
def test_models_without_layers_are_refused(layer_masks: tuple[tuple[Mask, int], ...]) -> None:
    with pytest.raises(ConfigError):
        place([10, 20], 2, layer_masks=layer_masks)


def test_without_windows_nothing_changes() -> None:
    lengths = one_giant_and_others(0, 4)
    for layers in (CAUSAL_LAYERS, ((Mask(), 32),), ((Mask(), 1), (Mask(60_000), 3))):
        assert_same(place(lengths, 4, layer_masks=layers), place(lengths, 4))


def assert_same(one: Layout, other: Layout) -> None:
    for rank in range(one.num_ranks):
        assert one.held_by(rank) == other.held_by(rank)


def test_windows_are_even_beside_dust() -> None:
    """Half of the tokens are dust, the others in documents of four windows, and one giant."""
    lengths = [100_000] + [4096] * 40 + [300] * 880
    layout, for_full = (place(lengths, 8, layer_masks=layers) for layers in (LAYERS, CAUSAL_LAYERS))

    assert imbalance(for_full.rank_work_of(WINDOW)) > 1.2
    assert imbalance(layout.rank_work_of(WINDOW)) <= 1.0795
    assert imbalance(layout.rank_work) <= 1.005


@pytest.mark.parametrize("seed", range(3))
def test_documents_in_another_order_are_placed_alike(seed: int) -> None:
    lengths = np.array(one_giant_and_others(seed, 8))
    order = np.random.default_rng(seed).permutation(len(lengths))
    one, other = place(lengths, 8, layer_masks=LAYERS), place(lengths[order], 8, layer_masks=LAYERS)

    def held(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
        return sorted((int(layout.document_tokens[document]), *part) for document, *part in layout.held_by(rank))

    assert [held(one, rank) for rank in range(8)] == [held(other, rank) for rank in range(8)]


def test_shares_of_ranks_hold_with_even_windows() -> None:
    lengths, shares = one_giant_and_others(1, 8), [0.9, 1.1] * 4
    layout = place(lengths, 8, rank_shares=shares, layer_masks=((Mask(), 1), (Mask(4096), 3)))

    assert np.ptp(layout.rank_tokens) <= 1
    assert np.allclose(layout.rank_work / shares, layout.rank_work.mean(), rtol=0.01)


def test_stripes_do_no_harm_to_windows() -> None:
    """A stripe's tokens lie on all ranks of its node evenly, and so does its work in windows."""
    lengths = [400_000] + [3000] * 60 + [400] * 200
    striped, whole = (place(lengths, 8, head_groups=groups, layer_masks=LAYERS) for groups in (8, 1))

    assert striped.stripes
    assert not whole.stripes
    assert imbalance(striped.rank_work_of(WINDOW)) <= imbalance(whole.rank_work_of(WINDOW)) + 0.01


def test_models_of_windows_alone_have_no_stripes_and_even_windows() -> None:
    lengths = [400_000] + [3000] * 60 + [400] * 200
    layout = place(lengths, 16, topology=Topology(16, 8), head_groups=8, layer_masks=((WINDOW, 4),))

    assert not layout.stripes
    assert imbalance(layout.rank_work_of(WINDOW)) <= 1.005


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "layers"),
    [
        ([200, 31, 7, 9, 5], 2, ((Mask(), 1), (Mask(1), 2))),
        ([200, 31, 7, 9, 5], 2, ((Mask(), 1), (Mask(1, chunked=True), 2))),
        ([17, 1000, 3000, 300, 300], 8, ((Mask(3, chunked=True), 2),)),
        ([2, 100, 3, 16, 300, 40, 1000, 300, 3000, 300], 8, ((Mask(256, chunked=True), 2),)),
    ],
)
def test_the_shortest_windows_and_chunks_alone_are_placed(
    lengths: list[int], num_ranks: int, layers: LayerMasks
) -> None:
    layout = place(lengths, num_ranks, layer_masks=layers)

    assert sum(layout.rank_work_of(layers[0][0])) == sum(layers[0][0].pairs(0, tokens) for tokens in lengths)
    assert imbalance(layout.rank_work_of(layers[0][0])) <= 1.1


def test_predicted_time_of_even_ranks_without_keys_is_that_of_their_work() -> None:
    kinds = LayersByMask.of(LAYERS, 2048)
    time = PredictedTime.of(Layout.from_packs([[2048], [2048]]), kinds, [1.0, 1.0])

    assert time.keys == 0
    assert time.total == time.even == Mask().pairs(0, 2048) + 5 * 1.5 * WINDOW.pairs(0, 2048)


def test_kernel_times_and_windows_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "times.json"
    table.write_text('{"query_tokens": [1], "key_tokens": [1, 4096], "seconds": [[1e-6, 2e-6]]}')
    planner = PlacedPlanner(DistCAConfig(tokens_per_rank=2048, kernel_times=str(table)), 2, layer_masks=LAYERS)

    with pytest.raises(ConfigError, match=r"kernel_times=.*times\.json.*window of 1024 tokens.*1025"):
        planner.plan(np.array([1025, 7]))
    planner.check_kernel_times(1024)
    planner.plan(np.array([1024, 7]))


def test_the_planner_places_for_the_layers_of_its_model() -> None:
    lengths = np.array([100_000] + [4096] * 40 + [300] * 880)
    for_all, for_full = (
        PlacedPlanner(DistCAConfig(tokens_per_rank=131_072), 8, layer_masks=layers).plan(lengths).layout
        for layers in (LAYERS, CAUSAL_LAYERS)
    )

    assert imbalance(for_all.rank_work_of(WINDOW)) < imbalance(for_full.rank_work_of(WINDOW)) - 0.1
