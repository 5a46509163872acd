"""Two lines of documents: their tokens, the limit between them, kinds of layers, and refusals."""

import random
from pathlib import Path

import numpy as np
import pytest

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, Mask, imbalance
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout
from distca_hf.placement.lines import MOST_UNEVEN, LayerKinds, tokens_of_lines
from distca_hf.placement.place import place
from distca_hf.placement.predicted import PredictedTime
from distca_hf.topology import Topology


WINDOW = Mask(1024)
LAYERS = ((Mask(), 1), (WINDOW, 5))


def one_giant_and_others(seed: int, num_ranks: int) -> list[int]:
    rng = random.Random(seed)
    lengths = [40_000, 60_000]
    while sum(lengths) < num_ranks * 32_768:
        lengths.append(max(1, int(rng.lognormvariate(7.5, 1.2))))
    return lengths


@pytest.mark.parametrize("num_ranks", range(1, 8))
def test_tokens_of_both_lines_differ_by_one_at_most_and_sum_to_those_of_the_rank(num_ranks: int) -> None:
    for tokens in range(3 * num_ranks + 1):
        rank_tokens = np.diff([tokens * rank // num_ranks for rank in range(num_ranks + 1)]).tolist()
        for short_tokens in range(tokens + 1):
            short, long = tokens_of_lines(rank_tokens, short_tokens)

            assert [sum(of_rank) for of_rank in zip(short, long, strict=True)] == rank_tokens
            assert sum(short) == short_tokens
            assert max(short) - min(short) <= 1
            assert max(long) - min(long) <= 1
            assert min(short + long) >= 0


def test_windows_as_long_as_every_document_are_full_attention() -> None:
    assert LayerKinds.of(LAYERS, 1024) == LayerKinds(Mask(), 6, ())
    assert LayerKinds.of(LAYERS, 1025) == LayerKinds(Mask(), 1, ((WINDOW, 5),))
    assert LayerKinds.of(((WINDOW, 2), (Mask(64), 1), (WINDOW, 1)), 9000) == LayerKinds(WINDOW, 3, ((Mask(64), 1),))


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


def test_limit_is_the_lowest_one_that_is_expected_to_be_enough() -> None:
    lengths = np.sort([600] * 400 + [1400] * 100 + [2500] * 40 + [30_000] * 4)
    kinds = LayerKinds.of(LAYERS, 30_000)
    low, middle, high = (kinds.uneven_bound(lengths, limit) for limit in (1024, 1536, 2048))
    one_line_bound = kinds.uneven_bound(lengths, 0)

    assert low > MOST_UNEVEN > middle == high
    assert kinds.limit_tokens(lengths, one_line_bound) == 1536
    assert kinds.limit_tokens(lengths, 0.4 * one_line_bound) == 1024  # two lines stay below their bounds as well
    assert kinds.limit_tokens(lengths, 0.001) is None


def test_window_work_of_two_lines_is_within_its_bound() -> None:
    """Half of the tokens are dust, the others in documents of four windows, and one giant: one line is uneven."""
    lengths = [100_000] + [4096] * 40 + [300] * 880
    layout, for_full = (place(lengths, 8, layer_masks=layers) for layers in (LAYERS, CAUSAL_LAYERS))
    bound = LayerKinds.of(LAYERS, 100_000).uneven_bound(np.array(lengths), 2048)

    assert imbalance(for_full.rank_work_of(WINDOW)) > 1.2
    assert imbalance(layout.rank_work_of(WINDOW)) <= 1.005 + bound
    assert imbalance(layout.rank_work) <= 1.005


@pytest.mark.parametrize("seed", range(3))
def test_documents_in_another_order_are_placed_alike(seed: int) -> None:
    lengths = np.array(one_giant_and_others(seed, 8))
    order = np.random.default_rng(seed).permutation(len(lengths))
    one, other = place(lengths, 8, layer_masks=LAYERS), place(lengths[order], 8, layer_masks=LAYERS)

    def held(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
        return sorted((int(layout.document_tokens[document]), *part) for document, *part in layout.held_by(rank))

    assert [held(one, rank) for rank in range(8)] == [held(other, rank) for rank in range(8)]


def test_shares_of_ranks_hold_in_two_lines() -> None:
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


def test_predicted_time_of_even_ranks_without_keys_is_that_of_their_work() -> None:
    kinds = LayerKinds.of(LAYERS, 2048)
    time = PredictedTime.of(Layout.from_packs([[2048], [2048]]), kinds, [1.0, 1.0])

    assert time.keys == 0
    assert time.windows_uneven == 0
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
