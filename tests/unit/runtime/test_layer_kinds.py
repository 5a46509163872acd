"""Kinds of layers: one layout, and a routing, facts and kept rows for each mask."""

import pytest
import torch

from distca_hf.comm.transport import LocalTransport
from distca_hf.config import DistCAConfig
from distca_hf.cost import CAUSAL_MASK, LayerMasks, Mask
from distca_hf.errors import PlanError
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.layout import Layout
from distca_hf.planning.kinds import RoutedKinds
from distca_hf.planning.plan import plan_in_place
from distca_hf.runtime.layer_kinds import LayerKinds, PinnedKinds
from distca_hf.runtime.retention import HeldLayers, PassLayers, Regions
from support.parity import live_plan


LAYOUT = Layout.from_segments([12, 5], [[(0, 0, 9)], [(0, 9, 12), (1, 0, 5)]])
FULL = AttentionSpec(scale=0.25)
CPU = torch.device("cpu")
GIB = 2**30


def window(tokens: int) -> AttentionSpec:
    return FULL._replace(window_tokens=tokens)


def kinds_of(*layer_masks: tuple[Mask, int], rank: int = 1, **settings: object) -> LayerKinds:
    pinned = PinnedKinds.prepare(RoutedKinds.of(plan_in_place(LAYOUT), rank, layer_masks=layer_masks))
    num_layers = sum(count for _, count in layer_masks)
    layers, config = PassLayers(num_layers, layer_masks), DistCAConfig(**settings)  # type: ignore[arg-type]
    return LayerKinds(pinned.planned(CPU, 7), config, "rank 1, micro-batch 0", layers)


def test_a_window_as_long_as_every_document_is_none() -> None:
    kinds = kinds_of((CAUSAL_MASK, 1), (Mask(12), 4), (Mask(11), 2))
    assert [kinds.spec(spec) for spec in (FULL, window(12), window(40), window(11))] == [FULL, FULL, FULL, window(11)]
    assert len(list(kinds)) == 2


def test_facts_of_all_layers_are_means_over_them() -> None:
    pinned = RoutedKinds.of(plan_in_place(LAYOUT), 0, layer_masks=((CAUSAL_MASK, 1), (Mask(2), 3)))
    full, short = (pinned.plans[mask].facts for mask in (CAUSAL_MASK, Mask(2)))
    assert full.work == (45, 33 + 15)
    assert short.work == (17, 6 + 9)
    assert pinned.facts.work == ((45 + 3 * 17) // 4, (48 + 3 * 15) // 4)
    assert (full.key_rows_received, short.key_rows_received) == ((0, 9), (0, 1))
    assert pinned.facts.key_rows_received == (0, 3)
    of_layers = (48 + 3 * 17) / ((45 + 48 + 3 * 32) / 2)  # ranks meet in every layer
    assert pinned.facts.imbalance == pytest.approx(of_layers)


def test_a_window_that_was_not_known_is_routed_when_a_layer_asks_for_it() -> None:
    kinds = kinds_of((CAUSAL_MASK, 1))
    assert len(list(kinds)) == 1
    assert kinds.of(window(4)).plan.forward.remote_kv_rows == 3
    assert kinds.of(window(4)) is kinds.of(window(4))
    assert len(list(kinds)) == 2


def test_a_mask_that_was_not_planned_is_refused_by_name_where_nothing_can_route_it() -> None:
    live = live_plan(Layout.from_segments([5], [[(0, 0, 5)]]), LocalTransport(), DistCAConfig())
    assert live.kinds.of(FULL).plan.forward.num_rows == live.kinds.num_rows == 5
    with pytest.raises(PlanError, match=r"a window of 3 tokens, .*routings for no window"):
        live.kinds.of(window(3))


def test_halos_count_before_the_rows_of_full_layers() -> None:
    """Rank 1 receives 9 rows in each of 2 full layers, and 3 in each of 4 with a window."""
    q, k, v = (torch.zeros(8, heads, 4) for heads in (2, 1, 1))
    row_bytes = 2 * 4 * 4
    for spare, keeps in ((0, True), (-1, False)):
        budget = (2 * 9 + 4 * 3) * row_bytes + spare
        kinds = kinds_of((CAUSAL_MASK, 2), (Mask(4), 4), kv_budget_gib=budget / GIB)
        assert kinds.of(window(4)).retention.keeps_received(q, k, v)
        assert kinds.of(FULL).retention.keeps_received(q, k, v) == keeps


def test_nothing_of_a_window_is_kept_where_nothing_is_to_be() -> None:
    q, k, v = (torch.zeros(8, heads, 4) for heads in (2, 1, 1))
    kinds = kinds_of((CAUSAL_MASK, 2), (Mask(4), 4), kv_residency="refetch")
    assert not kinds.of(window(4)).retention.keeps_received(q, k, v)


# --- layers of a pass that hold rows until backward, and those that are recomputed


MIXED: LayerMasks = ((CAUSAL_MASK, 2), (Mask(8), 3), (Mask(16), 5))
EIGHT, SIXTEEN = Mask(8), Mask(16)
EACH: Regions = ((CAUSAL_MASK,), (EIGHT,), (EIGHT,), (SIXTEEN,))
TOGETHER: Regions = ((CAUSAL_MASK, EIGHT, EIGHT), (CAUSAL_MASK, EIGHT), (SIXTEEN,))


@pytest.mark.parametrize(
    ("layers", "longest_document_tokens", "expected"),
    [
        (PassLayers(10, MIXED), 100, {0: (2, 0, 0), 8: (3, 0, 0), 16: (5, 0, 0)}),
        (PassLayers(10, MIXED, EACH), 100, {0: (1, 1, 1), 8: (1, 2, 1), 16: (4, 1, 1)}),
        (PassLayers(10, MIXED, TOGETHER), 100, {0: (0, 2, 1), 8: (0, 3, 2), 16: (4, 1, 1)}),
        # No document of the micro-batch is longer than a window: its layers are full ones.
        (PassLayers(10, MIXED, EACH), 16, {0: (5, 2, 1), 8: (1, 2, 1)}),
        (PassLayers(10, MIXED, TOGETHER), 8, {0: (4, 6, 3)}),
        # Every layer runs twice.
        (PassLayers(20, MIXED, EACH), 100, {0: (2, 2, 1), 8: (2, 4, 1), 16: (8, 2, 1)}),
        # A window that no layer was known to have: all may have it.
        (PassLayers(10, MIXED, EACH), 100, {32: (6, 4, 1)}),
        (PassLayers(), 100, {0: (1, 0, 0), 4: (1, 0, 0)}),
    ],
)
def test_layers_of_each_kind(
    layers: PassLayers, longest_document_tokens: int, expected: dict[int, tuple[int, int, int]]
) -> None:
    for window_tokens, numbers in expected.items():
        assert layers.of(Mask(window_tokens or None), longest_document_tokens) == HeldLayers(*numbers)
