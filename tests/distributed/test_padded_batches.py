"""Padded batches: tokens are placed inside the model without padding, numbers are those of sdpa."""

from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import VOCABULARY, tiny_model
from support.ranks import run_ranks


WORLD = 2
# Of the rows of each rank: chosen answers first.
LENGTHS = ((60, 9, 48, 12), (5, 7, 9, 6))
SIDES = ("right", "left", "both")
KINDS = ("llama", "gemma3")

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


def padded_batch(rank: int, side: str) -> Batch:
    """Rows of random tokens, padded on one side, or on both as of prompts and answers."""
    generator = torch.Generator().manual_seed(rank)
    lengths = LENGTHS[rank]
    ids = torch.zeros(len(lengths), max(lengths) + 2, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        free = ids.shape[1] - length
        start = {"right": 0, "left": free, "both": free // 2}[side]
        ids[row, start : start + length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, start : start + length] = 1
    return {"input_ids": ids, "attention_mask": mask}


def preference_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """That of DPO, without a reference."""
    logits = model(**batch, use_cache=False).logits[:, :-1]
    scores = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    learnt = batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]  # no token is behind padding
    chosen, rejected = (scores * learnt).sum(1).chunk(2)
    return -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def gradients_of(model: nn.Module) -> Gradients:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def expected_step(kind: str, side: str) -> tuple[float, Gradients]:
    """Mean loss and gradients of the batches of all ranks, in one process with sdpa."""
    model, total = tiny_model(kind, "sdpa").train(), 0.0
    for rank in range(WORLD):
        loss = preference_loss(model, padded_batch(rank, side)) / WORLD
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def _steps() -> list[tuple[float, Gradients, bool]]:
    """Loss, gradients and whether rows moved in a step of every kind of model, with every kind of padding."""
    steps = []
    for kind in KINDS:
        model = distca_hf.enable(tiny_model(kind), distca_hf.DistCAPlugin()).train()
        wrapped = nn.parallel.DistributedDataParallel(model)
        for side in SIDES:
            loss = preference_loss(wrapped, padded_batch(torch.distributed.get_rank(), side))
            loss.backward()
            torch.distributed.all_reduce(mean := loss.detach() / WORLD)
            steps.append((mean.item(), gradients_of(model), watch_of(model).planner.latest_moves.crosses))
    return steps


def test_a_preference_step_has_the_gradients_of_sdpa(tmp_path: Path) -> None:
    steps = run_ranks(WORLD, _steps, tmp_path)[0]

    for (kind, side), (loss, gradients, moved) in zip(
        ((kind, side) for kind in KINDS for side in SIDES), steps, strict=True
    ):
        expected, expected_gradients = expected_step(kind, side)
        assert moved
        assert loss == pytest.approx(expected, abs=1e-5)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=f"{kind}, {side}: {name}")
