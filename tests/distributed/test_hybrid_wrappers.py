"""Ways to wrap a hybrid with cut documents: each has the loss and the gradients of every document alone."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distca_hf
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks
from support.thorough import is_thorough
from support.versions import states_travel


WORLD = 4
LAYERS = {"qwen3_5": 2, "nemotron_h": 4}
DATASET = random_dataset(lengths=(150, 30))
# Loss, and the gradients of all parameters that are trained.
Step = tuple[float, torch.Tensor]


def ddp(model: nn.Module, **settings: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **settings)


def ddp_that_looks_for_unused_parameters(model: nn.Module) -> nn.Module:
    model.never_used = nn.Parameter(torch.ones(2))
    return ddp(model, find_unused_parameters=True)


def ddp_of_a_static_graph(model: nn.Module) -> nn.Module:
    return ddp(model, static_graph=True)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    for name, part in [*model.named_modules()]:
        if name.rpartition(".")[0].endswith("layers"):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def all_of(model: nn.Module) -> nn.Module:
    return model


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=r".*(linear_attn|mixer)\.in_proj(_qkv|_a)?"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave lora_A without gradients
            nn.init.normal_(parameter, std=0.1)
    return adapted


def with_frozen_mixers(model: nn.Module) -> nn.Module:
    """All of a mixer of Qwen 3.5; a part of Nemotron-H's, so that only summaries need gradients there."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("linear_attn" not in name and "in_proj" not in name and "conv1d" not in name)
    return model


class Way(NamedTuple):
    """How a model is trained."""

    wrap: Callable[[nn.Module], nn.Module]
    trained: Callable[[nn.Module], nn.Module] = all_of
    reentrant: bool | None = None  # checkpointing; None for none


WAYS = {
    "unused parameters": Way(ddp_that_looks_for_unused_parameters),
    "unused parameters, checkpointed": Way(ddp_that_looks_for_unused_parameters, with_frozen_mixers, False),
    "static graph": Way(ddp_of_a_static_graph, reentrant=True),
    "frozen": Way(ddp, with_frozen_mixers),
    "LoRA": Way(ddp, with_lora),
    "HSDP": Way(hsdp, reentrant=True),
    "HSDP, LoRA": Way(hsdp, with_lora, False),
    "HSDP, frozen": Way(hsdp, with_frozen_mixers),
}


def step(kind: str, way: Way) -> Step:
    """The step as it is trained."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = way.trained(tiny_model(kind, "distca", num_hidden_layers=LAYERS[kind]))
    distca_hf.enable(model, plugin, longest_document_tokens=200)
    if way.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": way.reentrant})
        model.enable_input_require_grads()
    batch = next(iter(plugin.dataloader(DATASET, seed=0, model=model)))
    assert batch["distca_plan"].facts.cut_documents
    wrapped = way.wrap(model.train())  # DDP must live until backward
    loss = wrapped(**batch).loss
    loss.backward()
    dist.all_reduce(mean := loss.detach() / WORLD)
    return mean.item(), gradients(model)


@cache
def alone(kind: str, trained: Callable[[nn.Module], nn.Module]) -> Step:
    """The step on every document alone, in one process."""
    model = trained(tiny_model(kind, "sdpa", num_hidden_layers=LAYERS[kind])).train()
    documents = distca_hf.DistCAPlugin(tokens_per_rank=WORLD * 96).dataloader(DATASET, seed=0).documents(0, 0)
    labels, total = sum(int((one.shift_labels != -100).sum()) for one in documents), 0.0
    for one in documents:
        row = {name: torch.from_numpy(getattr(one, name))[None] for name in ("input_ids", "labels")}
        of_document = model(**row, num_items_in_batch=labels, use_cache=False).loss
        of_document.backward()
        total += of_document.item()
    return total, gradients(model)


def gradients(model: Any) -> torch.Tensor:
    found = [one.grad for name, one in model.named_parameters() if one.grad is not None and name != "never_used"]
    return torch.cat([(one.full_tensor() if hasattr(one, "full_tensor") else one).flatten() for one in found])


def steps(kind: str, ways: Sequence[str]) -> dict[str, Step]:
    return {name: step(kind, WAYS[name]) for name in ways}


@states_travel
@pytest.mark.parametrize("kind", LAYERS if is_thorough() else ["qwen3_5"])
def test_step_is_that_of_every_document_alone(kind: str, tmp_path: Path) -> None:
    for rank in run_ranks(WORLD, steps, tmp_path, kind, [*WAYS]):
        for name, (loss, made) in rank.items():
            expected_loss, expected = alone(kind, WAYS[name].trained)
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            assert made.numel() == expected.numel(), name
            assert float((made - expected).norm() / expected.norm()) <= 1e-5, name
