"""Batches that are written to between their reading and their pass."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca_hf.batches.read_documents import Batch, DocumentReader
from distca_hf.batches.written_batches import WrittenBatches, sampled, state_of
from distca_hf.errors import PackingError
from distca_hf.runtime.live_plan import LivePlan


READER = DocumentReader(packs_rows=True, with_images=True, shared_tokens=4)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def batch_of(**columns: torch.Tensor) -> Batch:
    ids = torch.arange(3, 23).view(2, 10)
    positions = torch.arange(10).expand(2, 10).contiguous()
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        **columns,
    }


def passed(written: WrittenBatches, batch: Batch, read: Batch, layers: Callable[[], Any], shared: int = 4) -> None:
    """Two passes, the first of which is on a batch of which this was read."""
    written.expect(batch, state_of(batch), READER.read(read).checksums)
    layers()
    facts: Any = SimpleNamespace(facts=SimpleNamespace(shared_tokens=shared), micro_batch=7)
    plan: LivePlan = facts
    written.check_later(plan)
    written.expect(batch, state_of(batch), None)


@pytest.mark.parametrize("column", ["input_ids", "position_ids", "attention_mask", "labels"])
@pytest.mark.parametrize("place", [(0, 0), (1, 9), (1, 4)])
def test_each_number_of_a_column_counts(column: str, place: tuple[int, int]) -> None:
    batch = batch_of()
    passed(WrittenBatches(), batch, batch_of(), lambda: None)
    batch[column][place] += 1
    with pytest.raises(PackingError, match=f"checksum of {column} in micro-batch 7 is"):
        passed(WrittenBatches(), batch, batch_of(), lambda: None)
    passed(WrittenBatches(), batch, batch_of(), lambda: None, shared=0)


def test_numbers_that_change_places_are_noticed() -> None:
    batch = batch_of()
    batch["input_ids"][0, :2] = batch["input_ids"][0, :2].flip(0)
    with pytest.raises(PackingError, match="checksum of input_ids in micro-batch 7 is"):
        passed(WrittenBatches(), batch, batch_of(), lambda: None)


@pytest.mark.parametrize("shape", [(9000, 12), (5, 3, 8, 6), (2, 4)])
def test_images_are_sampled(shape: tuple[int, ...]) -> None:
    batch, read = batch_of(pixel_values=drawn(*shape)), batch_of(pixel_values=drawn(*shape))
    rows = batch["pixel_values"].flatten(0, -2)
    assert min(256, len(rows)) <= len(sampled(rows)) < 512
    passed(WrittenBatches(), batch, read, lambda: None)
    sampled(rows)[-1, 2] += 1
    with pytest.raises(PackingError, match="checksum of pixel_values in micro-batch 7 is"):
        passed(WrittenBatches(), batch, read, lambda: None)


def test_casts_and_missing_labels_are_no_writes() -> None:
    read = batch_of(pixel_values=drawn(40, 6))
    batch = read | {"pixel_values": drawn(40, 6).to(torch.bfloat16)}
    del batch["labels"]
    passed(WrittenBatches(), batch, read, lambda: None)


def test_images_in_an_unknown_form_have_no_checksum() -> None:
    columns = {"pixel_values": drawn(40)}
    passed(WrittenBatches(), batch_of(**columns), batch_of(**columns), lambda: None)


def test_layers_may_write_to_their_arguments() -> None:
    batch, read = batch_of(), batch_of()
    passed(WrittenBatches(), batch, read, lambda: batch["position_ids"].add_(1))
    with pytest.raises(PackingError, match="checksum of position_ids"):
        passed(WrittenBatches(), batch, read, lambda: None)


@pytest.mark.gpu
def test_checksums_on_a_gpu_are_those_of_the_host() -> None:
    read, written = batch_of(pixel_values=drawn(40, 6)), WrittenBatches()
    batch = {name: column if name == "labels" else column.cuda() for name, column in read.items()}
    passed(written, batch, read, torch.cuda.synchronize)
    batch["position_ids"].data[1, 3] += 1
    passed(written, batch, read, lambda: None)
    torch.cuda.synchronize()
    with pytest.raises(PackingError, match="checksum of position_ids in micro-batch 7 is"):
        written.expect(batch, state_of(batch), None)
