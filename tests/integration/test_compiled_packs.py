"""Compiled decoder layers under packs of others, whose tasks move: the numbers of layers that are not compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks


NUM_LAYERS = 2
STEPS = 3
RESIDENCIES = ("refetch", "keep", "auto")


def _packs(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Long documents on rank 0, short ones on rank 1; other numbers of rows in every step."""
    for step in range(STEPS):
        lengths = (150 + 8 * step, 90) if rank == 0 else (9, 17 + step)
        documents = random_documents(2, seed=2 * step + rank, lengths=lengths)
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        yield torch.tensor([token for document in documents for token in document])[None], positions[None]


def _train_both_ways(compiled: bool) -> list[tuple[float, float, bool]]:
    """Received keys are fetched again, then they are kept, then within a budget."""
    return [numbers for kv_residency in RESIDENCIES for numbers in _train(compiled, kv_residency)]


def _train(compiled: bool, kv_residency: str) -> list[tuple[float, float, bool]]:
    """Loss and gradient norm of each step, and whether tasks moved."""
    model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
    distca_hf.enable(model, distca_hf.DistCAPlugin(kv_residency=kv_residency))
    if compiled:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    wrapped = nn.parallel.DistributedDataParallel(model)
    plans = []
    model.register_forward_hook(lambda module, args, given, out: plans.append(given["distca_plan"]), with_kwargs=True)
    numbers = []
    for ids, positions in _packs(torch.distributed.get_rank()):
        model.zero_grad()
        loss = wrapped(input_ids=ids, labels=ids, position_ids=positions).loss
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        assert (plans[-1].forward_calls, plans[-1].backward_calls) == (NUM_LAYERS, NUM_LAYERS)
        numbers.append((loss.item(), norm.item(), plans[-1].facts.work != plans[-1].facts.work_before))
    return numbers


def test_numbers_are_those_of_plain_layers(tmp_path: Path) -> None:
    plain = run_ranks(2, _train_both_ways, tmp_path / "plain", False)
    compiled = run_ranks(2, _train_both_ways, tmp_path / "compiled", True)

    for usual, same in zip(plain, compiled, strict=True):
        assert [moved for _, _, moved in usual] == [True] * len(RESIDENCIES) * STEPS, "tasks must move"
        for (loss, norm, moved), (same_loss, same_norm, same_moved) in zip(usual, same, strict=True):
            assert same_loss == pytest.approx(loss, abs=1e-6)
            assert same_norm == pytest.approx(norm, rel=1e-5)
            assert same_moved == moved
