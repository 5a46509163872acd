"""Accelerate treats a placed loader as one of its own: it steps at the end of an epoch, and skips first batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

import distca_hf
from distca_hf.batches.loader import PlacedLoader
from distca_hf.patches.skip_batches import skip_batches


MICRO_BATCHES, STEPS_EVERY = 10, 4


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, gradient_accumulation_steps=STEPS_EVERY)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def rows() -> Dataset:
    return Dataset.from_dict({"input_ids": [[number] * 100 for number in range(MICRO_BATCHES)]})


def placed() -> PlacedLoader:
    return distca_hf.DistCAPlugin(tokens_per_rank=128).dataloader(rows(), seed=3, device="cpu")


def documents(batches: Any) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in batches]


def steps_in(accelerator: Accelerator, loader: Any, epochs: int = 2) -> tuple[list[int], list[int]]:
    """Numbers of the micro-batches after which an optimizer steps, and rows of their outputs that metrics would count;
    evaluates in the midst of each epoch."""
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    evaluation = accelerator.prepare(DataLoader(range(3)))
    taken, steps, counted = 0, [], []
    for _ in range(epochs):
        for number, _ in enumerate(loader):
            taken += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                steps += [taken] if accelerator.sync_gradients else []
                counted.append(len(accelerator.gather_for_metrics(torch.ones(5))))
            if number == MICRO_BATCHES // 2:
                list(evaluation)
    return steps, counted


def test_an_optimizer_steps_at_the_end_of_an_epoch_as_with_a_data_loader(accelerator: Accelerator) -> None:
    of_rows, _ = steps_in(accelerator, DataLoader(rows().with_format("torch")))

    assert steps_in(accelerator, placed()) == (of_rows, [5] * 2 * MICRO_BATCHES)
    assert of_rows == [4, 8, 10, 14, 18, 20]


def test_a_loader_that_is_left_early_is_active_no_more(accelerator: Accelerator) -> None:
    loader = placed()
    for _ in islice(loader, 3):
        assert accelerator.gradient_state.active_dataloader is loader
        assert not accelerator.gradient_state.end_of_dataloader
    del _

    assert not accelerator.gradient_state.in_dataloader


def test_first_batches_are_skipped_as_those_of_a_data_loader(accelerator: Accelerator) -> None:
    epochs = [documents(placed_epoch) for placed_epoch in [placed(), *[_at_epoch(1), _at_epoch(2)]]]
    loader = placed()
    later = accelerator.skip_first_batches(loader, 3)

    assert len(later) == MICRO_BATCHES - 3
    assert documents(later) == epochs[0][3:]
    assert documents(loader) == epochs[1]
    assert documents(skip_first_batches(later, 2)) == epochs[2][5:]
    assert later.state_dict() == loader.state_dict()
    loader.set_epoch(0)
    for skipped in (MICRO_BATCHES, MICRO_BATCHES + 1):
        assert len(skip_first_batches(loader, skipped)) == 0
    assert documents(skip_first_batches(loader, MICRO_BATCHES)) == []
    assert documents(loader) == epochs[1]


def test_first_batches_are_skipped_from_a_position_that_was_loaded(accelerator: Accelerator) -> None:
    whole, loader = placed(), placed()
    saved = {position: whole.state_dict() for position, _ in enumerate(whole, 1)}
    loader.load_state_dict(saved[4])
    later = skip_first_batches(loader, 2)

    assert steps_in(accelerator, later, epochs=1)[0] == [4]  # the last of four
    loader.load_state_dict(saved[4])
    assert documents(skip_first_batches(loader, 2)) == documents(placed())[6:]


def test_other_loaders_are_skipped_as_before_and_the_patch_can_be_undone(accelerator: Accelerator) -> None:
    loader = accelerator.prepare(DataLoader(range(5)))
    assert [int(row) for row in skip_first_batches(loader, 3)] == [3, 4]
    patched = accelerate.skip_first_batches
    skip_batches.apply()
    assert accelerate.skip_first_batches is patched is skip_first_batches

    skip_batches.revert()
    try:
        with pytest.raises(AttributeError, match="sampler"):
            accelerator.skip_first_batches(placed(), 1)
    finally:
        skip_batches.apply()
    assert accelerate.skip_first_batches is globals()["skip_first_batches"]


def _at_epoch(number: int) -> PlacedLoader:
    loader = placed()
    loader.set_epoch(number)
    return loader
