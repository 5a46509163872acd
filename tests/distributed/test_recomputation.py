"""A model that recomputes attention, over real ranks: its exchanges run once, its numbers are those without."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import distca_hf
from distca_hf.errors import ConfigError
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.versions import TRANSFORMERS


LAYERS, STEPS = 2, 2
Trained = tuple[list[float], list[int], list[int]]  # losses and gradient norms, exchanges of forward, and of backward


def _train(kv_residency: str, form: str) -> Trained:
    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=LAYERS).train()
    plugin = distca_hf.DistCAPlugin(
        tokens_per_rank=96, checkpointed_attention="recompute", kv_residency=kv_residency, exchange_chunks=1
    )
    distca_hf.enable(model, plugin)
    if form not in ("", "wrapper"):
        model.gradient_checkpointing_enable({"use_reentrant": form == "reentrant"})
    for layer in model.model.layers if form == "compiled layers" else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    if form == "compiled model":
        model.compile(backend="aot_eager")
    if form == "wrapper":  # as activation_checkpointing of fsdp_config does
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        layers = set(model.model.layers)
        apply_activation_checkpointing(model, wrapper, check_fn=lambda module: module in layers)
    wrapped = nn.parallel.DistributedDataParallel(model)
    numbers, forward, backward = [], [], []
    steps = 1 if form.startswith("compiled") else STEPS  # another size of a batch would be compiled again
    for _, batch in zip(range(steps), plugin.dataloader(random_dataset()), strict=False):
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
        "plain": _train("refetch", ""),
        "refetch": _train("refetch", "non-reentrant"),
        "auto": _train("auto", "non-reentrant"),
        "wrapper": _train("auto", "wrapper"),
        "compiled layers": _train("auto", "compiled layers"),
        **({"compiled model": _train("auto", "compiled model")} if is_thorough() else {}),
        "reentrant": _train("auto", "reentrant"),
    }


def test_recomputation_exchanges_nothing_where_rows_are_kept(tmp_path: Path) -> None:
    for trained in run_ranks(2, _all, tmp_path):
        numbers, forward, _ = trained["plain"]
        assert max(forward) == LAYERS
        for again in trained.values():
            assert again[0] == pytest.approx(numbers[: len(again[0])], rel=1e-5)
            assert again[1] == forward[: len(again[1])]
        # Gradients go home once. Without keeping, keys come again for recomputation, and once more for backward; what
        # is reentrant keeps them from recomputation on. So does what is compiled together with its checkpointing, if
        # torch's partitioner recomputes attention; that of 2.11 does not in layers.
        times = {"plain": 2, "refetch": 3, "auto": 1, "wrapper": 1, "reentrant": 2}
        times |= {"compiled model": 2} if is_thorough() else {}
        recomputes = torch.__version__ >= "2.12" and TRANSFORMERS >= Version("5.17")  # compared as versions
        times["compiled layers"] = 2 if recomputes else 1
        for kind, count in times.items():
            assert trained[kind][2] == [count * calls for calls in trained[kind][1]], kind


def _tiles_that_run_again(wrap: str) -> list[bool]:
    model = tiny_model(num_hidden_layers=LAYERS).train()
    distca_hf.enable(model, distca_hf.DistCAPlugin(mlp_tokens=16))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped: nn.Module = model
    if wrap == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    tokens = torch.arange(40 + 30 * dist.get_rank())[None]
    for _ in range(2):
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
    return [layer.mlp.forward._needs_graph for layer in model.model.layers]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_tiles_run_no_more_often_under_wrappers(wrap: str, tmp_path: Path) -> None:
    """Weights are found among an MLP's own, before and after they are gathered: no tile is checkpointed by itself."""
    assert run_ranks(2, _tiles_that_run_again, tmp_path, wrap) == [[False] * LAYERS] * 2


# Settings of tiles, and a part of a layer that FSDP gathers by itself.
GATHERED = {
    "mlp_tokens=16: FSDP around a part of LlamaMLP": ({"mlp_tokens": 16}, "mlp.up_proj"),
    "attention_kv_heads=1: FSDP around a part of LlamaAttention": ({"attention_kv_heads": 1}, "self_attn.q_proj"),
}


def _refusals_of_gathered_parts() -> list[str]:
    refusals, mesh = [], init_device_mesh("cpu", (dist.get_world_size(),))
    for settings, name in GATHERED.values():
        model = tiny_model(num_hidden_layers=LAYERS).train()
        distca_hf.enable(model, distca_hf.DistCAPlugin(**settings))
        for part in (model.model.layers[0].get_submodule(name), model):
            fully_shard(part, mesh=mesh)
        tokens = torch.arange(70)[None]
        with pytest.raises(ConfigError) as refused:
            model(input_ids=tokens, labels=tokens)
        refusals.append(str(refused.value))
    return refusals


def test_weights_that_fsdp_gathers_for_each_tile_are_refused(tmp_path: Path) -> None:
    """Ranks may have unequal numbers of tiles, and would gather unequally often."""
    for refusals in run_ranks(2, _refusals_of_gathered_parts, tmp_path):
        for words, refusal in zip(GATHERED, refusals, strict=True):
            assert f"{words} gathers weights for each tile" in refusal


def _flat_gradients() -> list[torch.Tensor]:
    """Gradients of weights that FSDP1 made one tensor, with whole MLPs and attention, and with tiles."""
    gradients = []
    for mlp_tokens, heads in ((0, 0), (16, 1)):
        torch.manual_seed(0)
        model = tiny_model(num_hidden_layers=LAYERS).train()
        distca_hf.enable(model, distca_hf.DistCAPlugin(mlp_tokens=mlp_tokens, attention_kv_heads=heads))
        wrapped = FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))
        tokens = torch.arange(70)[None]
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(next(wrapped.parameters()).grad)
    return gradients


def test_tiles_give_flat_weights_their_gradients(tmp_path: Path) -> None:
    for whole, tiled in run_ranks(2, _flat_gradients, tmp_path):
        torch.testing.assert_close(tiled, whole, rtol=1e-4, atol=1e-7)
