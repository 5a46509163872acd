"""Even windows: pairs left out, kinds of layers, what a deal does where it has no room, and refusals."""

import random
from pathlib import Path

import numpy as np
import pytest

from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_LAYERS, LayerMasks, Mask, imbalance
from distca_hf.errors import ConfigError
from distca_hf.layout import Layout, Topology
from distca_hf.placement.place import place
from distca_hf.placement.predicted import LayersByMask


WINDOW = Mask(1024)
LAYERS = ((Mask(), 1), (WINDOW, 5))


def one_giant_and_others(seed: int, num_ranks: int) -> list[int]:
    rng = random.Random(seed)
    lengths = [40_000, 60_000]
    while sum(lengths) < num_ranks * 32_768:
        lengths.append(max(1, int(rng.lognormvariate(7.5, 1.2))))
    return lengths


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
