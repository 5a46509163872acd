"""Optimizer steps: their documents in micro-steps, long ones together."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.data.accumulation import group_documents
from distca_hf.errors import PackingError
from distca_hf.layout import Topology
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import key_transfers


def real_looking(rng: random.Random, tokens: int, longest: int) -> list[int]:
    """Mostly short documents, and a few per cent that are long."""
    lengths: list[int] = []
    while tokens > 0:
        median = 30_000 if rng.random() < 0.02 else 2_000
        lengths.append(min(tokens, longest, max(1, int(rng.lognormvariate(np.log(median), 0.7)))))
        tokens -= lengths[-1]
    return lengths


def divided(*arguments: Any, **keywords: Any) -> list[np.ndarray]:
    """Documents of each micro-step."""
    return [step.documents for step in group_documents(*arguments, **keywords)]


def moved_tokens(lengths: np.ndarray, steps: list[np.ndarray], num_ranks: int) -> int:
    plans = (plan_in_place(place(lengths[step], num_ranks)) for step in steps)
    return sum(int(key_transfers(plan).tokens.sum()) for plan in plans)


@given(seed=st.integers(0, 2**32 - 1), micro_steps=st.integers(1, 8), fill=st.sampled_from([0.3, 0.9, 0.98]))
def test_every_document_is_in_one_micro_step_that_holds_it(seed: int, micro_steps: int, fill: float) -> None:
    capacity = 65_536
    lengths = np.array(real_looking(random.Random(seed), int(fill * micro_steps * capacity), capacity))
    steps = divided(lengths, micro_steps, capacity)

    assert len(steps) == micro_steps
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))
    assert all(lengths[step].sum() <= capacity for step in steps)


@pytest.mark.parametrize(("num_ranks", "micro_steps"), [(8, 4), (16, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_fewer_keys_move_and_the_heaviest_ranks_sum_to_the_ideal(num_ranks: int, micro_steps: int, seed: int) -> None:
    capacity = num_ranks * 32_768
    lengths = np.array(real_looking(random.Random(seed), int(0.98 * micro_steps * capacity), capacity // 4))
    in_order = np.searchsorted(np.cumsum(lengths), np.arange(1, micro_steps) * lengths.sum() / micro_steps)
    consecutive = np.split(np.arange(len(lengths)), in_order)
    grouped = divided(lengths, micro_steps, capacity, Topology(num_ranks, num_ranks))

    assert moved_tokens(lengths, grouped, num_ranks) < 0.8 * moved_tokens(lengths, consecutive, num_ranks)
    heaviest = sum(int(place(lengths[step], num_ranks).rank_work.max()) for step in grouped)
    assert heaviest <= 1.005 * int((lengths * (lengths + 1) // 2).sum()) / num_ranks


def test_micro_steps_hold_nearly_equal_tokens_and_long_documents_are_together() -> None:
    lengths = np.array(real_looking(random.Random(1), 4 * 200_000, 50_000))
    steps = divided(lengths, 4, 262_144)

    tokens = [int(lengths[step].sum()) for step in steps]
    assert max(tokens) <= 1.02 * min(tokens)
    work = [int((lengths[step] ** 2).sum()) for step in steps]
    assert work[0] == max(work) > 5 * min(work)


def test_the_way_in_which_fewer_keys_move_is_taken() -> None:
    """Two long documents of four ranks' work each, and two micro-steps: apart or together, the placement tells."""
    lengths = np.array([50_000, 50_000] + [500] * 240)
    with_ranks = divided(lengths, 2, 131_072, topology=Topology(8, 8))
    together = divided(lengths, 2, 131_072)

    assert moved_tokens(lengths, with_ranks, 8) <= moved_tokens(lengths, together, 8)
    assert any({0, 1} <= set(step.tolist()) for step in together)


def test_same_documents_are_grouped_alike() -> None:
    lengths = real_looking(random.Random(3), 500_000, 60_000)
    one, other = divided(lengths, 3, 200_000), divided(np.array(lengths, np.int32), 3, 200_000)

    assert [step.tolist() for step in one] == [step.tolist() for step in other]


def test_a_full_window_is_filled_to_the_brim() -> None:
    steps = divided([60, 50, 50, 40], 2, 100)

    assert [step.tolist() for step in steps] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("lengths", "micro_steps", "capacity", "parts"),
    [
        ([5, 101], 4, 100, ["document 1 has 101 tokens", "holds 100", "split or remove"]),
        ([60, 60, 60], 2, 100, ["3 documents of 180 tokens", "2 micro-steps of 100", "next optimizer step"]),
        ([50, 50, 50, 51], 2, 100, ["201 tokens", "200 together"]),
        ([5], 0, 100, ["0 micro-steps of 100 tokens"]),
        ([5], 1, 0, ["1 micro-steps of 0 tokens"]),
        ([5, 0], 1, 10, ["document 1 has 0 tokens"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said(lengths: list[int], micro_steps: int, capacity: int, parts: list[str]) -> None:
    with pytest.raises(PackingError) as refused:
        group_documents(lengths, micro_steps, capacity)

    for part in parts:
        assert part in str(refused.value)
