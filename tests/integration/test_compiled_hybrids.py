"""A hybrid that is compiled as a whole, on two ranks with cut documents: mixers run outside of graphs, and numbers are
those of plain layers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distca_hf
from support.compiling import graph_breaks, graphs_made
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.versions import states_travel


STEPS = 3
# Loss and gradient norm of each step.
Numbers = list[tuple[float, float]]


def train(compiled: bool) -> tuple[Numbers, list[str], int]:
    """Numbers of this rank, why graphs broke, and how many there are. Only rank 0 compiles, which takes seconds: plain
    layers of the other rank make the same exchanges."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = tiny_model("qwen3_5", num_hidden_layers=2).train()
    distca_hf.enable(model, plugin, longest_document_tokens=200)
    plans: list[Any] = []
    model.model.register_forward_hook(
        lambda module, args, given, out: plans.append(given["distca_plan"]), with_kwargs=True
    )
    if compiled and dist.get_rank() == 0:
        model.compile(backend="aot_eager" if is_thorough() else "eager")
    wrapped = nn.parallel.DistributedDataParallel(model)
    rows = random_dataset(lengths=(150, 30))
    numbers = []
    for _, batch in zip(range(STEPS), plugin.dataloader(rows, model=model), strict=False):
        model.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
        assert plans[-1].facts.cut_documents
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        numbers.append((loss.item(), norm.item()))
    return numbers, graph_breaks(), graphs_made()


@states_travel
def test_numbers_are_those_of_plain_layers(tmp_path: Path) -> None:
    plain = run_ranks(2, train, tmp_path / "plain", False)
    compiled = run_ranks(2, train, tmp_path / "compiled", True)

    for rank, ((numbers, breaks, graphs), (expected, *_)) in enumerate(zip(compiled, plain, strict=True)):
        assert (graphs > 0) is (rank == 0)
        for made, usual in zip(numbers, expected, strict=True):
            assert made == pytest.approx(usual, rel=1e-5)
        known = r"class Apart|function <function Apart|GiveDocuments|hidden_from_dynamo|move_(in|home)"
        assert [why for why in breaks if not re.search(known, why)] == []
