"""Which heads of local calls are computed when: all of them once, and about as much late as is asked for."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.kernels.interface import Spans
from distca_hf.layout import Layout
from distca_hf.planning.kernel_calls import CallKind
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.routing import route
from distca_hf.runtime.alike_layers import LayerCalls, divide_calls, with_kv_heads
from distca_hf.runtime.device_routing import DeviceCall, DeviceRouting, PinnedRouting
from distca_hf.runtime.kernel_calls import view_of
from support.layouts import random_layout, random_plan


def call(row: int, pairs_of_head: int, heads: tuple[int, int], kind: CallKind = CallKind.LOCAL) -> DeviceCall:
    rows, offsets = slice(row, row + 1), torch.tensor([0, 1], dtype=torch.int32)
    pairs = pairs_of_head * (heads[1] - heads[0])
    return DeviceCall(kind, rows, rows, Spans(offsets, offsets, 1, 1), heads, heads[1] - heads[0], pairs)


def told(calls: tuple[DeviceCall, ...]) -> list[tuple[int, tuple[int, int], int]]:
    return [(part.queries.start, part.heads, part.pairs) for part in calls]


@pytest.mark.parametrize(
    ("share", "early", "late"),
    [
        (0.0, [(0, (0, 4), 40), (7, (0, 4), 400)], []),
        (0.23, [(0, (0, 4), 40), (7, (0, 3), 300)], [(7, (3, 4), 100)]),
        (0.25, [(0, (0, 3), 30), (7, (0, 3), 300)], [(0, (3, 4), 10), (7, (3, 4), 100)]),
        (0.4, [(0, (0, 4), 40), (7, (0, 2), 200)], [(7, (2, 4), 200)]),
        (0.95, [(0, (0, 2), 20)], [(0, (2, 4), 20), (7, (0, 4), 400)]),
        (1.0, [], [(0, (0, 4), 40), (7, (0, 4), 400)]),
    ],
)
def test_last_heads_of_last_calls_are_late(share: float, early: list[object], late: list[object]) -> None:
    parts = divide_calls([call(0, 10, (0, 4)), call(7, 100, (0, 4))], share)

    assert [told(part) for part in parts] == [early, late]


def test_no_calls_are_divided_in_none() -> None:
    assert divide_calls([], 0.5) == ((), ())


@given(
    calls=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3), st.integers(1, 5)), max_size=6),
    share=st.floats(0, 1),
)
def test_every_head_is_computed_once_and_about_the_share_is_late(
    calls: list[tuple[int, int, int]], share: float
) -> None:
    made = [call(row, pairs, (first, first + heads)) for row, (pairs, first, heads) in enumerate(calls)]
    early, late = divide_calls(made, share)

    computed = Counter((part.queries.start, head) for part in (*early, *late) for head in range(*part.heads))
    assert computed == Counter((part.queries.start, head) for part in made for head in range(*part.heads))
    for part in (early, late):
        assert [of.queries.start for of in part] == sorted(of.queries.start for of in part)
    total = sum(part.pairs for part in made)
    assert sum(part.pairs for part in (*early, *late)) == total
    # A call takes whole heads, the nearest number of them: what one misses the next makes up, but for the last one.
    largest = max((pairs for pairs, _, _ in calls), default=0)
    assert abs(sum(part.pairs for part in late) - share * total) <= largest / 2 + 1e-6 * total


def test_groups_become_the_kv_heads_of_a_layer() -> None:
    groups = [call(0, 10, (0, 2)), call(5, 10, (1, 2), CallKind.PREFIX)]

    assert told(with_kv_heads(groups, 4)) == [(0, (0, 8), 20), (5, (4, 8), 10)]
    assert [part.rows_per_token for part in with_kv_heads(groups, 4)] == [2, 1]


def maps_of(seed: int, head_groups: int) -> DeviceRouting:
    rng = random.Random(seed)
    return PinnedRouting.prepare(route(random_plan(rng, random_layout(rng, 2), head_groups), 0)).to(
        torch.device("cpu")
    )


@pytest.mark.parametrize("results_leave", [True, False])
@pytest.mark.parametrize("rows_come", [True, False])
def test_nothing_is_late_unless_results_leave(rows_come: bool, results_leave: bool) -> None:
    layout = Layout.from_segments([300, 300], [[(0, 0, 200), (1, 100, 300)], [(0, 200, 300), (1, 0, 100)]])
    maps = PinnedRouting.prepare(route(plan_in_place(layout), 0)).to(torch.device("cpu"))
    calls = LayerCalls.of(maps, 32, rows_come=rows_come, results_leave=results_leave)

    total = sum(part.pairs for part in maps.local)
    late = sum(part.pairs for part in calls.late)
    assert sum(part.pairs for part in calls.early) + late == pytest.approx(total, rel=1e-3)
    # Some of what may wait hides the rows that come, too.
    expected = maps.late_share * results_leave / (2 if rows_come else 1)
    assert late / total == pytest.approx(expected, abs=1 / 32)
    assert bool(calls.late) == results_leave


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("head_groups", [1, 2])
def test_calls_name_heads_of_the_layer(head_groups: int, kv_heads: int) -> None:
    for seed in range(10):
        maps = maps_of(seed, head_groups)
        calls = LayerCalls.of(maps, kv_heads, rows_come=True, results_leave=True)

        assert len(calls.prefix) == len(maps.chunks)
        for part in (*calls.early, *calls.late, *(part for of_chunk in calls.prefix for part in of_chunk)):
            assert 0 <= part.heads[0] < part.heads[1] <= kv_heads


def test_parts_are_taken_of_tensors_that_are_alike() -> None:
    wide, other = torch.arange(48).view(2, 4, 6), -torch.arange(48).view(2, 4, 6)
    whole, like = wide[:, 1:], other[:, 1:]
    part = whole[1:, :, 2:4]

    assert torch.equal(view_of(part, whole)(like), like[1:, :, 2:4])
    assert view_of(part, whole)(like).untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert view_of(whole, whole)(like) is like
