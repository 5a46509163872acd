"""Routing of random plans that leave queries where they are: few calls, and equal late work. What routings move and
attend to is compared with exact attention, and with the plan, in `test_attention_parity.py`."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.cost import TokenBytes
from distca_hf.planning.pieces import ALL_HEADS
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.planning.routing import LATE_SHARE, route
from distca_hf.planning.transfers import ExchangeChunks, bytes_between, received_bytes
from support.layouts import random_layout, random_plan, striped_layout


PLANS = st.builds(
    lambda seed, num_ranks: plan_in_place(random_layout(random.Random(seed), num_ranks)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3, 4, 5, 8]),
)


@given(plan=PLANS, num_chunks=st.sampled_from([1, 2, 3, 7]))
def test_keys_are_read_by_as_few_calls_as_can_be(plan: Plan, num_chunks: int) -> None:
    """All own rows are one call. In a chunk a new call begins only where queries do not follow each other, or keys of
    the remote KV do not."""
    chunks = ExchangeChunks.cut(plan, num_chunks)
    for rank in range(plan.layout.num_ranks):
        routing = route(plan, rank, chunks=chunks)
        tokens = int(plan.layout.rank_tokens[rank])
        assert [(call.query_start, call.query_stop) for call in routing.local] == [(0, tokens)] * min(1, tokens)
        for far in routing.prefix_of_chunk:
            for call, following in pairwise(far):
                assert (call.query_stop, call.key_stop) != (following.query_start, following.key_start)


@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.sampled_from([1, 2, 3, 5]), groups=st.sampled_from([1, 2, 8]))
def test_bytes_of_a_plan_are_those_that_its_routings_send(seed: int, num_ranks: int, groups: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, random_layout(rng, num_ranks), groups)
    if rng.random() < 0.3 and groups > 1:
        plan = plan_in_place(striped_layout(rng, num_ranks), groups)
    rows = plan.tasks.head_groups  # of a token
    tokens = TokenBytes(query=7 * rows, output=5 * rows, key_value=3 * rows)
    moved = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for rank in range(num_ranks):
        routing = route(plan, rank)
        moved[rank] += 3 * routing.send_counts.sum(axis=0)
        if routing.queries is not None:
            moved[rank] += 7 * routing.queries.send_counts.sum(axis=0) + 5 * routing.queries.receive_counts.sum(axis=0)

    between = bytes_between(plan, tokens)
    assert moved.tolist() == between.tolist()
    assert received_bytes(plan, tokens).tolist() == between.sum(axis=0).tolist()


@given(plan=PLANS)
def test_late_work_is_the_same_on_all_ranks(plan: Plan) -> None:
    """A share of what each has for itself, so that no rank waits for another one's results; not more than any has."""
    tasks, work, num_ranks = plan.tasks, plan.work, plan.layout.num_ranks
    tokens, squares = tasks.stop - tasks.start, np.zeros(num_ranks)
    np.add.at(squares, tasks.rank, tokens * (tokens + 1) / 2)

    working = [rank for rank in range(num_ranks) if work[rank]]
    expected = min(LATE_SHARE * sum(work) / len(working), min(squares[rank] for rank in working)) if working else 0
    for rank in range(num_ranks):
        share = route(plan, rank).late_share
        assert 0 <= share <= 1
        assert share * squares[rank] == pytest.approx(expected if rank in working else 0)


def test_heads_of_other_documents_stay_together() -> None:
    """Only a document with a stripe has tasks of single groups."""
    plan = plan_in_place(striped_layout(random.Random(6), 3), 4)
    striped = {stripe.document for stripe in plan.layout.stripes}

    assert striped
    assert len(striped) < plan.layout.num_documents
    for document, head in zip(plan.tasks.document.tolist(), plan.tasks.head.tolist(), strict=True):
        assert (head == ALL_HEADS) == (document not in striped)
