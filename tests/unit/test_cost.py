"""Costs of layers that attend in other ways than causally to everything, against sums over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL, Cost, LayerType, causal_pairs
from distca_hf.errors import ConfigError


HYBRID = Cost((LayerType(1), LayerType(5, window_tokens=7)))
COSTS = [CAUSAL, Cost((LayerType(window_tokens=7),)), HYBRID, Cost((LayerType(3, causal=False),))]


def token_cost(layer_type: LayerType, position: int, document_tokens: int) -> int:
    if not layer_type.causal:
        return layer_type.layers * document_tokens
    return layer_type.layers * min(position + 1, layer_type.window_tokens or document_tokens)


@given(data=st.data(), cost=st.sampled_from(COSTS), tokens=st.integers(1, 40))
def test_work_is_the_sum_over_tokens(data: st.DataObject, cost: Cost, tokens: int) -> None:
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    expected = sum(token_cost(kind, at, tokens) for kind in cost.layer_types for at in range(start, stop))

    assert cost.work(start, stop, tokens) == expected
    assert cost.work_of(np.array([start]), np.array([stop]), np.array([tokens])).tolist() == [expected]
    assert cost.of_documents([1, tokens])(1, start, stop) == expected


@given(cost=st.sampled_from(COSTS), tokens=st.integers(2, 60))
def test_cost_never_falls_along_a_document(cost: Cost, tokens: int) -> None:
    along = [cost.work(at, at + 1, tokens) for at in range(tokens)]

    assert along == sorted(along)


def test_a_window_as_long_as_the_document_is_none() -> None:
    for stop in (1, 500, 1000):
        assert Cost((LayerType(window_tokens=1000),)).work(0, stop, 1000) == causal_pairs(0, stop)


def test_sums_are_exact_in_large_worlds() -> None:
    """512 documents of 512K tokens, 8 head groups, 80 layers."""
    tokens, layers = 2**19, 80
    lengths = np.full(512, tokens)
    work = Cost((LayerType(layers),)).work_of(np.zeros(512, dtype=np.int64), lengths, lengths)

    assert 8 * sum(work.tolist()) == 8 * int(work.sum()) == 8 * layers * 512 * tokens * (tokens + 1) // 2


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: LayerType(0), "layers=0"),
        (lambda: LayerType(window_tokens=0), "window_tokens=0"),
        (lambda: LayerType(window_tokens=8, causal=False), "needs causal=True"),
        (lambda: Cost(()), "at least one type"),
    ],
)
def test_impossible_costs_are_refused(make: object, part: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=part):
        make()
