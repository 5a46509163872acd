"""What is read of a batch where it is collated is found in its pass, and trusted only there."""

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from distca_hf.batches.beginnings import Placeholders
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.read_documents import (
    ENTRY,
    DocumentReader,
    ReadDocuments,
    Reading,
    ReadingCollator,
    reading_of,
    take_reading,
)
from distca_hf.config import DistCAConfig
from distca_hf.errors import PlanMismatchError
from distca_hf.kernels.interface import CallTensors
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import LoopbackTransport, run_ranks


Batch = dict[str, Any]
PACK = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
READER = DocumentReader(packs_rows=True, with_images=True, vocabulary_tokens=16)
CPU = torch.device("cpu")


def pack() -> Batch:
    ids = torch.arange(9)[None]
    return {"input_ids": ids, "position_ids": PACK.clone(), "labels": ids.clone()}


def rows() -> Batch:
    ids = torch.arange(8).view(2, 4)
    return {"input_ids": ids, "attention_mask": MASK.clone(), "labels": ids.masked_fill(MASK == 0, -100)}


def collated(make: Callable[[], Batch], in_worker: bool = False) -> Batch:
    """A batch as a step of Trainer gets it from its own process, or from a worker."""
    collator = pickle.loads(pickle.dumps(ReadingCollator(make_of, READER)))
    batch = next(iter(DataLoader([make], batch_size=None, collate_fn=collator, num_workers=in_worker)))
    moved: Batch = send_to_device(batch, CPU)
    return moved


def make_of(make: Callable[[], Batch]) -> Batch:
    return make()


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(("make", "lengths"), [(pack, [3, 2, 4]), (rows, [3, 4])])
def test_a_pass_finds_what_was_read_of_its_batch(
    make: Callable[[], Batch], lengths: list[int], in_worker: bool
) -> None:
    batch = collated(make, in_worker)
    reading = take_reading(batch)

    assert reading is not None
    assert ENTRY not in batch
    assert ("documents" in vars(reading)) == in_worker
    assert reading_of(batch) is reading
    assert reading.documents is not None
    assert np.array_equal(reading.documents.lengths, lengths)
    without_labels = {name: value for name, value in batch.items() if name != "labels"}
    assert reading_of(without_labels | {"num_items_in_batch": 3}) is reading


IMAGE_READER = replace(READER, placeholders=Placeholders(7, 8), finds_image_tokens=True)


@pytest.mark.parametrize(
    ("change", "runs", "num_image_tokens"),
    [
        ({}, [0, 2, 4, 6], 5),  # of the seven tokens without padding, and one in it
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 4, 3)}, [], 0),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 4, 3), "pixel_values": torch.ones(4, 8)}, [0, 7], 8),
    ],
    ids=["ids", "embeddings without images", "embeddings with images"],
)
def test_runs_of_image_tokens_are_found_among_tokens_without_padding(
    change: Batch, runs: list[int], num_image_tokens: int
) -> None:
    given = {"input_ids": torch.tensor([[7, 8, 1, 7], [2, 8, 8, 3]]), "attention_mask": MASK}
    batch = {name: value for name, value in (given | change).items() if value is not None}
    read = IMAGE_READER.read(batch)

    assert read.image_runs.tolist() == runs
    assert read.num_image_tokens == num_image_tokens
    assert len(READER.read(batch).image_runs) == 0


def other_positions(batch: Batch) -> Batch:
    return batch | {"position_ids": PACK.clone()}


def changed_in_place(batch: Batch) -> Batch:
    batch["input_ids"][0, 0] = 5
    return batch


def in_the_same_memory(batch: Batch) -> Batch:
    """Another tensor where one was that was freed."""
    name = "position_ids" if "position_ids" in batch else "attention_mask"
    return batch | {name: torch.from_numpy(batch[name].numpy())}


@pytest.mark.parametrize(
    "change",
    [
        other_positions,
        changed_in_place,
        in_the_same_memory,
        lambda batch: batch | {"input_ids": batch["input_ids"].clone()},
        lambda batch: {name: value[:, :-1] for name, value in batch.items()},
        lambda batch: batch | {"pixel_values": torch.ones(1, 4)},
        lambda batch: batch | {"cu_seq_lens_q": torch.tensor([0, 9])},
        lambda batch: {name: value for name, value in batch.items() if name not in ("position_ids", "attention_mask")},
    ],
)
@pytest.mark.parametrize("make", [pack, rows])
def test_a_pass_on_other_tensors_is_read_itself(make: Callable[[], Batch], change: Callable[[Batch], Batch]) -> None:
    batch = collated(make)
    reading = take_reading(batch)
    assert reading_of(batch) is reading is not None
    assert reading_of(change(batch)) is None


def with_images() -> Batch:
    return rows() | {"pixel_values": torch.ones(4, 6), "mm_token_type_ids": torch.zeros(2, 4, dtype=torch.int64)}


def test_labels_that_keep_rows_padded_are_not_optional() -> None:
    batch = rows() | {"attention_mask": MASK.flip(1)}  # padding predicts the first label of a row
    batch[ENTRY] = Reading(READER, batch)
    reading = take_reading(batch)
    assert reading is not None
    del batch["labels"]
    assert reading_of(batch) is None
    assert reading.documents is not None
    assert reading.documents.lengths is None
    assert READER.read(batch).lengths is not None


@pytest.mark.parametrize("wrong", [{"input_ids": torch.full((1, 9), 16)}, {"position_ids": PACK + 1}, {"labels": "?"}])
def test_a_batch_that_cannot_be_read_is_left_to_its_pass(wrong: Batch) -> None:
    batch = ReadingCollator(lambda rows: pack() | wrong, READER)(None)
    assert (batch[ENTRY].documents is not None) == ("labels" in wrong)


@pytest.mark.parametrize("in_worker", [False, True])
def test_memory_that_a_collator_uses_again_is_read_in_its_pass(in_worker: bool) -> None:
    buffer = pack()
    reading = ReadingCollator(lambda rows: buffer, READER)(None)[ENTRY]
    if in_worker:
        assert reading.documents is not None
    buffer["position_ids"].copy_(PACK.flip(1))  # the next batch, while this one is on its way to the device
    assert (reading.documents is None) != in_worker


def test_batches_that_nobody_reads_are_freed_and_what_is_not_read_is_not_held() -> None:
    def taken() -> tuple[Reading, list[weakref.ref[Any]]]:
        batch = collated(lambda: pack() | {"logits": torch.ones(1, 9, 16)})  # of a teacher
        reading = take_reading(batch)
        assert reading is not None
        return reading, [weakref.ref(batch[name]) for name in ("logits", "input_ids")]

    reading, (logits, tokens) = taken()
    assert (logits() is None, tokens() is None) == (True, False)
    del reading
    gc.collect()
    assert tokens() is None


def lengths_of(*lengths: int) -> Reading:
    reading = Reading(READER, {})
    reading.documents = ReadDocuments(np.array(lengths), None, False, None)
    return reading


@pytest.mark.parametrize("known_on_rank_1", [0, 1])
def test_batches_are_gathered_ahead_where_all_ranks_know_equally_many(known_on_rank_1: int) -> None:
    def run(transport: LoopbackTransport) -> list[str]:
        planner, places = GivenPlanner(DistCAConfig(), transport, read=READER.read), count_gathers(transport)
        following = [lengths_of(3)] * (known_on_rank_1 if transport.rank else 1)
        planner.begin_step(following, 2, CPU)
        attend(planner.plan(pack()))
        return places

    for places in run_ranks(2, run):
        assert sum("of its step" in place for place in places) == known_on_rank_1


def test_ranks_with_other_numbers_of_micro_batches_are_named() -> None:
    def run(transport: LoopbackTransport) -> None:
        planner = GivenPlanner(DistCAConfig(), transport, read=READER.read)
        planner.begin_step([lengths_of(3)], 2 + transport.rank, CPU)
        planner.plan(pack())

    told = r"micro-batch 0: ranks disagree.*micro-batches in this step is 2 on rank 0, 3 on rank 1"
    with pytest.raises(PlanMismatchError, match=told):
        run_ranks(2, run)


@pytest.mark.parametrize("unknown_on", [None, 1])
def test_a_plan_made_ahead_is_used_where_all_ranks_have_it(unknown_on: int | None) -> None:
    def run(transport: LoopbackTransport) -> tuple[list[int], int]:
        batches = [pack(), rows(), pack()]
        for batch in batches:
            batch[ENTRY] = Reading(READER, batch)

        def read(batch: Batch) -> ReadDocuments:
            reading = None if transport.rank == unknown_on else reading_of(batch)
            return (reading and reading.documents) or READER.read(batch)

        planner = GivenPlanner(DistCAConfig(), transport, read=read, places_rows=True)
        readings = [take_reading(batch) for batch in batches]
        planner.begin_step(readings[1:], 2, CPU)
        gathers = count_gathers(transport)
        work = []
        for batch in batches:
            live = planner.plan(batch)
            work.append(sum(attend(live).facts.work))
            planner.end_pass()
        return work, len(gathers)

    (work, gathers), other = run_ranks(2, run)
    assert other == (work, gathers)
    # Two agreements for each of three batches, lengths of the first one, and of both others.
    assert gathers == (8 if unknown_on is None else 10)
    assert work == [2 * sum(n * (n + 1) // 2 for n in lengths) for lengths in ((3, 2, 4), (3, 4), (3, 2, 4))]


def attend(live: LivePlan | None) -> LivePlan:
    """Does what a model's first layer does before it attends: ranks show each other what they know."""
    assert live is not None
    live.begin_forward_pass(1, {})
    tensors = CallTensors((torch.float32,) * 3, (torch.Size((1, 8)),) * 3)
    live.forward_pass.agree_to_attend(live.fingerprint, tensors)
    return live


def count_gathers(transport: LoopbackTransport) -> list[str]:
    """Notes the places of all gathers from now on."""
    places: list[str] = []
    gather = transport.gather

    def noted(values: Sequence[int], where: str, *scope: Any) -> Any:
        places.append(where)
        return gather(values, where, *scope)

    transport.gather = noted  # type: ignore[method-assign]
    return places
