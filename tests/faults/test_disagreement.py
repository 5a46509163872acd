"""Ranks that are about to do different things find out before anything is sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

import distca_hf
from distca_hf.comm.transport import Traffic
from distca_hf.data import collate
from support.data import random_dataset
from support.harm import NUM_LAYERS
from support.models import tiny_model
from support.ranks import Outcome, start_ranks


WORLD = 3


def _train(folder: Path, what: str) -> None:
    """Begins training with something different on rank 1; writes down how much was exchanged."""
    rank = torch.distributed.get_rank()
    different = rank == 1
    settings: dict[str, Any] = {"tokens_per_rank": 96}
    if different and what == "capacity":
        settings["tokens_per_rank"] = 80
    plugin = distca_hf.DistCAPlugin(**settings)
    dataset = random_dataset(seed=1 if different and what == "dataset" else 0)
    loader = plugin.dataloader(dataset, seed=1 if different and what == "seed" else 0)
    model = _model(what if different else "")
    distca_hf.enable(model, plugin)
    batches = iter(loader)
    if different and what == "position":
        next(batches)
    try:
        batch = next(batches)
        with torch.set_grad_enabled(not (different and what == "gradients")):
            model(**batch)
    finally:
        (folder / f"exchanges-{rank}").write_text(str(_traffic(plugin).exchanges))


def _model(what: str) -> nn.Module:
    """A model in training; of another dtype, in evaluation or with other heads if that is what is different."""
    shape: dict[str, Any] = {"num_key_value_heads": 1} if what == "heads" else {}
    model = tiny_model(num_hidden_layers=NUM_LAYERS, **shape).train(what != "mode")
    return model.to(torch.bfloat16) if what == "dtype" else model


def _traffic(plugin: distca_hf.DistCAPlugin) -> Traffic:
    return plugin.transport(torch.device("cpu")).traffic


def _train_on_packs(folder: Path, what: str) -> None:
    """The same with batches that were packed elsewhere, planned together also in evaluation."""
    rank = torch.distributed.get_rank()
    plugin = distca_hf.DistCAPlugin(evaluate="distca")
    model = _model(what if rank == 1 else "")
    distca_hf.enable(model, plugin)
    try:
        model(input_ids=torch.ones((1, 90 if rank == 0 else 9), dtype=torch.int64))
    finally:
        (folder / f"exchanges-{rank}").write_text(str(_traffic(plugin).exchanges))


@pytest.mark.parametrize(
    ("train", "what", "named"),
    [
        (_train, "dataset", "lengths of documents is"),
        (_train, "seed", "seed is 0 on ranks 0 and 2, 1 on rank 1"),
        (_train, "capacity", "tokens_per_rank is 96 on ranks 0 and 2, 80 on rank 1"),
        (_train, "position", "attend micro-batch 0 on ranks 0 and 2, take micro-batch 1 on rank 1"),
        (_train, "gradients", "gradients is True on ranks 0 and 2, False on rank 1"),
        (_train, "heads", "config.num_key_value_heads is 2 on ranks 0 and 2, 1 on rank 1"),
        (_train_on_packs, "heads", "config.num_key_value_heads is 2 on ranks 0 and 2, 1 on rank 1"),
        (_train_on_packs, "mode", "training is True on ranks 0 and 2, False on rank 1"),
        (_train_on_packs, "dtype", "dtypes of parameters is torch.float32 on ranks 0 and 2, torch.bfloat16 on rank 1"),
    ],
    ids=lambda given: given.__name__ if callable(given) else given.split()[0],
)
def test_every_rank_raises_before_anything_is_sent(
    train: Callable[[Path, str], None], what: str, named: str, tmp_path: Path
) -> None:
    outcomes = start_ranks(WORLD, train, tmp_path, tmp_path, what)

    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert "PlanMismatchError" in outcome.output
        assert "nothing was sent" in outcome.output
        assert named in outcome.output
        assert (tmp_path / f"exchanges-{outcome.rank}").read_text() == "0"


def _train_on_a_damaged_row(folder: Path) -> None:
    """One document has missing tokens; only the rank that holds that part of it finds out."""
    collate.MOST_DOCUMENTS = 1  # of a large dataset not all is read before the first step
    rows: list[list[int | None]] = [[1] * 90, [2] * 90, [3] * 90, [4] * 18]
    rows[2][40] = None
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    loader = plugin.dataloader(Dataset.from_dict({"input_ids": rows}), shuffle=False)
    model = tiny_model(num_hidden_layers=1)
    distca_hf.enable(model, plugin)
    for batch in loader:
        model(**batch).loss.backward()
        (folder / f"trained-{torch.distributed.get_rank()}").touch()


def test_a_rank_that_cannot_read_its_part_stops_all(tmp_path: Path) -> None:
    outcomes = start_ranks(WORLD, _train_on_a_damaged_row, tmp_path, tmp_path)

    assert all(outcome.exit_code == 1 for outcome in outcomes)
    damaged = [outcome for outcome in outcomes if "errors.PackingError: row 2" in outcome.output]
    assert len(damaged) == 1
    for outcome in outcomes:
        if outcome is not damaged[0]:
            assert "PeerLostError" in outcome.output
            told = f"rank {damaged[0].rank} could not do its part; see the error there: PackingError: row 2"
            assert f"micro-batch 0: {told}" in outcome.output
    assert not list(tmp_path.glob("trained-*"))


def _step_after_a_failed_step(folder: Path) -> list[float]:
    """All ranks raise inside a layer, catch it, and go on with the next micro-batch."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    loader = plugin.dataloader(random_dataset(), seed=0)
    model = tiny_model(num_hidden_layers=NUM_LAYERS)
    distca_hf.enable(model, plugin)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, batch in enumerate(loader):
        if step in (1, 3):
            hook = model.model.layers[1].mlp.register_forward_pre_hook(_raise)
            with pytest.raises(ArithmeticError):
                wrapped(**batch)
            hook.remove()
            continue
        loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
        if step == 6:
            break
    return losses


def _raise(*_: Any) -> None:
    raise ArithmeticError("a layer failed")


def _losses_of(outcomes: list[Outcome]) -> list[float]:
    assert all(outcome.exit_code == 0 for outcome in outcomes), outcomes
    return outcomes[0].result


def test_a_good_step_follows_a_failed_one(tmp_path: Path) -> None:
    losses = _losses_of(start_ranks(2, _step_after_a_failed_step, tmp_path / "2", tmp_path))
    alone = _losses_of(start_ranks(1, _step_after_a_failed_step_alone, tmp_path / "1", tmp_path))

    assert losses == pytest.approx(alone, abs=1e-5)


def _step_after_a_failed_step_alone(folder: Path) -> list[float]:
    """The good steps only, on one rank that holds everything."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=192)
    loader = plugin.dataloader(random_dataset(), seed=0)
    model = tiny_model(num_hidden_layers=NUM_LAYERS)
    distca_hf.enable(model, plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, batch in enumerate(loader):
        if step not in (1, 3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if step == 6:
            break
    return losses
