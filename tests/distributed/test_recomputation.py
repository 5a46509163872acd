"""A model that recomputes attention, over real ranks: its exchanges run once, its numbers are those without."""

from pathlib import Path

import pytest
import torch
from torch import nn

import distca_hf
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks


LAYERS, STEPS = 3, 4
Trained = tuple[list[float], list[int], list[int]]  # losses and gradient norms, exchanges of forward, and of backward


def _train(kv_residency: str, checkpointed: bool, compiled: bool = False) -> Trained:
    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=LAYERS).train()
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, checkpointed_attention="recompute", kv_residency=kv_residency, exchange_legs=1
    )
    distca_hf.enable(model, plugin)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers if compiled else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    wrapped = nn.parallel.DistributedDataParallel(model)
    numbers, forward, backward = [], [], []
    for _, batch in zip(range(STEPS), plugin.dataloader(random_dataset()), strict=False):
        traffic = batch["distca_plan"].transport.traffic
        before = traffic.exchanges
        loss = wrapped(**batch).loss
        forward.append(traffic.exchanges - before)
        before = traffic.exchanges
        loss.backward()
        backward.append(traffic.exchanges - before)
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        numbers += [loss.item(), norm.item()]
        wrapped.zero_grad()
    return numbers, forward, backward


def _all() -> dict[str, Trained]:
    return {
        "plain": _train("refetch", False),
        "refetch": _train("refetch", True),
        "keep": _train("keep", True),
        "auto": _train("auto", True),
        "compiled": _train("keep", True, compiled=True),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_recomputation_exchanges_nothing_where_rows_are_kept(world: int, tmp_path: Path) -> None:
    for trained in run_ranks(world, _all, tmp_path):
        numbers, forward, _ = trained["plain"]
        assert max(forward) == LAYERS
        for again in trained.values():
            assert again[0] == pytest.approx(numbers, rel=1e-5)
            assert again[1] == forward
        # Gradients go home once. Without keeping, keys come again for recomputation, and once more for backward; a
        # layer compiled together with its checkpointing keeps them from recomputation on.
        for kind, times in (("plain", 2), ("refetch", 3), ("keep", 1), ("auto", 1), ("compiled", 2)):
            assert trained[kind][2] == [times * calls for calls in forward], kind
