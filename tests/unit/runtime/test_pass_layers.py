"""Layers of a pass by their kind: those that hold rows until backward, and those that are recomputed."""

import pytest

from distca_hf.cost import CAUSAL_MASK, LayerMasks, Mask
from distca_hf.runtime.retention import HeldLayers, PassLayers, Regions


MIXED: LayerMasks = ((CAUSAL_MASK, 2), (Mask(8), 3), (Mask(16), 5))
FULL, EIGHT, SIXTEEN = CAUSAL_MASK, Mask(8), Mask(16)
EACH: Regions = ((FULL,), (EIGHT,), (EIGHT,), (SIXTEEN,))
TOGETHER: Regions = ((FULL, EIGHT, EIGHT), (FULL, EIGHT), (SIXTEEN,))


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
