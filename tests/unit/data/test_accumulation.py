"""Optimizer steps: their documents in micro-steps, long ones together; each of an epoch, and of a loader."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distca_hf
from distca_hf.arrays import IntArray
from distca_hf.batches import placed
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.batches.prepare import Cursor
from distca_hf.config import DistCAConfig
from distca_hf.data.accumulation import MicroStep, SteppedEpoch, group_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.errors import ConfigError, PackingError
from distca_hf.layout import Topology
from distca_hf.placement.place import place
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import key_transfers
from support.data import random_dataset


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


DATASET = random_dataset(200)
TIMES = Path(__file__).parents[3] / "docs" / "benchmarks" / "kernel-times-h200-flash4.json"


def loader_of(micro_steps: int, tokens: int = 200) -> PlacedLoader:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens, pad_to_multiple_of=1)
    return plugin.dataloader(DATASET, seed=3, device="cpu", micro_steps=micro_steps)


def tokens_of(batches: Any) -> Counter[int]:
    return Counter(token for batch in batches for token in batch["input_ids"][0].tolist())


def saved(loader: PlacedLoader) -> dict[str, Any]:
    """The state as it comes back from a file."""
    return json.loads(json.dumps(loader.state_dict()))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), micro_steps=st.integers(2, 5), steps_from=st.integers(0, 7))
def test_every_step_has_the_documents_that_it_was_packed_with(seed: int, micro_steps: int, steps_from: int) -> None:
    rng = random.Random(seed)
    tokens = np.array([rng.choice([1, 5, 30, 90, 200]) for _ in range(rng.randint(1, 120))])
    epoch = EpochPacker(tokens, 400, seed).epoch(0)

    def divide(lengths: IntArray, as_packed: list[IntArray]) -> list[MicroStep]:
        return group_documents(lengths, len(as_packed), 400, Topology(4, 2), as_they_came=as_packed)

    regrouped = SteppedEpoch(epoch, tokens, micro_steps, divide, steps_from)
    borders = [0, *range(steps_from % micro_steps or micro_steps, epoch.num_micro_batches, micro_steps)]

    assert regrouped.num_micro_batches == epoch.num_micro_batches
    batches = [regrouped.micro_batch(index) for index in range(epoch.num_micro_batches)]
    assert all(0 < tokens[batch].sum() <= 400 for batch in batches)
    for first, last in zip(borders, [*borders[1:], epoch.num_micro_batches], strict=True):
        packed = [epoch.micro_batch(index) for index in range(first, last)]
        assert sorted(np.concatenate(batches[first:last])) == sorted(np.concatenate(packed))
    again = SteppedEpoch(epoch, tokens, micro_steps, divide, steps_from)
    for index in rng.sample(range(epoch.num_micro_batches), epoch.num_micro_batches):
        assert again.micro_batch(index).tolist() == batches[index].tolist()


def test_long_documents_of_a_step_train_together() -> None:
    longest = [batch["distca_plan"].facts.longest_document_tokens for batch in loader_of(4)]
    plain = [batch["distca_plan"].facts.longest_document_tokens for batch in loader_of(1)]

    assert longest != plain
    assert sum(longest) < sum(plain)


def test_placements_of_a_step_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(4)
    packed, planner = loader._packed(Cursor()), loader.preparer.planner
    placed_again: list[Any] = []
    monkeypatch.setattr(placed, "place", lambda *lengths, **_: placed_again.append(lengths) or place(*lengths, **_))
    prepared = [loader.preparer.prepare(packed, Cursor(0, index)) for index in range(len(loader))]

    assert len(loader) > 4
    assert len(placed_again) == (len(loader) % 4 == 1)  # a step of one micro-batch needs no regrouping
    monkeypatch.undo()
    tokens = np.array([len(row) for row in DATASET["input_ids"]])
    for index, of_loader in enumerate(prepared):
        assert of_loader.fingerprint == planner.plan(tokens[packed.micro_batch(index)]).fingerprint


def test_placements_of_equal_work_are_not_taken_for_those_of_equal_seconds() -> None:
    tokens = np.array([9000, 700, 700, 700, 700, 90])
    by_work = PlacedPlanner(DistCAConfig(tokens_per_rank=8192), num_ranks=2)
    by_seconds = PlacedPlanner(DistCAConfig(tokens_per_rank=8192, kernel_times=str(TIMES)), num_ranks=2)
    equal_work = place(tokens, 2, topology=by_work.config.topology(2))

    assert by_work.plan(tokens, equal_work).fingerprint == by_work.plan(tokens).fingerprint
    assert by_seconds.plan(tokens, equal_work).fingerprint == by_seconds.plan(tokens).fingerprint
    assert by_seconds.plan(tokens).fingerprint != by_work.plan(tokens).fingerprint


@pytest.mark.parametrize(("before", "after", "tokens"), [(4, 3, 200), (4, 1, 300), (1, 4, 300), (2, 5, 200)])
def test_steps_of_another_size_go_on_with_what_is_left(before: int, after: int, tokens: int) -> None:
    first = loader_of(before)
    seen = tokens_of(islice(iter(first), 2 * before))
    second = loader_of(after, tokens)
    second.load_state_dict(saved(first))
    third = loader_of(after, tokens)
    batches = iter(second)
    seen += tokens_of(islice(batches, after + 1))  # and once more, in the midst of a step
    third.load_state_dict(saved(second))
    seen += tokens_of(third)

    assert seen == tokens_of(loader_of(1))


def test_position_in_the_midst_of_a_step_of_another_size_is_refused() -> None:
    first = loader_of(4)
    list(islice(iter(first), 6))

    with pytest.raises(ConfigError, match=r"after 2 of 4 micro-batches of an optimizer step.*'micro_steps': 3"):
        loader_of(3).load_state_dict(saved(first))


def test_the_end_of_an_epoch_is_no_midst_of_a_step() -> None:
    """The last step of an epoch may be shorter; with other sizes the next epoch begins."""
    first = loader_of(4)
    assert len(first) % 4
    list(first)
    second = loader_of(3, 300)
    second.load_state_dict(saved(first))

    assert tokens_of(second) == tokens_of(loader_of(1))
