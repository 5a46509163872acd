"""Batches and models at the edge, on real ranks: fewer tokens than ranks, frozen layers, no labels on a rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

import distca_hf
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks


def _gradients(dataset: Dataset, tokens_per_rank: int, frozen: tuple[str, ...]) -> tuple[list[float], dict[str, Any]]:
    """Losses of all micro-batches of an epoch, and the sum of their gradients, over all ranks."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens_per_rank, pad_to_multiple_of=1)
    model = tiny_model(num_hidden_layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    distca_hf.enable(model, plugin)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    losses = []
    for batch in plugin.dataloader(dataset):
        loss = wrapped(**batch).loss
        loss.backward()
        total = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare(dataset: Dataset, capacity_tokens: int, world: int, frozen: tuple[str, ...], folder: Path) -> None:
    alone = run_ranks(1, _gradients, folder / "alone", dataset, capacity_tokens, frozen)[0]
    together = run_ranks(world, _gradients, folder / "together", dataset, capacity_tokens // world, frozen)
    for losses, gradients in together:
        assert losses == pytest.approx(alone[0], abs=1e-5)
        assert gradients.keys() == alone[1].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[1][name], atol=2e-5, rtol=1e-4, msg=name)


def test_fewer_tokens_than_ranks(tmp_path: Path) -> None:
    _compare(Dataset.from_dict({"input_ids": [[5, 6, 7]]}), 8, 4, (), tmp_path)


def test_one_document_over_all_ranks(tmp_path: Path) -> None:
    _compare(random_dataset(2, lengths=(64,)), 64, 4, (), tmp_path)


@pytest.mark.parametrize(
    "frozen",
    [
        ("model.embed_tokens", "model.layers.0", "model.layers.1"),
        ("model.embed_tokens", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"),
    ],
    ids=["whole layers", "keys and values of a layer"],
)
def test_frozen_parameters(frozen: tuple[str, ...], tmp_path: Path) -> None:
    _compare(random_dataset(12), 192, 3, frozen, tmp_path)


def test_labels_on_one_rank_only(tmp_path: Path) -> None:
    rows = [[1 + token % 100 for token in range(60)], [7] * 20]
    labels = [[-100] * 59 + [3], [-100] * 20]
    _compare(Dataset.from_dict({"input_ids": rows, "labels": labels}), 80, 2, (), tmp_path)


def _loss_under(default_device: str) -> float:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, checkpointed_attention="offload")
    model = distca_hf.enable(tiny_model(num_hidden_layers=2), plugin).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = next(iter(plugin.dataloader(random_dataset(12))))
    ids = torch.arange(3, 60).unsqueeze(0)
    pack = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(57).unsqueeze(0)}
    torch.set_default_device(default_device)
    loss = model(**batch).loss + model(**pack).loss
    loss.backward()
    return float(loss)


def test_torch_may_make_new_tensors_on_another_device(tmp_path: Path) -> None:
    """Programs set it to their GPU. What ranks show each other, and outputs that wait on the host, are on the host."""
    usual, elsewhere = (run_ranks(2, _loss_under, tmp_path / device, device) for device in ("cpu", "meta"))

    assert elsewhere == pytest.approx(usual)
