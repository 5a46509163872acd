"""Runs of any sizes that stop anywhere: documents come as often as there are epochs, and all counts agree."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca_hf.data.epochs import EpochPacker, ResumedEpoch


LONGEST = 20
# (capacity_tokens, accumulation steps)
SIZES = st.tuples(st.integers(LONGEST, 150), st.integers(1, 4))
LENGTHS = st.builds(
    lambda count, seed: np.random.RandomState(seed).randint(1, LONGEST + 1, count),
    st.sampled_from([1, 3, 10, 40, 100]),
    st.integers(0, 2**32 - 1),
)


@dataclass
class Run:
    """What a Trainer does with the numbers that it gets, on documents of these lengths."""

    lengths: np.ndarray
    num_train_epochs: float
    epoch: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    micro_batch: int = 0
    capacity: int = 0
    step: int = 0
    seen: Counter[int] = field(default_factory=Counter)
    epochs: list[float] = field(default_factory=list)

    def go_on(self, capacity: int, accumulation: int, steps: int) -> tuple[ResumedEpoch, int]:
        """Trains some steps, or fewer if training ends; returns what was resumed, and the last step of all."""
        if capacity != self.capacity and (self.taken or self.micro_batch):
            self.taken, self.micro_batch = (*self.taken, (self.capacity, self.micro_batch)), 0
        self.capacity = capacity
        packer = EpochPacker(self.lengths, capacity)
        resumed = packer.resumed(self.epoch, self.taken, self.micro_batch, accumulation)
        max_steps = resumed.max_steps(self.step, self.num_train_epochs)
        begun = self.step
        for number in range(self.epoch, resumed.num_train_epochs(self.step, max_steps)):
            packed = packer.rest(number, self.taken)
            left = packed.num_micro_batches
            while self.micro_batch < left and self.step not in (max_steps, begun + steps):
                window = range(self.micro_batch, min(left, self.micro_batch + accumulation))
                self.seen.update(document for index in window for document in packed.micro_batch(index).tolist())
                self.micro_batch = window.stop
                self.step += 1
                here = number == resumed.number
                epoch = resumed.epochs_after(self.step - begun) if here else number + self.micro_batch / left
                self.epochs.append(epoch)
            if self.micro_batch < left:
                break
            self.epoch, self.taken, self.micro_batch = number + 1, (), 0
        return resumed, max_steps


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 3), st.lists(st.tuples(SIZES, st.integers(1, 5)), max_size=4), SIZES)
def test_every_document_comes_once_per_epoch(
    lengths: np.ndarray, epochs: int, stops: list[tuple[tuple[int, int], int]], last: tuple[int, int]
) -> None:
    run = Run(lengths, epochs)
    for sizes, steps in stops:
        run.go_on(*sizes, steps)
    _, max_steps = run.go_on(*last, 10**6)

    assert run.seen == Counter(dict.fromkeys(range(len(lengths)), epochs))
    assert run.step == max_steps == len(run.epochs)
    assert all(earlier < later for earlier, later in pairwise(run.epochs))
    assert run.epochs[-1] == epochs


@settings(max_examples=30)
@given(LENGTHS, st.floats(0.05, 3.0), st.tuples(SIZES, st.integers(0, 5)), SIZES, st.integers(1, 30))
def test_stopping_once_more_changes_no_count(
    lengths: np.ndarray, epochs: float, first: tuple[tuple[int, int], int], second: tuple[int, int], steps: int
) -> None:
    whole, twice = Run(lengths, epochs), Run(lengths, epochs)
    for run in (whole, twice):
        run.go_on(*first[0], first[1])
    _, max_steps = whole.go_on(*second, 10**6)
    twice.go_on(*second, steps)
    _, same_max_steps = twice.go_on(*second, 10**6)

    assert (twice.seen, twice.step, twice.epochs) == (whole.seen, whole.step, whole.epochs)
    assert same_max_steps == max_steps


@settings(max_examples=30)
@given(LENGTHS, st.floats(0.05, 3.0), SIZES, st.integers(0, 40))
def test_counts_of_an_uninterrupted_run_are_trainers(
    lengths: np.ndarray, epochs: float, sizes: tuple[int, int], stop: int
) -> None:
    run = Run(lengths, epochs)
    micro_batches = EpochPacker(lengths, sizes[0]).num_micro_batches
    steps = -(-micro_batches // sizes[1])
    run.go_on(*sizes, stop)
    resumed, max_steps = run.go_on(*sizes, 10**6)

    assert max_steps == run.step == ceil(epochs * steps)
    assert resumed.number + resumed.steps_done / steps == pytest.approx(min(stop, max_steps) / steps)
    positions = [
        number + min(step * sizes[1], micro_batches) / micro_batches
        for number in range(4)
        for step in range(1, steps + 1)
    ]
    assert run.epochs == positions[:max_steps]


@settings(max_examples=30)
@given(LENGTHS, st.floats(0.05, 2.0), st.tuples(SIZES, st.integers(1, 5)), SIZES)
def test_share_of_an_epoch_is_trained_and_not_much_more(
    lengths: np.ndarray, epochs: float, first: tuple[tuple[int, int], int], second: tuple[int, int]
) -> None:
    run = Run(lengths, epochs)
    run.go_on(*first[0], first[1])
    run.go_on(*second, 10**6)
    trained = sum(lengths[document] * times for document, times in run.seen.items()) / lengths.sum()
    largest_step = max(capacity * accumulation for capacity, accumulation in (first[0], second)) / lengths.sum()
    uneven = (LONGEST + 1) / lengths.sum() * len(run.epochs)

    assert trained >= epochs - uneven
    assert trained <= epochs + 2 * largest_step + uneven
