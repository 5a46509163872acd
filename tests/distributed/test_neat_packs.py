"""Packs of two ranks with a mask of every pair of tokens, as collators make them for sdpa: rows are placed, and losses
and gradients are those of sdpa with that mask."""

from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.data import square_mask
from support.given_batches import Batch, gradients_of, made_model, packed, worst_of
from support.ranks import run_ranks


WORLD = 2
LENGTHS = ((90, 30), (5, 9, 17, 1))


def neat_pack(rank: int, padding: int, dtype: torch.dtype) -> Batch:
    batch = packed(LENGTHS[rank], seed=rank)
    for name, value in batch.items():
        batch[name] = nn.functional.pad(value, (0, padding), value=-100 if name == "labels" else 0)
    numbers = torch.repeat_interleave(torch.arange(1, len(LENGTHS[rank]) + 1), torch.tensor(LENGTHS[rank]))[None]
    return batch | {"attention_mask": square_mask(nn.functional.pad(numbers, (0, padding)), dtype)}


def _train(padding: int, dtype: torch.dtype, trains: bool) -> list[tuple[float, float, bool]]:
    rank, plugin = torch.distributed.get_rank(), distca_hf.DistCAPlugin()
    batch = neat_pack(rank, padding, dtype)
    usual, ours = (made_model("llama", "sdpa").train(trains) for _ in range(2))
    distca_hf.enable(ours, plugin)
    losses = []
    for model in (usual, ours):
        wrapped = nn.parallel.DistributedDataParallel(model)
        loss = wrapped(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    expected, found = gradients_of(usual), gradients_of(ours)
    worst = max(((found[name] - one).abs().max() / one.abs().max()).item() for name, one in expected.items())
    planner = watch_of(ours).planner
    moved = planner is not None and planner.latest_moves.crosses
    plugin.close()
    return [(abs(losses[0] - losses[1]), worst, moved)]


@pytest.mark.parametrize(
    ("padding", "dtype", "trains"), [(0, torch.bool, True), (3, torch.float64, True), (3, torch.bool, False)]
)
def test_losses_and_gradients_are_those_of_sdpa(
    padding: int, dtype: torch.dtype, trains: bool, tmp_path: Path
) -> None:
    of_ranks = run_ranks(WORLD, _train, tmp_path, padding, dtype, trains)

    loss, gradient = worst_of(of_ranks)
    assert loss <= 1e-9
    assert gradient <= 1e-6
    assert all(step[2] == trains for steps in of_ranks for step in steps)
