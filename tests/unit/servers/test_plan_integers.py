"""A plan as integers: both sides have equal plans, and damaged arrays are refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.arrays import IntArray
from distca_hf.cost import CAUSAL_MASK, Mask
from distca_hf.errors import PlanError
from distca_hf.placement.place import place
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import rank_plan
from distca_hf.servers.served_plans import HEADER_LENGTH, Servers, plan_from_integers, plan_to_integers
from support.layouts import random_layout, random_plan, striped_layout


SEEDS = st.integers(0, 2**32 - 1)


def any_plan(seed: int) -> Plan:
    """With servers of some speed, of tasks anywhere, of stripes, or with a window."""
    rng = random.Random(seed)
    num_ranks, head_groups = rng.randint(1, 4), rng.choice([1, 2, 4])
    mask = rng.choice([Mask(), Mask(1), Mask(7), Mask(1000), Mask(7, chunked=True)])
    kind = rng.randrange(3)
    if kind == 0:
        servers = Servers(tuple(rng.uniform(0.1, 3) for _ in range(rng.randint(1, 3))), rng.random() < 0.5)
        return servers.plan(random_layout(rng, num_ranks), head_groups)
    if kind == 1:
        return random_plan(rng, random_layout(rng, num_ranks), head_groups)
    return plan_in_place(striped_layout(rng, num_ranks), head_groups, mask)


@given(seed=SEEDS)
def test_a_plan_comes_back_as_it_was(seed: int) -> None:
    plan = any_plan(seed)
    integers = plan_to_integers(plan)
    back = plan_from_integers(integers)

    assert integers.dtype == np.int64
    assert integers.ndim == 1
    assert back.fingerprint == plan.fingerprint
    assert (back.speeds, back.tasks.mask) == (plan.speeds, plan.tasks.mask)
    assert np.array_equal(plan_to_integers(back), integers)
    if plan.tasks.mask == CAUSAL_MASK:
        last = plan.layout.num_ranks - 1
        assert rank_plan(back, last).facts == rank_plan(plan, last).facts


def test_bytes_that_were_read_from_a_message_may_be_overwritten_later() -> None:
    plan = any_plan(0)
    message = plan_to_integers(plan)
    back = plan_from_integers(message)
    message[:] = 0

    assert back.fingerprint == plan.fingerprint


@given(seed=SEEDS, place_of=st.floats(0, 1, exclude_max=True), value=st.integers(-(2**63), 2**63 - 1))
def test_a_damaged_integer_is_refused_or_gives_another_plan(seed: int, place_of: float, value: int) -> None:
    """Nothing else happens: no crash, and no plan that is taken for the right one."""
    plan = any_plan(seed)
    integers = plan_to_integers(plan)
    at = int(place_of * len(integers))
    changed = integers[at] != value
    integers[at] = value
    try:
        back = plan_from_integers(integers)
    except PlanError:
        return
    assert (back.fingerprint != plan.fingerprint) == changed


SERVED = plan_to_integers(Servers((0.5,)).plan(place([50, 20, 9], 2)))


def changed(at: int, value: int) -> IntArray:
    integers = SERVED.copy()
    integers[at] = value
    return integers


@pytest.mark.parametrize(
    ("integers", "words"),
    [
        (SERVED.tolist(), "not list"),
        (SERVED.astype(np.int32), r"not int32 \("),
        (SERVED.astype(np.float64), "not float64"),
        (SERVED.reshape(1, -1), r"not int64 \(1, "),
        (SERVED[:0], "0 integers is cut off"),
        (SERVED[: HEADER_LENGTH - 1], f"{HEADER_LENGTH - 1} integers is cut off"),
        (SERVED[:-1], f"{len(SERVED) - HEADER_LENGTH - 1} follow its header"),
        (np.append(SERVED, 0), f"{len(SERVED) - HEADER_LENGTH + 1} follow its header"),
        (changed(0, 1), "of version 1"),
        (changed(1, 0), "0 head groups"),
        (changed(1, 2**40), f"{2**40} head groups"),
        (changed(2, -1), "window of -1"),
        (changed(3, 1), "chunked: 1"),
        (changed(4, -1), "follow its header"),
        (changed(HEADER_LENGTH, 51), "layout of a plan is damaged: document 0 has 51 tokens"),
        (changed(len(SERVED) - 1, -1), "rank 2 of speed nan"),
    ],
)
def test_an_array_that_is_no_plan_is_refused(integers: IntArray, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_from_integers(integers)


def test_arrays_of_unequal_length_are_refused() -> None:
    """The sum of lengths is right, but one array of the segments has an integer of the next."""
    integers = SERVED.copy()
    integers[5] += 1
    integers[6] -= 1

    with pytest.raises(PlanError, match="do not belong together"):
        plan_from_integers(integers)


def test_a_plan_whose_tasks_do_not_cover_its_documents_is_refused() -> None:
    plan = plan_in_place(place([50, 20], 2))
    tasks = replace(plan.tasks, stop=plan.tasks.stop - 1)

    with pytest.raises(PlanError, match="document"):
        plan_from_integers(plan_to_integers(replace(plan, tasks=tasks)))
