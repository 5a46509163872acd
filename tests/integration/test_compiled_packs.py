"""Decoder layers that are compiled as the documentation says, on two ranks: no graph breaks, and the numbers of plain
layers. Batches are given, and placed inside the model, or placed before."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distca_hf
from support.compiling import graph_breaks, graphs_made
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks


NUM_LAYERS = 2
STEPS = 3
RESIDENCIES = ("refetch", "keep", "auto")
TOKENS = 192
# Loss and gradient norm of each step, and whether rows moved.
Numbers = list[tuple[float, float, bool]]


def _packs(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Long documents on rank 0, short ones on rank 1; other numbers of rows in every step."""
    for step in range(STEPS):
        lengths = (150 + 8 * step, 90) if rank == 0 else (9, 17 + step)
        documents = random_documents(2, seed=2 * step + rank, lengths=lengths)
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        ids = torch.tensor([token for document in documents for token in document])[None]
        yield {"input_ids": ids, "labels": ids, "position_ids": positions[None]}


def _train(
    placed: bool,
    compile_layers: Callable[[nn.Module], None],
    residencies: tuple[str, ...] = RESIDENCIES,
    attention: str = "",
) -> tuple[Numbers, list[str], int]:
    """Numbers of a few steps for each residency, why graphs broke, and how many there are.

    Args:
        attention: what checkpointing does with it; empty without checkpointing.
    """
    numbers: Numbers = []
    for kv_residency in residencies:
        model = tiny_model(num_hidden_layers=NUM_LAYERS).train()
        settings: dict[str, Any] = {"kv_residency": kv_residency, "checkpointed_attention": attention or "save"}
        plugin = distca_hf.DistCAPlugin(**settings, **({"tokens_per_rank": TOKENS} if placed else {}))
        distca_hf.enable(model, plugin)
        if attention:
            if torch.__version__ < (2, 12):  # fails under DDP with every attention
                torch._dynamo.config.optimize_ddp = False
            model.gradient_checkpointing_enable({"use_reentrant": False})
        compile_layers(model)
        numbers += _steps(model, plugin.dataloader(random_dataset()) if placed else None)
    return numbers, graph_breaks(), graphs_made()


def _steps(model: nn.Module, loader: Any) -> Numbers:
    wrapped = nn.parallel.DistributedDataParallel(model)
    plans = []
    model.register_forward_hook(lambda module, args, given, out: plans.append(given["distca_plan"]), with_kwargs=True)
    batches = _packs(torch.distributed.get_rank()) if loader is None else loader
    numbers = []
    for _, batch in zip(range(STEPS), batches, strict=False):
        model.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        assert plans[-1].forward_pass.backward_calls == NUM_LAYERS
        moves = plans[-1].planned.moves
        moved = sum(plans[-1].facts.key_rows_sent) > 0 if moves is None else moves.on_host.crosses
        numbers.append((loss.item(), norm.item(), moved))
    return numbers


def _plain(model: nn.Module) -> None:
    pass


def _eager(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def _aot(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def _dynamic(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", dynamic=True)


def _inductor(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile()


def _whole(model: nn.Module) -> None:
    """What `torch_compile=True` does."""
    model.compile(backend="aot_eager")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Numbers]]:
    """Numbers of plain layers by rank, for one residency; for packs, and for placed batches."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        placed: [numbers for numbers, *_ in run_ranks(2, _train, folder / str(placed), placed, _plain, ("keep",))]
        for placed in (False, True)
    }


@pytest.mark.parametrize(
    ("placed", "compile_layers", "residencies", "attention"),
    [
        pytest.param(False, _aot, RESIDENCIES, "", id="packs"),
        pytest.param(False, _dynamic, ("keep",), "save", id="packs, checkpointed"),
        pytest.param(False, _whole, ("keep",), "", id="packs, whole model"),
        pytest.param(True, _eager, ("refetch",), "", id="placed"),
        pytest.param(True, _aot, ("keep",), "recompute", id="placed, recomputed"),
        pytest.param(True, _inductor, ("keep",), "", id="placed, inductor"),
    ],
)
def test_numbers_are_those_of_plain_layers(
    placed: bool,
    compile_layers: Callable[[nn.Module], None],
    residencies: tuple[str, ...],
    attention: str,
    expected: dict[bool, list[Numbers]],
    tmp_path: Path,
) -> None:
    arguments = placed, compile_layers, residencies, attention
    compiled = run_ranks(2, _train, tmp_path, *arguments)

    for usual, (same, breaks, graphs) in zip(expected[placed], compiled, strict=True):
        # Rows move at both borders of the decoder, outside of graphs. A layer that is compiled alone is inside.
        others = [why for why in breaks if compile_layers is not _whole or not re.search("move_(in|home)", why)]
        assert others == []
        parts = 2 if compile_layers is _whole and not placed else 1  # the decoder, and the head
        assert 0 < graphs <= 2 * parts * len(residencies), "one for the first lengths, one for all others"
        assert [moved for *_, moved in usual] == [True] * STEPS, "rows must move"
        for (loss, norm, _), (same_loss, same_norm, moved) in zip(usual * len(residencies), same, strict=True):
            assert same_loss == pytest.approx(loss, abs=1e-6)
            assert same_norm == pytest.approx(norm, rel=1e-5)
            assert moved
