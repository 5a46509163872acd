"""The loader in one process: what is in a batch, which batches an epoch has, and where it continues."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

import distca_hf
from distca_hf.batches import prepare as ahead
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.prepare import Prefetcher
from distca_hf.data import collate
from distca_hf.errors import ConfigError, PackingError
from distca_hf.patches import data_workers
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.telemetry import LoaderTimes
from support.commands import HANG_SECONDS
from support.data import random_dataset


CAPACITY_TOKENS = 192
IGNORED = -100
KEYS = ["input_ids", "position_ids", "labels", "shift_labels", "attention_mask", "distca_plan"]
Batch = dict[str, Any]


def loader_of(dataset: Any = None, seed: int = 0, shuffle: bool = True, **settings: Any) -> PlacedLoader:
    plugin = distca_hf.DistCAPlugin(**{"tokens_per_rank": CAPACITY_TOKENS, "pad_to_multiple_of": 1} | settings)
    return plugin.dataloader(
        random_dataset() if dataset is None else dataset, seed=seed, shuffle=shuffle, device="cpu"
    )


def documents_in(batch: Batch) -> list[tuple[int, ...]]:
    """Documents of a batch without padding, cut where positions begin anew."""
    ids, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
    starts = [row for row, position in enumerate(positions) if position == 0]
    return [tuple(ids[start:stop]) for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True)]


def same(left: Batch, right: Batch) -> bool:
    return all(torch.equal(left[name], right[name]) for name in KEYS[:-1])


def all_same(left: Iterable[Batch], right: Iterable[Batch]) -> bool:
    return all(same(*pair) for pair in zip(left, right, strict=True))


def background_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "distca-ahead"]


def rows_of(dataset: Dataset) -> list[tuple[int, ...]]:
    return [tuple(row) for row in dataset["input_ids"]]


def test_batch_has_its_keys_in_order_as_int64_rows_on_the_device() -> None:
    """`input_ids` first: Accelerate takes the batch's size from the first key."""
    for batch in loader_of():
        assert list(batch) == KEYS
        rows = batch["input_ids"].shape[1]
        assert [(batch[name].dtype, batch[name].shape) for name in KEYS[:-1]] == [(torch.int64, (1, rows))] * 5
        assert {batch[name].device.type for name in KEYS[:-1]} == {"cpu"}
        assert isinstance(batch["distca_plan"], LivePlan)


def test_every_document_comes_exactly_once_per_epoch_with_its_own_positions() -> None:
    dataset = random_dataset(count=120)
    loader = loader_of(dataset)
    for _ in range(3):
        batches = list(loader)

        assert len(batches) == len(loader) > 3
        assert Counter(document for batch in batches for document in documents_in(batch)) == Counter(rows_of(dataset))
        assert all(batch["input_ids"].shape[1] <= CAPACITY_TOKENS for batch in batches)


@pytest.mark.parametrize(
    ("multiple", "rows"),
    [(1, 130), (8, 136), (128, CAPACITY_TOKENS), (100, CAPACITY_TOKENS), (CAPACITY_TOKENS, CAPACITY_TOKENS)],
)
def test_rows_are_padded_to_a_multiple_but_never_beyond_the_rank(multiple: int, rows: int) -> None:
    """130 tokens; padding is in no document, has no label and is not attended to."""
    dataset = Dataset.from_dict({"input_ids": [list(range(1, 91)), list(range(1, 41))]})
    (batch,) = loader_of(dataset, pad_to_multiple_of=multiple)

    assert batch["input_ids"].shape == (1, rows)
    assert documents_in({name: batch[name][:, :130] for name in KEYS[:2]})[0] in rows_of(dataset)
    for name, fill in (("input_ids", 0), ("position_ids", 0), ("labels", IGNORED), ("shift_labels", IGNORED)):
        assert (batch[name][:, 130:] == fill).all(), name
    assert batch["distca_plan"].label_tokens == 128
    assert batch["distca_plan"].facts.num_documents == 2


def test_epochs_have_one_length_and_differ() -> None:
    """Trainer works out epochs and positions from one `len`."""
    loader = loader_of(random_dataset(count=100, lengths=(20, 90, 150)))
    length, seen = len(loader), []
    for _ in range(4):
        batches = list(loader)
        assert len(batches) == len(loader) == length
        seen.append([documents_in(batch) for batch in batches])

    assert all(left != right for at, left in enumerate(seen) for right in seen[:at])


def test_order_is_decided_by_seed_and_epoch() -> None:
    first, again, other = loader_of(seed=3), loader_of(seed=3), loader_of(seed=4)
    epochs = [list(first), list(first)]

    assert all_same(epochs[0], list(again))
    assert all_same(epochs[1], list(again))
    assert not all_same(epochs[0], list(other)[: len(epochs[0])])


def test_without_shuffling_every_epoch_is_in_the_order_of_the_dataset() -> None:
    dataset = Dataset.from_dict({"input_ids": [[at] * 64 for at in range(1, 13)]})
    loader = loader_of(dataset, shuffle=False)
    for _ in range(2):
        tokens = [sorted(set(batch["input_ids"][0].tolist())) for batch in loader]
        assert tokens == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def test_set_epoch_chooses_the_next_epoch_and_the_others_follow() -> None:
    whole, loader = loader_of(), loader_of()
    epochs = [list(whole) for _ in range(4)]
    loader.set_epoch(2)

    assert all_same(list(loader), epochs[2])
    assert all_same(list(loader), epochs[3])
    loader.set_epoch(0)
    assert all_same(list(loader), epochs[0])


def test_loaded_position_goes_before_set_epoch_once() -> None:
    """A loop that calls `set_epoch` before every epoch does not undo what was loaded."""
    whole, resumed = loader_of(), loader_of()
    epochs = [list(whole) for _ in range(2)]
    batches = iter(whole)
    epochs.append([*islice(batches, 3)])
    resumed.load_state_dict(whole.state_dict())
    epochs[2] += batches
    resumed.set_epoch(0)

    assert all_same(list(resumed), epochs[2][3:])
    resumed.set_epoch(1)
    assert all_same(list(resumed), epochs[1])


def test_state_is_plain_numbers_and_texts() -> None:
    loader = loader_of()
    next(iter(loader))

    assert {type(value) for value in loader.state_dict().values()} <= {int, str, bool, tuple}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"dataset": random_dataset(seed=1)}, "dataset='.*', this loader has '.*'"),
        ({"dataset": random_dataset(count=59)}, "dataset='.*', this loader has '.*'"),
        ({"seed": 5}, "seed=0, this loader has 5"),
        ({"shuffle": False}, "shuffle=True, this loader has False"),
    ],
)
def test_state_of_another_loader_is_refused_with_both_values(other: dict[str, Any], told: str) -> None:
    loader = loader_of(**other)
    with pytest.raises(ConfigError, match=told):
        loader.load_state_dict(loader_of().state_dict())


@pytest.mark.parametrize("missing", ["version", "dataset", "seed"])
def test_incomplete_state_is_refused(missing: str) -> None:
    state = loader_of().state_dict()
    del state[missing]
    with pytest.raises(ConfigError, match=f"{missing}=None"):
        loader_of().load_state_dict(state)


@pytest.mark.parametrize(
    ("taken", "epochs", "told"), [(2, [], True), (1, [], False), (2, [1], False), (2, [0], False)]
)
def test_epoch_that_begins_again_is_told(
    taken: int, epochs: list[int], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless one batch was looked at, or the program says which epoch it wants."""
    loader = loader_of()
    for _ in range(2):
        for _ in islice(loader, taken):
            pass
        for epoch in epochs:
            loader.set_epoch(epoch)

    assert ("come twice" in caplog.text) == told


def test_leaving_an_epoch_early_begins_it_again() -> None:
    loader = loader_of()
    for at, _ in enumerate(loader):
        if at == 2:
            break

    assert all_same(list(loader), epoch_of(0))


def epoch_of(number: int) -> list[Batch]:
    loader = loader_of()
    loader.set_epoch(number)
    return list(loader)


def test_no_thread_is_left_behind() -> None:
    loader = loader_of()
    list(loader)
    assert background_threads() == []
    for _ in loader:
        assert len(background_threads()) <= 1
        break
    gc.collect()
    assert background_threads() == []
    with pytest.raises(ZeroDivisionError):
        [1 // batch["input_ids"][0, :0].numel() for batch in loader]
    gc.collect()
    assert background_threads() == []


class Broken(Exception):
    """An error of a user's own transform."""


def test_error_of_the_background_thread_arrives_in_the_loop_with_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches before the broken one come first; nothing hangs and no thread stays."""
    monkeypatch.setattr(collate, "MOST_DOCUMENTS", 1)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if rows["number"] == [10]:
            raise Broken("row 10")
        return {"input_ids": [[number] * 64 for number in rows["number"]]}

    dataset = Dataset.from_dict({"number": list(range(12)), "length": [64] * 12}).with_transform(tokenize)
    loader = loader_of(dataset, shuffle=False)
    taken: list[Batch] = []
    with pytest.raises(Broken, match="row 10"):
        taken.extend(loader)

    assert len(taken) == 3
    assert background_threads() == []


def test_workers_outlive_signals_of_their_process_group_and_hand_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ends on SIGTERM may still need rows of theirs."""
    data_workers.data_workers.apply()  # as a training does
    monkeypatch.setattr(collate, "MOST_DOCUMENTS", 1)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokens = 64 if rows["number"] != [40] else 63
        return {"input_ids": [[number] * tokens for number in rows["number"]]}

    dataset = Dataset.from_dict({"number": list(range(60)), "length": [64] * 60}).with_transform(tokenize)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS, pad_to_multiple_of=1)
    taken = []

    def take() -> None:
        for batch in plugin.dataloader(dataset, shuffle=False, device="cpu", num_workers=2):
            taken.append(sorted(set(batch["input_ids"][0].tolist())))
            for worker in multiprocessing.active_children():
                for number in (signal.SIGTERM, signal.SIGINT):
                    assert worker.pid is not None
                    os.kill(worker.pid, number)

    with pytest.raises(PackingError, match=r"^row 40: .* \(63,\); column 'length' announces 64 integers$"):
        take()

    assert taken == [[at, at + 1, at + 2] for at in range(0, 39, 3)]
    assert background_threads() == []
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("made_on_access", [True, False])
def test_transform_that_comes_later_is_refused(made_on_access: bool) -> None:
    """Stored tokens would be read past it, or rows made by another function than the one that was counted."""
    dataset = random_dataset()
    if made_on_access:
        dataset = dataset.add_column("length", [len(row) for row in dataset["input_ids"]])
        dataset.set_transform(lambda rows: rows)
    loader = loader_of(dataset)
    next(iter(loader))
    dataset.set_transform(lambda rows: {"input_ids": [row[::-1] for row in rows["input_ids"]]})
    with pytest.raises(PackingError, match=r"another transform .* make another loader"):
        next(iter(loader))


def test_padded_row_of_a_small_dataset_is_found_before_the_first_batch() -> None:
    padded = Dataset.from_dict(
        {"input_ids": [[3] * 64] * 12, "attention_mask": [[1] * 64] * 11 + [[1] * 60 + [0] * 4]}
    )
    with pytest.raises(PackingError, match="row 11: attention_mask is 0 at token 60: the dataset is padded"):
        next(iter(loader_of(padded, shuffle=False)))


def test_several_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were launched, but torch\.distributed is not initialised"):
        loader_of()


def test_documents_are_the_whole_documents_of_a_micro_batch() -> None:
    loader = loader_of(random_dataset(count=100))
    for epoch in range(2):
        for at, batch in enumerate(loader):
            documents = loader.documents(epoch, at)
            assert sorted(tuple(document.input_ids.tolist()) for document in documents) == sorted(documents_in(batch))
            assert all(document.labels[0] == IGNORED == document.shift_labels[-1] for document in documents)
            assert all((document.shift_labels[:-1] == document.labels[1:]).all() for document in documents)
            labels = sum(int((document.shift_labels != IGNORED).sum()) for document in documents)
            assert labels == batch["distca_plan"].label_tokens == int((batch["shift_labels"] != IGNORED).sum())


@pytest.mark.parametrize(("policy", "documents", "truncated"), [("truncate", 3, 2), ("split", 6, 0)])
def test_overlong_documents_are_truncated_or_split(policy: str, documents: int, truncated: int) -> None:
    tokens = [list(range(1, count + 1)) for count in (CAPACITY_TOKENS + 50, 10, 2 * CAPACITY_TOKENS + 1)]
    loader = loader_of(Dataset.from_dict({"input_ids": tokens}), overlong=policy)
    found = [document for batch in loader for document in documents_in(batch)]

    assert loader.documents_truncated == truncated
    assert loader.num_documents == len(found) == documents
    assert loader.longest_document_tokens == max(map(len, found)) == CAPACITY_TOKENS
    everything_kept = sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(tokens))
    assert everything_kept == (policy == "split")


def test_history_and_times_tell_what_was_handed_out() -> None:
    loader = loader_of()
    assert (len(loader.history), loader.times.micro_batches) == (0, 0)
    for at, batch in enumerate(loader, 1):
        assert (len(loader.history), loader.times.micro_batches) == (at, at)
        assert loader.history[-1] == batch["distca_plan"].facts
        time.sleep(0.002)

    facts = loader.history[0]
    lengths = sorted(len(document) for document in documents_in(next(iter(loader_of()))))
    assert facts.num_documents == len(lengths)
    assert facts.longest_document_tokens == lengths[-1]
    assert facts.work == facts.work_before == (sum(length * (length + 1) // 2 for length in lengths),)
    assert facts.imbalance == 1.0
    assert facts.key_rows_sent == (0,)
    assert loader.times.plan_seconds > 0
    assert loader.times.step_seconds >= 0.002 * (len(loader) - 1)
    assert 0 <= loader.times.wait_share < 1


def test_only_the_very_first_wait_of_a_loader_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever it is asked: every wait that counts is one second long."""
    seconds, loop = count(), threading.current_thread()  # not the clock of the thread that prepares

    def now() -> float:
        return float(next(seconds)) if threading.current_thread() is loop else 0.0

    monkeypatch.setattr(ahead, "time", SimpleNamespace(perf_counter=now))
    loader = loader_of()
    list(loader)
    assert loader.times.wait_seconds == len(loader) - 1

    list(loader)
    list(loader)
    assert loader.times.wait_seconds == 3 * len(loader) - 1


def test_micro_batches_are_numbered_through_all_epochs() -> None:
    loader = loader_of()
    numbers = [batch["distca_plan"].micro_batch for _ in range(2) for batch in loader]

    assert numbers == list(range(2 * len(loader)))


def test_ahead_makes_no_more_items_than_its_depth_before_they_are_wanted() -> None:
    made: list[int] = []
    enough = threading.Event()

    def make() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 4:
                enough.set()
            yield number

    items = iter(Prefetcher(make, depth=3, times=LoaderTimes()))
    assert made == []
    assert next(items) == 0
    assert enough.wait(HANG_SECONDS)
    time.sleep(0.05)  # time to go wrong
    assert made == [0, 1, 2, 3, 4]  # one handed out, three in the queue, one in the thread's hand
    items.close()
    assert background_threads() == []


def test_batches_that_no_enabled_model_runs_on_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Dataset.from_dict({"input_ids": [[3] * 192] * 30})
    for _ in loader_of(dataset, prefetch=2):
        pass
    told = [record.getMessage() for record in caplog.records if "no enabled model ran on them" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("the last 6 micro-batches")


def test_batches_that_wait_for_their_step_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A pipeline takes all micro-batches of an optimizer step before it runs the first of them."""
    dataset = Dataset.from_dict({"input_ids": [[3] * 192] * 30})
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS, prefetch=1)
    for number, batch in enumerate(plugin.dataloader(dataset, device="cpu", micro_steps=10)):
        if number % 10 == 9:
            batch["distca_plan"].begin_forward_pass(1, {})
    assert "no enabled model" not in caplog.text
