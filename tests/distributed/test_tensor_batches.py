"""Batches of every kind on ranks that divide layers or experts: answers to one prompt, packs with images, and a
rank that holds no token. Losses and gradients are those of sdpa in one process.

One set of four processes runs all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import distca_hf
from support.data import random_documents
from support.models import VOCABULARY, tiny_model
from support.multimodal import document, multimodal_model, pack
from support.ranks import run_ranks
from support.thorough import is_thorough


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23), reason="Transformers divides experts rightly since 5.23"
)
DATA = 2
LLAMA, STATES, EXPERTS = "llama", "qwen3_5", "qwen3_moe"
# In the last one, a layer of the text gets features of images, too.
IMAGES = ("qwen2_5_vl", "qwen3_vl") if is_thorough() else ("qwen3_vl",)
# How each model is divided between four ranks.
SIZES = {
    LLAMA: {"tp_size": 2, "fsdp_size": DATA},
    STATES: {"tp_size": 2, "fsdp_size": DATA},
    **{kind: {"tp_size": 2, "fsdp_size": DATA} for kind in IMAGES},
    EXPERTS: {"tp_size": 2, "fsdp_size": DATA, "ep_size": 4},
}
DOCUMENTS = [[document(0, 60, image_at=5), document(1, 40)], [document(2, 9, image_at=2), document(3, 7)]]

PROMPT_TOKENS = 50
Gradients = dict[str, torch.Tensor]
Step = tuple[float, Gradients]


def answers(data_rank: int) -> dict[str, torch.Tensor]:
    """Padded answers to one prompt, of which some are on each data rank."""
    lengths, longest = ((90, 52, 60), (51, 70))[data_rank], 90
    generator = torch.Generator().manual_seed(data_rank)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    ids[:, :PROMPT_TOKENS] = torch.arange(3, 3 + PROMPT_TOKENS)
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()}


def loss_of_answers(model: nn.Module, data_rank: int, alone: bool) -> torch.Tensor:
    """As GRPO has it: the mean over answers of advantages and log probabilities."""
    batch = answers(data_rank)
    logits = model(**batch, use_cache=False).logits[:, :-1]
    scores = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    is_answer = batch["attention_mask"][:, 1:] * (torch.arange(1, 90) >= PROMPT_TOKENS)
    advantages = torch.linspace(-1, 1 + data_rank, len(scores))
    return -(advantages * (scores * is_answer).sum(1) / is_answer.sum(1)).mean()


def loss_of_images(model: nn.Module, data_rank: int, alone: bool) -> torch.Tensor:
    """Of a pack with images, or of each of its documents alone."""
    documents, positions = [{**one} for one in DOCUMENTS[data_rank]], []
    for one in documents:
        if "pixel_values" in one:  # patches of 14 pixels a side, and in the second model of 16
            missing = 6 * model.config.vision_config.patch_size**2 - one["pixel_values"].shape[1]
            one["pixel_values"] = nn.functional.pad(one["pixel_values"], (0, missing))
    for one in documents:
        text = torch.arange(one["input_ids"].shape[1]).expand(3, 1, -1)
        given = [one[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw") if name in one]
        positions.append(model.model.get_rope_index(*given)[0] if "image_grid_thw" in one else text)
    batches = documents if alone else [pack(documents, positions)]
    logits = [model(**batch, use_cache=False).logits for batch in batches]
    return torch.stack([one.log_softmax(-1)[..., 5].sum() / 100 for one in logits]).sum()


def loss_of_experts(model: nn.Module, data_rank: int, alone: bool) -> torch.Tensor:
    """Of a pack on data rank 0; the other one holds no token, and its loss is 0. Also of a model with states."""
    documents = [torch.tensor(one)[None] for one in random_documents(3, lengths=(60, 20, 9))] if data_rank == 0 else []
    labels = sum(ids.numel() - 1 for ids in documents) or 1
    if alone:
        losses = [model(input_ids=ids, labels=ids, num_items_in_batch=labels).loss for ids in documents]
        return torch.stack(losses).sum() if losses else torch.zeros((), requires_grad=True)
    row = torch.cat([torch.zeros((1, 0), dtype=torch.int64), *documents], 1)
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(ids.numel()) for ids in documents)])[None]
    loss: torch.Tensor = model(
        input_ids=row,
        labels=row.where(positions > 0, -100),
        position_ids=positions,
        num_items_in_batch=labels,
    ).loss
    return loss


LOSSES: dict[str, Callable[[Any, int, bool], torch.Tensor]] = {
    LLAMA: loss_of_answers,
    STATES: loss_of_experts,
    **dict.fromkeys(IMAGES, loss_of_images),
    EXPERTS: loss_of_experts,
}


def whole_gradients(model: nn.Module) -> Gradients:
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            whole = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            gradients[name] = whole.detach().clone()
    return gradients


def on_ranks(folders: dict[str, Path]) -> dict[str, tuple[Step, bool, int]]:
    """By model, mean loss over data ranks and gradients of a step, whether rows moved, and tokens that were not
    computed twice."""
    from transformers.distributed import DistributedConfig

    from distca_hf.integrations.models.forward_watch import watch_of

    seen = {}
    for kind, folder in folders.items():
        auto = AutoModelForImageTextToText if kind in IMAGES else AutoModelForCausalLM
        model = auto.from_pretrained(
            folder, attn_implementation="distca", distributed_config=DistributedConfig(**SIZES[kind])
        ).train()
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=PROMPT_TOKENS)
        distca_hf.enable(model, plugin, longest_document_tokens=64)
        loss = LOSSES[kind](model, plugin.members.grid.data_rank, False)
        loss.backward()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        planner = watch_of(model).planner
        shared_tokens = planner.totals.shared_tokens
        seen[kind] = (float(mean), whole_gradients(model)), planner.latest_moves.crosses, shared_tokens
        plugin.close()
    return seen


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Step, tuple[Step, bool, int]]]:
    """By model, the step in one process, and that on ranks."""
    parent = tmp_path_factory.mktemp("models")
    alone: dict[str, Step] = {}
    for kind in SIZES:
        model: Any = multimodal_model(kind, "sdpa") if kind in IMAGES else tiny_model(kind, "sdpa")
        model.train().save_pretrained(parent / kind)
        loss = torch.stack([LOSSES[kind](model, data_rank, True) for data_rank in range(DATA)]).mean()
        loss.backward()
        alone[kind] = loss.item(), whole_gradients(model)
    on_four = run_ranks(4, on_ranks, parent / "ranks", {kind: parent / kind for kind in SIZES})[3]
    return {kind: (alone[kind], on_four[kind]) for kind in SIZES}


@pytest.mark.parametrize("kind", SIZES)
def test_steps_are_those_of_one_process(kind: str, steps: dict[str, tuple[Step, tuple[Step, bool, int]]]) -> None:
    (expected, of_one), ((loss, gradients), moved, shared_tokens) = steps[kind]

    assert moved, "rows moved between data ranks"
    assert shared_tokens == (4 * PROMPT_TOKENS if kind == LLAMA else 0)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradients.keys() >= of_one.keys()
    assert any("visual" in name for name in of_one) == (kind in IMAGES)
    for name, gradient in of_one.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
