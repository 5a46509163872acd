"""Epochs: which documents form which micro-batch, for lengths that are easy and lengths that are not."""

from typing import Any

import numpy as np
import pytest

from distca_hf.data.epochs import Epoch, EpochPacker
from distca_hf.errors import ConfigError, PackingError


def lengths_of(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def micro_batches(epoch: Epoch) -> list[list[int]]:
    return [epoch.micro_batch(index).tolist() for index in range(epoch.num_micro_batches)]


def long_tailed(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.RandomState(seed)
    return np.clip(random.lognormal(6, 1.3, count), 1, 30_000).astype(np.int64)


ADVERSARIAL = {
    "one document": (lengths_of([7]), 10),
    "one that fills it": (lengths_of([10]), 10),
    "all just over half": (lengths_of([51] * 40), 100),
    "all of the capacity": (lengths_of([100] * 23), 100),
    "all one token": (lengths_of([1] * 1003), 100),
    "one huge, many tiny": (lengths_of([1] * 300 + [100] + [1] * 300), 100),
    "huge first": (lengths_of([100, *[1] * 150]), 100),
    "a third and a bit": (lengths_of([34] * 50), 100),
    "capacity of one": (lengths_of([1] * 17), 1),
    "long tailed": (long_tailed(3000), 40_000),
    "long tailed, many per micro-batch": (long_tailed(5000), 1_000_000),
    "beyond the look-ahead": (lengths_of([51] * 1500 + [49] * 1500), 100),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one document", 1),
        ("one that fills it", 1),
        ("all just over half", 40),
        ("all of the capacity", 23),
        ("all one token", 11),
        ("one huge, many tiny", 7),
        ("huge first", 3),
        ("a third and a bit", 25),
        ("capacity of one", 17),
    ],
)
def test_number_of_micro_batches_where_it_is_plain(name: str, expected: int) -> None:
    assert EpochPacker(*ADVERSARIAL[name]).num_micro_batches == expected


def test_gap_is_filled_and_the_large_document_opens_the_next_micro_batch() -> None:
    packer = EpochPacker(lengths_of([60, 50, 10, 30, 50]), 100, shuffle=False)

    assert micro_batches(packer.epoch(0)) == [[0, 2, 3], [1, 4]]


def test_last_micro_batch_is_not_a_leftover() -> None:
    """1,010 tokens in micro-batches of 100: eleven of about 92, not ten of 100 and one of 10."""
    packer = EpochPacker(lengths_of([1] * 1010), 100)

    tokens = [len(documents) for documents in micro_batches(packer.epoch(0))]
    assert len(tokens) == 11
    assert max(tokens) - min(tokens) <= 1


def test_epochs_are_in_different_orders_and_grouped_differently() -> None:
    packer = EpochPacker(long_tailed(500), 40_000, seed=11)
    epochs = [packer.epoch(number) for number in range(4)]

    assert len({tuple(epoch.documents.tolist()) for epoch in epochs}) == 4
    groups = [{frozenset(documents) for documents in micro_batches(epoch)} for epoch in epochs]
    assert all(groups[0].isdisjoint(other) for other in groups[1:])


def test_when_an_order_needs_more_micro_batches_the_first_groups_come_in_a_new_order() -> None:
    """Documents that only just fit: many orders need one micro-batch more than the first one did."""
    lengths = lengths_of(np.random.RandomState(0).randint(20, 60, 300))
    kept = 0
    for seed in range(6):
        packer = EpochPacker(lengths, 100, seed=seed)
        first = micro_batches(packer.epoch(0))
        for number in (1, 2, 3):
            batches = micro_batches(packer.epoch(number))
            assert len(batches) == len(first)
            if sorted(batches) == sorted(first):
                kept += 1
                assert batches != first

    assert kept


def test_order_that_fits_into_fewer_micro_batches_is_spread_over_all_of_them() -> None:
    packer = EpochPacker(lengths_of([2, 5, 6, 5]), 10, seed=2)
    first, second = (micro_batches(packer.epoch(number)) for number in (0, 1))

    assert len(first) == len(second) == 3
    assert {frozenset(documents) for documents in first} != {frozenset(documents) for documents in second}


def test_order_is_the_same_for_ever() -> None:
    """A saved position of a run means these documents: this order must never change."""
    packer = EpochPacker(lengths_of([1] * 12), 4, seed=42)

    assert micro_batches(packer.epoch(0)) == [[6, 9, 7, 8], [10, 0, 4, 3], [5, 1, 11, 2]]
    assert micro_batches(packer.epoch(1)) == [[0, 7, 9, 3], [10, 5, 2, 4], [6, 1, 11, 8]]


def test_global_random_state_is_neither_used_nor_changed() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first = EpochPacker(lengths_of([1] * 50), 10, seed=3).epoch(1).documents.tolist()
    assert (np.random.get_state()[1] == before).all()
    np.random.seed(2)

    assert EpochPacker(lengths_of([1] * 50), 10, seed=3).epoch(1).documents.tolist() == first


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(PackingError, match="no document"):
        EpochPacker(lengths_of([]), 10)


@pytest.mark.parametrize(("lengths", "document"), [([11], 0), ([3, 10, 11, 4], 2), ([3, 12, 11], 1)])
def test_document_longer_than_the_capacity_is_refused_by_number_and_lengths(lengths: list[int], document: int) -> None:
    longest = max(lengths)
    with pytest.raises(PackingError, match=f"document {document} has {longest} tokens, a micro-batch holds 10"):
        EpochPacker(lengths_of(lengths), 10)


def test_steps_before_a_resume_are_counted_in_steps_of_the_present_size() -> None:
    """Half of an epoch was taken in two micro-batches, and four of the present size hold as much."""
    packer = EpochPacker(np.full(80, 10), 100)
    resumed = packer.resumed(0, [(200, 2)], micro_batch=2, accumulation_steps=2)

    assert (packer.num_micro_batches, resumed.steps_done, resumed.micro_batches_left) == (8, 3, 2)
    with pytest.raises(ConfigError, match=r"5 micro-batches of 200 tokens were taken .* epoch 0 had 4 of them"):
        packer.rest(0, [(200, 5)])
