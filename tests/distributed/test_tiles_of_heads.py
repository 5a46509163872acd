"""Attention in tiles of heads over real ranks: documents are cut, and gradients are those of whole modules."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import distca_hf
from distca_hf.errors import ConfigError
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.versions import needs_transformers


LAYERS, KV_HEADS, STEPS = 2, 5, 2
FORMS = {
    "none": {},
    "save": {"checkpointed_attention": "save"},
    "offload": {"checkpointed_attention": "offload", "mlp_tokens": 16},
    "recompute": {"checkpointed_attention": "recompute", "kv_residency": "keep"},
    "recompute, fetch again": {"checkpointed_attention": "recompute", "kv_residency": "refetch"},
    "reentrant": {},
}
Trained = tuple[list[torch.Tensor], list[int], list[int]]


def _model(form: str, wrap: str, **settings: Any) -> tuple[nn.Module, distca_hf.DistCAPlugin]:
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 10, "num_key_value_heads": KV_HEADS}
    model = tiny_model(hidden_size=80, **sizes).double().train()
    plugin = distca_hf.DistCAPlugin(exchange_chunks=1, **FORMS[form], **settings)
    distca_hf.enable(model, plugin)
    if form != "none":
        model.gradient_checkpointing_enable({"use_reentrant": form == "reentrant"})
    if wrap == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        assert isinstance(model, FSDPModule)
        return model, plugin
    return nn.parallel.DistributedDataParallel(model), plugin


def _train(form: str, wrap: str, heads: int, given: bool) -> Trained:
    """Losses and gradients of some steps; attention calls and exchanges of forward and backward."""
    settings = {} if given else {"tokens_per_rank": 96}
    model, plugin = _model(form, wrap, attention_kv_heads=heads, **settings)
    numbers, calls, exchanges = list[torch.Tensor](), list[int](), list[int]()
    batches: Any = _own_batches() if given else plugin.dataloader(random_dataset())
    for _, batch in zip(range(STEPS), batches, strict=False):
        plans: list[Any] = []
        inner = model.module if wrap == "ddp" else model
        handle = inner.model.register_forward_pre_hook(
            lambda module, args, kwargs, plans=plans: plans.append(kwargs.get("distca_plan")), with_kwargs=True
        )
        loss = model(**batch).loss
        handle.remove()
        [plan] = plans
        calls.append(plan.forward_pass.calls)
        before = plan.transport.traffic.exchanges
        loss.backward()
        exchanges.append(plan.transport.traffic.exchanges - before)
        gradients = [parameter.grad for parameter in model.parameters()]
        dist.all_reduce(loss)
        numbers += [loss.detach(), *[x.full_tensor() if isinstance(x, DTensor) else x for x in gradients]]
        model.zero_grad()
    return [x.clone() for x in numbers], calls, exchanges


def _own_batches() -> list[dict[str, torch.Tensor]]:
    """Packs of unequal work: rows are placed inside the model."""
    batches = []
    for step in range(STEPS):
        lengths = [90, 6] if dist.get_rank() == 0 else [24] * 4
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        tokens = (7 * positions + step + dist.get_rank()) % 128
        batches.append({"input_ids": tokens, "position_ids": positions, "labels": tokens})
    return batches


def _compared(
    wrap: str, given: bool, forms: Sequence[str]
) -> dict[str, tuple[float, list[int], list[int], list[int]]]:
    """For each form the largest difference; calls with tiles and without; exchanges of backward with tiles."""
    results = {}
    for form in forms:
        right, whole_calls, whole_exchanges = _train(form, wrap, 0, given)
        tiled, calls, exchanges = _train(form, wrap, 2, given)
        scale = max(float(x.abs().max()) for x in right)
        worst = max(float((x - y).abs().max()) for x, y in zip(tiled, right, strict=True)) / scale
        results[form] = worst, whole_calls, calls, [a - 3 * b for a, b in zip(exchanges, whole_exchanges, strict=True)]
    return results


ALL = [*FORMS]


@pytest.mark.parametrize(
    ("ranks", "wrap", "given", "forms"),
    [
        (2, "ddp", False, ALL),
        (3, "fsdp2", False, ALL if is_thorough() else ["recompute"]),
        (2, "fsdp2", True, ALL if is_thorough() else ["offload"]),
    ],
)
def test_gradients_are_those_of_whole_modules(
    ranks: int, wrap: str, given: bool, forms: Sequence[str], tmp_path: Path
) -> None:
    for results in run_ranks(ranks, _compared, tmp_path, wrap, given, forms):
        for form, (worst, whole_calls, calls, more_exchanges) in results.items():
            assert worst < 1e-12, form
            assert whole_calls == [LAYERS] * STEPS
            assert calls == [3 * LAYERS] * STEPS  # tiles of 2, 2 and 1 KV heads
            assert given or more_exchanges == [0] * STEPS, form


def _refusal_of_divided_heads(folder: Path) -> str:
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    with pytest.raises(ConfigError) as refused:
        distca_hf.enable(model, distca_hf.DistCAPlugin(attention_kv_heads=1), 64)
    return str(refused.value)


@needs_transformers("5.23", "older ones divide models otherwise")
def test_heads_that_tensor_ranks_divide_are_refused(tmp_path: Path) -> None:
    tiny_model(num_key_value_heads=4).save_pretrained(tmp_path / "model")
    for refusal in run_ranks(2, _refusal_of_divided_heads, tmp_path / "ranks", tmp_path / "model"):
        assert "attention_kv_heads=1: tensor ranks divide the heads of this model already" in refusal


def _evaluated(heads: int) -> list[float]:
    """Losses of an evaluation whose documents are cut, after a step of training."""
    model = tiny_model(num_hidden_layers=LAYERS, num_key_value_heads=4)
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96, attention_kv_heads=heads, evaluate="distca")
    distca_hf.enable(model.double(), plugin)
    losses = []
    for is_training in (True, False, True):
        batch = next(iter(plugin.dataloader(random_dataset(), shuffle=False)))
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            losses.append(model(**batch).loss.item())
    return losses


def test_passes_without_gradients_run_in_tiles_as_well(tmp_path: Path) -> None:
    whole, tiled = (run_ranks(2, _evaluated, tmp_path / str(heads), heads) for heads in (0, 3))
    for one, other in zip(whole, tiled, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
