"""Which heads of local calls are computed when: all of them once, and about as much late as is asked for."""

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
from distca_hf.runtime.alike_layers import LayerCalls, divide_calls
from distca_hf.runtime.device_routing import DeviceCall, PinnedRouting


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
