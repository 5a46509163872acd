"""Decoder layers that are compiled as the documentation says, on two ranks: no graph breaks, and the numbers of plain
layers. Batches are given, and placed inside the model, or placed before."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distca_hf
from distca_hf.batches.agreement import Returning
from distca_hf.integrations.models.forward_watch import watch_of
from support.compiling import graph_breaks, graphs_made
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough


STEPS = 3
TOKENS = 192
# Mean loss over ranks and gradient norm of each step, and whether rows moved.
Numbers = list[tuple[float, float, bool]]


def _packs(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Long documents on rank 0, short ones on rank 1; other numbers of rows in every step."""
    for step in range(STEPS):
        lengths = (150 + 8 * step, 90) if rank == 0 else (9, 17 + step)
        documents = random_documents(2, seed=2 * step + rank, lengths=lengths)
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        ids = torch.tensor([token for document in documents for token in document])[None]
        yield {"input_ids": ids, "labels": ids, "position_ids": positions[None], "num_items_in_batch": 100}


def _train(
    placed: bool,
    compile_layers: Callable[[nn.Module], None],
    layers: int,
    compiling: int = 0,
    kv_residency: str = "auto",
    attention: str = "",
) -> tuple[Numbers, list[str], int]:
    """Numbers of a few steps, why graphs broke, and how many there are.

    Args:
        layers: of the model. One that is compiled as a whole, or into kernels, has one: more of them take seconds.
        compiling: ranks that compile. Compilers take seconds of each; plain layers on others meet the same exchanges.
        attention: what checkpointing does with it; empty without checkpointing.
    """
    model = tiny_model(num_hidden_layers=layers).train()
    settings: dict[str, Any] = {"kv_residency": kv_residency, "checkpointed_attention": attention or "save"}
    plugin = distca_hf.DistCAPlugin(**settings, **({"tokens_per_rank": TOKENS} if placed else {}))
    distca_hf.enable(model, plugin)
    if attention:
        if torch.__version__ < (2, 12):  # fails under DDP with every attention
            torch._dynamo.config.optimize_ddp = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if dist.get_rank() < compiling:
        compile_layers(model)
    loader = plugin.dataloader(random_dataset()) if placed else None
    numbers = _steps(model, layers, loader, places_loss=compile_layers is _whole)
    return numbers, graph_breaks(), graphs_made()


def _steps(model: Any, layers: int, loader: Any, places_loss: bool) -> Numbers:
    """Trains; with `places_loss` head and loss run on placed rows in all steps but the first."""
    wrapped, watch = nn.parallel.DistributedDataParallel(model), watch_of(model)
    plans = []
    # One on the whole model could read results.
    backbone = model.model
    backbone.register_forward_hook(
        lambda module, args, given, out: plans.append(given["distca_plan"]), with_kwargs=True
    )
    batches = _packs(dist.get_rank()) if loader is None else loader
    numbers = []
    for step, batch in zip(range(STEPS), batches, strict=False):
        model.zero_grad()
        with watch.loss.read_as_sum(unless="" if places_loss and step else "logits are read"):
            loss = wrapped(**batch).loss
        returns_loss_only = watch.planner is not None and watch.planner.returning == Returning.LOSS
        assert returns_loss_only == (places_loss and step > 0)
        loss.backward()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        assert plans[-1].forward_pass.backward_calls == layers
        moves = plans[-1].planned.moves
        moved = sum(plans[-1].facts.key_rows_sent) > 0 if moves is None else moves.on_host.crosses
        numbers.append((mean.item(), norm.item(), moved))
    return numbers


def _plain(model: nn.Module) -> None:
    pass


def _eager(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def _aot(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def _inductor(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.compile()


def _whole(model: nn.Module) -> None:
    """What `torch_compile=True` does. Layers are lowered in the test before, which takes as long again."""
    model.compile(backend="aot_eager" if is_thorough() else "eager")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], list[Numbers]]:
    """Numbers of plain layers by rank, for packs and for placed batches, by the number of layers."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        (placed, layers): [
            numbers for numbers, *_ in run_ranks(2, _train, folder / f"{placed}{layers}", placed, _plain, layers)
        ]
        for placed in (False, True)
        for layers in (1, 2)
    }


@pytest.mark.parametrize(
    ("placed", "compile_layers", "layers", "compiling", "kv_residency", "attention"),
    [
        pytest.param(False, _aot, 2, 1, "auto", "save", id="packs, checkpointed"),
        pytest.param(False, _whole, 1, 1, "keep", "", id="packs, whole model"),
        pytest.param(True, _eager, 2, 2, "refetch", "", id="placed"),
        *([pytest.param(True, _aot, 2, 2, "keep", "recompute", id="placed, recomputed")] if is_thorough() else []),
        pytest.param(True, _inductor, 1, 1, "keep", "", id="placed, inductor"),
    ],
)
def test_numbers_are_those_of_plain_layers(
    placed: bool,
    compile_layers: Callable[[nn.Module], None],
    layers: int,
    compiling: int,
    kv_residency: str,
    attention: str,
    expected: dict[tuple[bool, int], list[Numbers]],
    tmp_path: Path,
) -> None:
    compiled = run_ranks(2, _train, tmp_path, placed, compile_layers, layers, compiling, kv_residency, attention)

    for rank, (usual, (same, breaks, graphs)) in enumerate(zip(expected[placed, layers], compiled, strict=True)):
        # Rows move at both borders of the decoder, outside of graphs. A layer that is compiled alone is inside.
        others = [why for why in breaks if compile_layers is not _whole or not re.search("move_(in|home)", why)]
        assert others == []
        parts = 2 if compile_layers is _whole and not placed else 1  # the decoder, and the head
        assert int(rank < compiling) <= graphs <= 2 * parts, "one for the first lengths, one for all others"
        assert [moved for *_, moved in usual] == [True] * STEPS, "rows must move"
        for (loss, norm, _), (same_loss, same_norm, moved) in zip(usual, same, strict=True):
            assert same_loss == pytest.approx(loss, abs=1e-6)
            assert same_norm == pytest.approx(norm, rel=1e-5)
            assert moved


def _compiled_step() -> tuple[list[float], list[float]]:
    """Losses of a step that is compiled with its backward pass, and of a plain one."""
    losses = []
    for compiles in (True, False):
        model = distca_hf.enable(tiny_model(num_hidden_layers=1).train(), distca_hf.DistCAPlugin())
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor], wrapped: Any = wrapped, optimizer: Any = optimizer) -> torch.Tensor:
            loss = wrapped(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if compiles:
            step = torch.compile(step, backend="eager")
        losses.append([step(batch).item() for batch in _packs(dist.get_rank())])
        assert watch_of(model).planner.latest_moves.crosses
    return losses[0], losses[1]


def test_a_step_may_be_compiled_with_its_backward_pass(tmp_path: Path) -> None:
    """The compiler would look into exchanges of gradients, and fail in one."""
    for compiled, plain in run_ranks(2, _compiled_step, tmp_path):
        assert compiled == pytest.approx(plain, abs=1e-6)
