"""Core attention over random layouts, 1 to 8 ranks in one process, is exact: routing errors cannot hide in fp64."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.planning.plan import plan_in_place
from distca_hf.testing import run_ranks
from support.layouts import random_layout, random_plan, striped_layout
from support.parity import Case, compare


def check_exact(case: Case) -> None:
    """Outputs and gradients of all ranks are exact, and what was sent and computed is what the plan says."""
    for difference in run_ranks(case.layout.num_ranks, lambda transport: compare(case, transport)):
        assert difference.largest <= 1e-10
        assert difference.as_planned, difference


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_outputs_and_gradients_equal_unsplit_attention(seed: int, num_ranks: int) -> None:
    case = Case.draw(seed, random_layout(random.Random(seed), num_ranks))

    check_exact(case)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_queries_computed_anywhere_give_the_same(seed: int, num_ranks: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, num_ranks)
    case = Case.draw(seed, layout, random_plan(rng, layout))

    check_exact(case)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
    head_groups=st.sampled_from([2, 3, 4]),
)
def test_heads_computed_anywhere_give_the_same(seed: int, num_ranks: int, head_groups: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, num_ranks)
    case = Case.draw(seed, layout, random_plan(rng, layout, head_groups))

    check_exact(case)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([1, 2, 3, 4, 5, 8]),
    head_groups=st.sampled_from([1, 2, 3, 4]),
)
def test_stripes_give_the_same(seed: int, num_ranks: int, head_groups: int) -> None:
    layout = striped_layout(random.Random(seed), num_ranks)
    plan = plan_in_place(layout, head_groups)
    plan.validate()
    case = Case.draw(seed, layout, plan)

    check_exact(case)
