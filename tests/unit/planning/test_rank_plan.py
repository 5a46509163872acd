"""What one rank needs of a plan, made in one place."""

import random

import numpy as np
import pytest

from distca_hf.planning.plan import Plan
from distca_hf.planning.routing import rank_plan
from distca_hf.planning.transfers import key_transfers
from support.layouts import random_layout, random_plan


NUM_RANKS = 3


@pytest.fixture(params=range(4))
def plan(request: pytest.FixtureRequest) -> Plan:
    rng = random.Random(request.param)
    return random_plan(rng, random_layout(rng, NUM_RANKS), 2)


def test_one_chunk_has_one_routing(plan: Plan) -> None:
    for rank in range(NUM_RANKS):
        mine = rank_plan(plan, rank)
        assert mine.backward is mine.forward


def test_backward_has_one_chunk_and_reads_what_forward_kept(plan: Plan) -> None:
    """Rows arrive in chunks in forward; backward finds them in that order, and none is missing."""
    for rank in range(NUM_RANKS):
        mine = rank_plan(plan, rank, 3)
        assert (len(mine.forward.send_counts), len(mine.backward.send_counts)) == (3, 1)
        for counts in ("send_counts", "receive_counts"):
            assert np.array_equal(getattr(mine.forward, counts).sum(axis=0), getattr(mine.backward, counts)[0])
        in_order, kept = (
            np.sort(rows.numbers) for rows in (mine.backward.received_to_remote_kv, mine.backward.kept_to_remote_kv)
        )
        assert np.array_equal(in_order, kept)
        assert mine.backward.kept_to_remote_kv.total == mine.forward.received_to_remote_kv.total


def test_facts_are_the_same_on_all_ranks_and_in_any_number_of_chunks(plan: Plan) -> None:
    facts = [rank_plan(plan, rank, num_chunks).facts for rank in range(NUM_RANKS) for num_chunks in (1, 4)]

    assert all(each == facts[0] for each in facts)
    assert facts[0].work == tuple(plan.work.tolist())
    assert facts[0].key_rows_sent == tuple(key_transfers(plan).rows_between(NUM_RANKS).sum(axis=1).tolist())


def test_work_before_is_that_at_home_unless_given(plan: Plan) -> None:
    groups = plan.tasks.head_groups
    assert rank_plan(plan, 0).facts.work_before == tuple((plan.layout.rank_work * groups).tolist())
    assert rank_plan(plan, 0, work_before=np.array([1, 2, 3])).facts.work_before == (groups, 2 * groups, 3 * groups)
