"""Masks and costs of layers, against sums over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import CAUSAL, Cost, Mask
from distca_hf.errors import ConfigError


COSTS = [CAUSAL, Cost(((Mask(7), 1),)), Cost(((Mask(), 1), (Mask(7), 5)))]
MASKS = st.just(Mask()) | st.builds(Mask, st.integers(1, 45), chunked=st.booleans())
POSITIONS = st.integers(0, 40)


def keys_of(mask: Mask, position: int) -> list[int]:
    """Keys that a query attends, one by one."""
    if mask.chunked and mask.window_tokens is not None:
        return [key for key in range(position + 1) if key // mask.window_tokens == position // mask.window_tokens]
    return [key for key in range(position + 1) if mask.window_tokens is None or position - key < mask.window_tokens]


@given(mask=MASKS, position=POSITIONS)
def test_the_first_key_of_a_query(mask: Mask, position: int) -> None:
    assert mask.first_key(position) == keys_of(mask, position)[0]
    assert mask.first_key(np.array([[position]])).tolist() == [[keys_of(mask, position)[0]]]


@given(mask=MASKS, start=POSITIONS, tokens=POSITIONS)
def test_pairs_are_counted_key_by_key(mask: Mask, start: int, tokens: int) -> None:
    expected = sum(len(keys_of(mask, position)) for position in range(start, start + tokens))

    assert mask.pairs(start, start + tokens) == expected
    assert mask.pairs_before(start + tokens) == mask.pairs(0, start) + expected
    assert mask.pairs_of(np.array([start]), np.array([start + tokens])).tolist() == [expected]
    inside = sum(len([key for key in keys_of(mask, at) if key >= start]) for at in range(start, start + tokens))
    assert mask.pairs_inside(np.array([start]), np.array([start + tokens])).tolist() == [inside]


@given(mask=MASKS, pairs=st.integers(0, 800))
def test_queries_of_some_pairs(mask: Mask, pairs: int) -> None:
    expected = max(queries for queries in range(801) if mask.pairs(0, queries) <= pairs)

    assert mask.queries_of(pairs) == expected


@given(
    mask=st.just(Mask()) | st.builds(Mask, st.integers(1, 2**31), chunked=st.booleans()),
    queries=st.integers(0, 2**31),
)
def test_long_documents_are_exact(mask: Mask, queries: int) -> None:
    pairs = mask.pairs_before(queries)

    assert mask.queries_of(pairs) == queries
    assert pairs == 0 or mask.queries_of(pairs - 1) == queries - 1


@given(mask=MASKS, position=st.floats(0, 1e6))
def test_the_area_is_near_the_pairs_and_has_an_inverse(mask: Mask, position: float) -> None:
    assert mask.position(mask.area(position)) == pytest.approx(position, abs=1e-6)
    pairs = mask.pairs_before(int(position))
    assert 0 <= pairs - mask.area(int(position)) <= int(position) / 2


@given(data=st.data(), cost=st.sampled_from(COSTS), tokens=st.integers(1, 40))
def test_work_is_the_sum_over_layers_and_tokens(data: st.DataObject, cost: Cost, tokens: int) -> None:
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    expected = sum(count * len(keys_of(mask, at)) for mask, count in cost.layers for at in range(start, stop))

    assert cost.work(start, stop) == expected
    assert cost.work_of(np.array([start]), np.array([stop]), np.array([tokens])).tolist() == [expected]
    assert cost.of_documents([1, tokens])(1, start, stop) == expected


@given(cost=st.sampled_from(COSTS), tokens=st.integers(2, 60))
def test_cost_never_falls_along_a_document(cost: Cost, tokens: int) -> None:
    along = [cost.work(at, at + 1) for at in range(tokens)]

    assert along == sorted(along)


def test_sums_are_exact_in_large_worlds() -> None:
    """512 documents of 512K tokens, 8 head groups, 80 layers."""
    tokens, layers = 2**19, 80
    lengths = np.full(512, tokens)
    work = Cost(((Mask(), layers),)).work_of(np.zeros(512, dtype=np.int64), lengths, lengths)

    assert 8 * sum(work.tolist()) == 8 * int(work.sum()) == 8 * layers * 512 * tokens * (tokens + 1) // 2


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Mask(0), "window_tokens=0 must be at least 1"),
        (lambda: Cost(()), "at least one mask"),
        (lambda: Cost(((Mask(), 3), (Mask(8), 0))), r"0 layers have a window of 8 tokens"),
    ],
)
def test_impossible_costs_are_refused(make: object, part: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=part):
        make()
