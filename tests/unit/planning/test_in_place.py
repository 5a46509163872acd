"""Plans: tasks that cover every row once, in one order, under one fingerprint."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from distca_hf.errors import PackingError, PlanError
from distca_hf.layout import Layout
from distca_hf.placement.place import place
from distca_hf.planning.pieces import Tasks
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.prefixes import SharedPrefixes


Task = tuple[int, int, int, int]  # document, start, stop, rank


def as_list(tasks: Tasks) -> list[Task]:
    return list(
        zip(tasks.document.tolist(), tasks.start.tolist(), tasks.stop.tolist(), tasks.rank.tolist(), strict=True)
    )


def tasks_of(rows: list[Task]) -> Tasks:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return Tasks.sort(*columns)


def example() -> Layout:
    return Layout.from_segments([8, 3, 1], [[(1, 0, 3), (0, 0, 2)], [(2, 0, 1), (0, 2, 8)]], [6, 7])


# --- planning in place


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([[(0, 0, 3), (0, 3, 9)]], [(0, 0, 9, 0)]),
        ([[(0, 3, 9), (0, 0, 3)]], [(0, 0, 9, 0)]),
        ([[(0, 0, 3), (0, 5, 9)], [(0, 3, 5)]], [(0, 0, 3, 0), (0, 5, 9, 0), (0, 3, 5, 1)]),
        ([[(0, 0, 3)], [(0, 3, 9)]], [(0, 0, 3, 0), (0, 3, 9, 1)]),
        ([[(0, 0, 2)], [(0, 6, 7), (0, 2, 4), (0, 7, 9), (0, 4, 6)]], [(0, 0, 2, 0), (0, 2, 9, 1)]),
    ],
    ids=["in order", "out of order", "a gap between", "on two ranks", "four of them"],
)
def test_neighbouring_segments_on_one_rank_become_one_task(
    segments: list[list[tuple[int, int, int]]], expected: list[Task]
) -> None:
    assert as_list(plan_in_place(Layout.from_segments([9], segments)).tasks) == expected


def test_plan_does_not_depend_on_the_order_of_segments_within_a_rank() -> None:
    segments = [[(0, 5, 9), (2, 0, 6), (1, 2, 4), (3, 0, 2)], [(1, 0, 2), (0, 0, 5)]]
    turned = [list(reversed(held)) for held in segments]
    plans = [plan_in_place(Layout.from_segments([9, 4, 6, 2], held)) for held in (segments, turned)]

    assert as_list(plans[0].tasks) == as_list(plans[1].tasks)


def test_layout_without_documents_has_no_tasks() -> None:
    plan = plan_in_place(Layout.from_segments([], [[], []], [3, 0]))

    plan.validate()
    assert len(plan.tasks) == 0
    assert plan.work.tolist() == [0, 0]
    assert plan.imbalance == 1.0


def test_work_is_counted_in_attended_pairs() -> None:
    plan = plan_in_place(example())

    assert plan.tasks.pairs.tolist() == [3, 6, 1, 33]
    assert plan.work.tolist() == [9, 34]
    assert plan.imbalance == 34 / 21.5


@pytest.mark.parametrize("tokens", [2**20, 2**31 - 1])
def test_work_of_long_documents_is_an_exact_integer(tokens: int) -> None:
    half = tokens // 2
    plan = plan_in_place(Layout.from_segments([tokens], [[(0, 0, half)], [(0, half, tokens)]]))
    lower = half * (half + 1) // 2

    assert plan.work.tolist() == [lower, tokens * (tokens + 1) // 2 - lower]


# --- tasks that are refused


@pytest.mark.parametrize(
    ("tasks", "parts"),
    [
        ([(0, 0, 2, 0), (0, 3, 5, 0), (1, 0, 2, 0)], ["document 0", "[3, 5)", "2 is next"]),
        ([(0, 0, 3, 0), (0, 2, 5, 1), (1, 0, 2, 0)], ["document 0", "[2, 5)", "3 is next"]),
        ([(0, 0, 5, 0), (1, 1, 2, 0)], ["document 1", "[1, 2)", "0 is next"]),
        ([(0, 0, 5, 0), (0, 0, 5, 1), (1, 0, 2, 0)], ["document 0", "[0, 5)", "5 is next"]),
        ([(0, 0, 5, 0), (0, 5, 5, 0), (1, 0, 2, 0)], ["document 0", "[5, 5)"]),
        ([(0, 0, 4, 0), (1, 0, 2, 0)], ["document 0 has 5 tokens", "cover 4"]),
        ([(0, 0, 6, 0), (1, 0, 2, 0)], ["document 0 has 5 tokens", "cover 6"]),
        ([(0, 0, 5, 0)], ["document 1 has 2 tokens", "cover 0"]),
        ([(0, 0, 5, 0), (1, 0, 2, 2)], ["ranks 0 to 2", "ranks are 0 to 1"]),
        ([(0, 0, 5, -1), (1, 0, 2, 0)], ["ranks -1 to 0", "ranks are 0 to 1"]),
        ([], ["document 0 has 5 tokens", "cover 0"]),
        ([(0, 0, 5, 0), (1, 0, 2, 0), (2, 0, 3, 0)], ["document 2"]),
        ([(0, 0, 5, 0), (-1, 0, 2, 0)], ["document -1"]),
        ([(0, 0, 5, 0), (1, 0, 2, 0), (-1, 0, 2, 0)], ["document -1"]),
    ],
    ids=[
        "gap",
        "overlap",
        "beginning missing",
        "twice",
        "empty",
        "end missing",
        "too long",
        "document missing",
        "unknown rank",
        "negative rank",
        "no tasks",
        "unknown document",
        "negative document in the place of the last",
        "negative document",
    ],
)
def test_tasks_that_do_not_cover_the_layout_are_refused(tasks: list[Task], parts: list[str]) -> None:
    layout = Layout.from_segments([5, 2], [[(0, 0, 5)], [(1, 0, 2)]])
    with pytest.raises(PlanError) as refused:
        tasks_of(tasks).validate(layout)

    for part in parts:
        assert part in str(refused.value)


def test_plan_checks_its_layout_too() -> None:
    plan = plan_in_place(example())
    broken = dataclasses.replace(plan.layout, rank_rows=np.array([6, 6]))

    with pytest.raises(PackingError, match="rank 1 has 6 rows for 7 tokens"):
        Plan(broken, plan.tasks).validate()


# --- fingerprint


LAYOUT_ARRAYS = [field.name for field in dataclasses.fields(Layout) if field.name not in ("stripes", "shared")]
TASK_ARRAYS = [field.name for field in dataclasses.fields(Tasks) if field.name not in ("head_groups", "mask")]


def changed(plan: Plan, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Plan:
    """The plan with one of its arrays changed."""
    if name.startswith("layout."):
        name = name.removeprefix("layout.")
        layout = dataclasses.replace(plan.layout, **{name: change(getattr(plan.layout, name).copy())})
        return Plan(layout, plan.tasks)
    return Plan(plan.layout, dataclasses.replace(plan.tasks, **{name: change(getattr(plan.tasks, name).copy())}))


@pytest.mark.parametrize("name", [*(f"layout.{name}" for name in LAYOUT_ARRAYS), *TASK_ARRAYS])
def test_fingerprint_changes_with_every_number(name: str) -> None:
    plan = plan_in_place(example())

    def bump(at: int, by: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(array: np.ndarray) -> np.ndarray:
            array[at] += by
            return array

        return change

    length = len(getattr(plan.layout, name.removeprefix("layout.")) if "." in name else getattr(plan.tasks, name))
    others = [changed(plan, name, bump(at, by)) for at in range(length) for by in (1, -1, 2**32)]
    others += [changed(plan, name, lambda array: array[:-1]), changed(plan, name, lambda array: np.append(array, 0))]
    fingerprints = {other.fingerprint for other in others}

    assert len(fingerprints) == len(others)
    assert plan.fingerprint not in fingerprints


def test_fingerprint_changes_with_shared_prefixes() -> None:
    plan = plan_in_place(Layout.from_packs([[8, 9], [9]]))
    spans = [[(0, 0, 8)], [(0, 0, 5), (1, 5, 9)], [(0, 0, 5), (2, 5, 9)]]
    others = [spans, [*spans[:2], [(1, 0, 5), (2, 5, 9)]], [*spans[:2], [(0, 0, 4), (2, 4, 9)]]]
    layouts = [dataclasses.replace(plan.layout, shared=SharedPrefixes.of_spans(other, [0, 1, 2])) for other in others]

    assert len({plan.fingerprint, *(Plan(layout, plan.tasks).fingerprint for layout in layouts)}) == 4


def test_fingerprint_has_63_bits_and_is_the_same_for_equal_plans() -> None:
    plans = [plan_in_place(place(lengths, 3)) for lengths in ([500, 20, 3000], np.array([500, 20, 3000], np.int32))]

    assert plans[0].fingerprint == plans[1].fingerprint
    assert 0 <= plans[0].fingerprint < 2**63
