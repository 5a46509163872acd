"""Epochs of any lengths: every document once, equally many micro-batches, never over the capacity, none empty."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca_hf.data.epochs import Epoch, EpochPacker


@st.composite
def packers(draw: st.DrawFn) -> tuple[np.ndarray, int, EpochPacker]:
    """Lengths, capacity, and their packer."""
    capacity = draw(st.integers(1, 200))
    shapes = {
        "any": st.integers(1, capacity),
        "just over half": st.integers(capacity // 2 + 1, capacity // 2 + 1 + capacity // 10),
        "full": st.just(capacity),
        "tiny or full": st.sampled_from([1, capacity]),
        "tiny": st.integers(1, max(1, capacity // 20)),
    }
    length = shapes[draw(st.sampled_from(sorted(shapes)))].map(lambda tokens: min(tokens, capacity))
    lengths = np.array(draw(st.lists(length, min_size=1, max_size=80)), dtype=np.int64)
    seed = draw(st.integers(-(2**40), 2**63 - 1))
    return lengths, capacity, EpochPacker(lengths, capacity, seed, shuffle=draw(st.booleans()))


def micro_batches(epoch: Epoch) -> list[list[int]]:
    return [epoch.micro_batch(index).tolist() for index in range(epoch.num_micro_batches)]


@given(made=packers(), number=st.integers(0, 2**32 - 1))
def test_every_document_once_within_the_capacity_in_as_many_micro_batches_as_ever(
    made: tuple[np.ndarray, int, EpochPacker], number: int
) -> None:
    lengths, capacity, packer = made
    batches = micro_batches(packer.epoch(number))

    assert len(batches) == packer.num_micro_batches
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    assert all(0 < lengths[documents].sum() <= capacity for documents in batches)


@given(made=packers())
def test_at_most_twice_as_many_micro_batches_as_tokens_need(made: tuple[np.ndarray, int, EpochPacker]) -> None:
    """Two micro-batches of an epoch never fit into one, so more than half of their tokens are filled."""
    lengths, capacity, packer = made

    assert -(-lengths.sum() // capacity) <= packer.num_micro_batches <= 2 * -(-lengths.sum() // capacity)


@given(made=packers())
def test_unshuffled_micro_batch_begins_with_the_earliest_documents_left(
    made: tuple[np.ndarray, int, EpochPacker],
) -> None:
    """A beginning of what is left in the dataset's order, then the next ones that fill the gap."""
    lengths, capacity, packer = made
    packer = EpochPacker(lengths, capacity, shuffle=False)
    left = list(range(len(lengths)))
    for documents in micro_batches(packer.epoch(3)):
        beginning = 0
        while beginning < len(documents) and documents[beginning] == left[beginning]:
            beginning += 1
        fillers = documents[beginning:]
        assert beginning >= 1
        assert fillers == sorted(fillers)
        if fillers:  # the next in order did not fit, or it was no longer needed
            assert lengths[documents[:beginning]].sum() + lengths[left[beginning]] > capacity
        left = [document for document in left if document not in documents]
    assert not left


@given(made=packers(), number=st.integers(0, 1000))
def test_epoch_does_not_depend_on_what_was_asked_before(
    made: tuple[np.ndarray, int, EpochPacker], number: int
) -> None:
    _, _, packer = made
    expected = micro_batches(packer.epoch(number))
    packer.epoch(number + 1)

    assert micro_batches(packer.epoch(number)) == expected


@given(made=packers(), number=st.integers(0, 5), data=st.data())
def test_rest_of_an_epoch_that_changed_its_size_holds_every_document_left_once(
    made: tuple[np.ndarray, int, EpochPacker], number: int, data: st.DataObject
) -> None:
    lengths, capacity, packer = made
    seed, shuffle = packer._seed, packer._shuffle
    taken: list[tuple[int, int]] = []
    seen: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = int(lengths.max()) + data.draw(st.integers(0, 2 * capacity))
        before = EpochPacker(lengths, size, seed, shuffle)
        left = micro_batches(before.rest(number, taken))
        count = data.draw(st.integers(0, len(left)))
        seen += chain.from_iterable(left[:count])
        taken.append((size, count))
    rest = micro_batches(packer.rest(number, taken))

    assert sorted([*seen, *chain.from_iterable(rest)]) == list(range(len(lengths)))
    assert all(0 < lengths[documents].sum() <= capacity for documents in rest)
