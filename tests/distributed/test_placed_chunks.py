"""Placed batches of a model whose layers attend inside of chunks (Llama 4): gradients are those of each document."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

import distca_hf
from support.given_batches import Gradients, gradients_of, ids_of, own_loss
from support.models import tiny_model
from support.ranks import run_ranks


# Some chunks, exactly one, one and a token, less than one; a model of 16 tokens in a chunk.
LENGTHS = [200, 31, 16, 17, 3, 64, 90, 5, 40, 33]


def _mean() -> tuple[float, Gradients, bool]:
    """Loss and gradients as means over ranks, and whether rows crossed."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=256)
    model = distca_hf.enable(tiny_model("llama4").double().train(), plugin)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    dataset = Dataset.from_dict({"input_ids": [ids.tolist() for ids in ids_of(LENGTHS, 0)]})
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        [batch] = plugin.dataloader(dataset)
        loss = model(**batch).loss
        loss.backward()
    mean, gradients = loss.detach(), gradients_of(model)
    for tensor in (mean, *gradients.values()):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return mean.item(), gradients, plugin.transport(torch.device("cpu")).traffic.bytes_sent > 0


def test_gradients_are_those_of_each_document_alone(tmp_path: Path) -> None:
    usual, losses, labels = tiny_model("llama4", "sdpa").double().train(), 0.0, sum(LENGTHS) - len(LENGTHS)
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        for ids in ids_of(LENGTHS, 0):
            loss = own_loss(usual, {"input_ids": ids[None], "labels": ids[None]}) * ((len(ids) - 1) / labels)
            loss.backward()
            losses += loss.item()
    expected = gradients_of(usual)

    for mean, gradients, crosses in run_ranks(3, _mean, tmp_path):
        assert crosses
        assert mean == pytest.approx(losses, rel=1e-12)
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name
