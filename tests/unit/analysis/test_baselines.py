"""Baselines: closed forms, counts by hand, and token by token."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.analysis.baselines import (
    Baseline,
    context_parallel,
    fill_groups,
    sorted_packs,
    ulysses,
    whole_documents,
)
from distca_hf.cost import TokenBytes, causal_pairs, imbalance
from distca_hf.errors import ConfigError, PackingError
from distca_hf.planning.plan import Plan
from lib.planning.published_greedy import fill_head_and_tail, plan_published_greedy


LLAMA = TokenBytes()
K = 1024
LENGTHS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 300)), min_size=1, max_size=12)


def work_of(documents: list[int]) -> int:
    return sum(causal_pairs(0, length) for length in documents)


def everything(documents: list[int], num_ranks: int) -> list[Baseline]:
    lengths = np.array(documents, dtype=np.int64)
    return [
        context_parallel(lengths, num_ranks, LLAMA),
        context_parallel(lengths, num_ranks, LLAMA, 2),
        ulysses(lengths, num_ranks, LLAMA, 32, 8),
        ulysses(lengths, num_ranks, LLAMA, 32, 8, 2),
        whole_documents(lengths, num_ranks, LLAMA),
        *sorted_packs(lengths, num_ranks, 1),
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 9))
def test_every_baseline_holds_all_tokens_and_sends_nothing_to_itself(documents: list[int], num_ranks: int) -> None:
    for baseline in everything(documents, num_ranks):
        assert baseline.work.dtype == baseline.tokens.dtype == baseline.bytes_between.dtype == np.int64
        assert baseline.tokens.sum() == sum(documents)
        assert baseline.bytes_between.shape == (num_ranks, num_ranks)
        assert not np.diag(baseline.bytes_between).any()
        assert baseline.work.min() >= 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 9))
def test_work_is_that_of_the_documents_where_none_is_cut_in_two(documents: list[int], num_ranks: int) -> None:
    lengths = np.array(documents, dtype=np.int64)
    assert context_parallel(lengths, num_ranks, LLAMA).work.sum() == work_of(documents)
    assert whole_documents(lengths, num_ranks, LLAMA).work.sum() == work_of(documents)
    assert ulysses(lengths, num_ranks, LLAMA, 32, 8).work.sum() == 32 * work_of(documents)
    assert sum(step.work.sum() for step in sorted_packs(lengths, num_ranks, 2)) <= work_of(documents)


@pytest.mark.parametrize("group", [8, None])
def test_context_parallel_gathers_every_key_of_the_group(group: int | None) -> None:
    """8 ranks of 64K tokens gather 7 x 64K x 4 KB, for any documents."""
    baseline = context_parallel(np.array([512 * K]), 8, LLAMA, group)
    assert set(baseline.tokens) == {64 * K}
    assert baseline.bytes_between.sum(axis=0).tolist() == [7 * 64 * K * 4096] * 8
    assert baseline.imbalance < 1.0001
    assert baseline.name == "zigzag_cp"


def test_context_parallel_in_groups_differs_between_groups() -> None:
    baseline = context_parallel(np.array([64 * K, *[K] * 64]), 4, LLAMA, 2)
    assert baseline.name == "zigzag_cp_2"
    assert baseline.work[0] == pytest.approx(baseline.work[1], rel=1e-4)
    assert baseline.work[:2].sum() == causal_pairs(0, 64 * K)
    assert baseline.work[2:].sum() == 64 * causal_pairs(0, K)
    assert not baseline.bytes_between[:2, 2:].any()
    assert not baseline.bytes_between[2:, :2].any()


def test_context_parallel_by_hand() -> None:
    """12 tokens on 2 ranks: chunks of 3 tokens; rank 0 has the first and the last."""
    baseline = context_parallel(np.array([12]), 2, TokenBytes(0, 0, 10))
    assert baseline.work.tolist() == [(1 + 2 + 3) + (10 + 11 + 12), (4 + 5 + 6) + (7 + 8 + 9)]
    assert baseline.bytes_between.tolist() == [[0, 60], [60, 0]]


def test_ulysses_sends_seven_eighths_of_everything() -> None:
    baseline = ulysses(np.array([300 * K, 212 * K]), 8, LLAMA, 32, 8)
    assert baseline.bytes_between.sum(axis=0).tolist() == [20480 * 64 * K * 7 // 8] * 8
    assert baseline.imbalance == 1.0


def test_ulysses_copies_keys_for_ranks_that_share_a_head() -> None:
    """16 ranks, 16 query heads and 2 key heads: every rank has one query head and its key head, which 8 ranks need."""
    baseline = ulysses(np.array([1600]), 16, TokenBytes(16, 32, 4), 16, 2)
    assert baseline.bytes_between[0, 1:].tolist() == [100 * (1 + 2) + 100 * 2] * 15


def test_ulysses_has_nothing_for_ranks_beyond_the_heads() -> None:
    baseline = ulysses(np.array([60]), 6, LLAMA, 4, 2)
    assert sorted(baseline.work.tolist()) == [0, 0, *[causal_pairs(0, 60)] * 4]
    assert baseline.imbalance == 1.5
    with pytest.raises(ConfigError, match="5 query heads are not a multiple of 2"):
        ulysses(np.array([60]), 6, LLAMA, 5, 2)


def test_whole_documents_go_to_the_least_loaded() -> None:
    baseline = whole_documents(np.array([3, 5, 4, 2, 1]), 2, LLAMA)
    # 5 (15 pairs) to rank 0; 4 (10), 3 (6) to rank 1 that has less; 2 (3) to rank 0; 1 to rank 1.
    assert baseline.work.tolist() == [15 + 3, 10 + 6 + 1]
    assert baseline.tokens.tolist() == [7, 8]
    assert not baseline.bytes_between.any()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_whole_documents_do_not_depend_on_order(documents: list[int], num_ranks: int, random: object) -> None:
    shuffled = list(documents)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one = whole_documents(np.array(documents), num_ranks, LLAMA)
    other = whole_documents(np.array(shuffled), num_ranks, LLAMA)
    assert one.work.tolist() == other.work.tolist()
    # Graham 1969: within 4/3 of the best there is, which is no better than these two.
    assert one.work.max() <= 4 / 3 * work_of(documents) / num_ranks + causal_pairs(0, max(documents))


def test_sorted_packs_run_at_the_same_time() -> None:
    """Four packs of 10 tokens: one document, two, five, and ten."""
    steps = sorted_packs(np.array([*[1] * 10, 10, *[2] * 5, 5, 5]), 2, 2)
    assert [step.work.tolist() for step in steps] == [[55, 30], [15, 10]]
    assert [step.tokens.tolist() for step in steps] == [[10, 10]] * 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 9))
def test_groups_are_filled_in_order(documents: list[int], num_groups: int) -> None:
    groups = fill_groups(np.array(documents), num_groups)
    tokens = [int(group.sum()) for group in groups]
    assert sum(tokens) == sum(documents)
    assert max(tokens) - min(tokens) <= 1
    ends = set(np.cumsum(documents).tolist())
    assert ends <= set(np.cumsum([length for group in groups for length in group]).tolist())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 9))
def test_cut_documents_are_laid_out_head_and_tail(documents: list[int], num_ranks: int) -> None:
    layout = fill_head_and_tail(np.array(documents), num_ranks)
    layout.validate()
    assert np.ptp(layout.rank_tokens) <= 1
    for document, length in enumerate(documents):
        of = layout.segment_document == document
        held = defaultdict(list)
        for rank, start, stop in zip(
            layout.segment_rank[of], layout.segment_start[of], layout.segment_stop[of], strict=True
        ):
            held[rank].append((int(start), int(stop)))
        for ranges in list(held.values())[:-1]:  # all but the rank in the middle
            head = sum(stop - start for start, stop in ranges if stop <= length // 2)
            tail = sum(stop - start for start, stop in ranges if stop > length // 2)
            assert abs(head - tail) <= 1


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 7), st.sampled_from([0.0, 0.05, 0.1, 0.3]))
def test_bytes_of_the_greedy_are_those_of_its_tokens(documents: list[int], num_ranks: int, tolerance: float) -> None:
    token_bytes = TokenBytes(query=7, output=5, key_value=3)
    plan = plan_published_greedy(np.array(documents), num_ranks, token_bytes, tolerance)
    plan.validate()
    baseline = Baseline.of_plan("greedy", plan, token_bytes)
    assert baseline.bytes_between.tolist() == _count_token_by_token(plan, token_bytes)
    assert baseline.work.sum() == work_of(documents)
    # Whoever takes ends at or below the mean, and gets within the tolerance unless what was left could not be cut.
    assert imbalance(baseline.work) <= imbalance(plan.layout.rank_work)


def _count_token_by_token(plan: Plan, token_bytes: TokenBytes) -> list[list[int]]:
    """Counts the bytes that every rank sends to every other one, query by query, output by output, key by key."""
    layout, tasks = plan.layout, plan.tasks
    home = {}
    for document, start, stop, rank in zip(
        layout.segment_document, layout.segment_start, layout.segment_stop, layout.segment_rank, strict=True
    ):
        home.update({(document, token): rank for token in range(start, stop)})
    sent = [[0] * layout.num_ranks for _ in range(layout.num_ranks)]
    keys = set()
    for document, start, stop, server in zip(tasks.document, tasks.start, tasks.stop, tasks.server, strict=True):
        keys.update((document, token, server) for token in range(stop))
        for token in range(start, stop):
            holder = home[document, token]
            if holder != server:
                sent[holder][server] += token_bytes.query
                sent[server][holder] += token_bytes.output
    for document, token, server in keys:
        if home[document, token] != server:
            sent[home[document, token]][server] += token_bytes.key_value
    return sent


def test_sums_are_exact_at_the_largest_sizes() -> None:
    """512 documents of 512K tokens on 512 ranks: 7e16 pairs, times 8 heads, and 2e14 bytes per pair of ranks."""
    lengths = np.full(512, 512 * K)
    pairs = 512 * causal_pairs(0, 512 * K)
    assert int(context_parallel(lengths, 512, LLAMA).work.sum()) == pairs
    assert int(ulysses(lengths, 512, LLAMA, 32, 8, 8).work.sum()) == 32 * pairs
    one = np.array([512 * 512 * K])
    assert int(context_parallel(one, 512, LLAMA).work.sum()) == causal_pairs(0, 512 * 512 * K)
    assert plan_published_greedy(one, 512, LLAMA, 0.0).work.sum() == causal_pairs(0, 512 * 512 * K)


def test_bad_lengths_are_refused() -> None:
    for run in (context_parallel, whole_documents):
        with pytest.raises(PackingError, match="document 1 has 0 tokens"):
            run(np.array([3, 0]), 2, LLAMA)
