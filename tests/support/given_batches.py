"""Batches of a user's own pipeline, packed and padded, by hand and at random: every rank has its own."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import VOCABULARY, tiny_config
from support.multimodal import document, multimodal_model


Batch = dict[str, Any]
Gradients = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
# Numbers of a patch of an image.
PATCH = {"qwen2_5_vl": 3 * 2 * 14 * 14, "qwen3_vl": 3 * 2 * 16 * 16, "qwen3_5": 3 * 2 * 16 * 16}
STEPS = 3


@contextmanager
def in_double() -> Iterator[None]:
    """Computes in float64 what models and losses compute in float32. Sums of gradients before that, as of shared rows,
    would be rounded otherwise than sums after it."""
    usual = torch.Tensor.to

    def to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_rounded = x.dtype == torch.float64 and torch.float32 in (*args, kwargs.get("dtype"))
        return x if is_rounded else usual(x, *args, **kwargs)

    def softmax(x: torch.Tensor, dim: int = -1, **_: Any) -> torch.Tensor:
        return torch.softmax(x, dim)

    of_tensors, of_routers = {"float": torch.Tensor.double, "to": to}, {"softmax": softmax}
    with patch.multiple(torch.Tensor, **of_tensors), patch.multiple(nn.functional, **of_routers):
        yield


def ids_of(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Returns documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def packed(lengths: Sequence[int], seed: int, form: str = "positions") -> Batch:
    """Returns one row of documents that positions tell apart, or positions and offsets."""
    documents = ids_of(lengths, seed)
    ids = torch.cat([*documents, torch.zeros(0, dtype=torch.int64)])[None]
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(0, dtype=torch.int64)])[None]
    batch: Batch = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
    if form == "offsets":
        batch["cu_seq_lens_q"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"]
        batch["max_length_q"] = batch["max_length_k"] = max(lengths)
    return batch


def padded(lengths: Sequence[int], seed: int, side: str = "right") -> Batch:
    """Returns a row for each document, padded on a side, or on "both"; without a mask if the side is "none"."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, document_ids in enumerate(ids_of(lengths, seed)):
        free = ids.shape[1] - len(document_ids)
        before = {"left": free, "both": free // 2}.get(side, 0)
        at = slice(before, before + len(document_ids))
        ids[row, at], mask[row, at], labels[row, at] = document_ids, 1, document_ids
        labels[row, at.start] = -100
    return {"input_ids": ids, "labels": labels} | ({} if side == "none" else {"attention_mask": mask})


def with_images(kind: str, lengths: Sequence[int], seed: int, has_image: bool, side: str) -> Batch:
    """Returns padded rows of a multimodal model, each with an image or none with any."""
    documents = [document(seed + n, tokens, 2 if has_image else None) for n, tokens in enumerate(lengths)]
    shape = (len(lengths), max(lengths))
    batch: Batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "mm_token_type_ids")}
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for row, (one, tokens) in enumerate(zip(documents, lengths, strict=True)):
        at = slice(0, tokens) if side == "right" else slice(max(lengths) - tokens, None)
        batch["attention_mask"][row, at] = 1
        for name in ("input_ids", "mm_token_type_ids"):
            batch[name][row, at] = one[name][0]
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][torch.arange(len(lengths)), batch["attention_mask"].argmax(dim=1)] = -100
    if has_image:
        batch["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in documents])
        patches = sum(len(one["pixel_values"]) for one in documents)
        generator = torch.Generator().manual_seed(seed)
        batch["pixel_values"] = torch.randn(patches, PATCH[kind], generator=generator, dtype=torch.float64)
    return batch


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the model's own loss."""
    return model(**batch, use_cache=False).loss


def with_embeddings(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the loss of a batch whose embeddings the caller looks up."""
    table = getattr(model, "module", model).get_input_embeddings()
    given = {name: value for name, value in batch.items() if name not in ("input_ids", "detached")}
    embeddings = table(batch["input_ids"])
    if batch.get("detached"):
        embeddings = embeddings.detach()
    return model(**given, inputs_embeds=embeddings, use_cache=False).loss


def of_all_hidden_states(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns a loss of hidden states of all layers at tokens."""
    output = model(**batch, use_cache=False, output_hidden_states=True)
    weight = (batch["labels"] != -100)[..., None]
    return output.loss + sum((state * weight).square().mean() for state in output.hidden_states)


def of_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns a loss that the caller makes of logits."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = model(**given, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return losses / 100


def of_two_passes(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the loss of two passes before one backward pass, the second with other tokens."""
    other = batch | {"input_ids": 2 + (batch["input_ids"] + 1) % (VOCABULARY - 2)}
    return own_loss(model, batch) + 0.5 * own_loss(model, other)


@dataclass(frozen=True)
class Draw:
    """A model, and batches of some steps.

    Attributes:
        kind: of the model.
        frozen: beginnings of names of parameters that are not trained.
        adapters: whether only adapters (LoRA) are trained.
        reentrant: kind of activation checkpointing; None without.
        loss: of a model on a batch.
        steps: batches of all ranks in each step.
        evens: numbers of the steps in which ranks have equal work.
        most: largest difference of a gradient, in its largest number.
    """

    kind: str
    frozen: tuple[str, ...]
    adapters: bool
    reentrant: bool | None
    loss: Loss
    steps: list[list[Batch]]
    evens: frozenset[int]
    most: float

    def __str__(self) -> str:
        trained = "adapters" if self.adapters else f"all but {', '.join(self.frozen)}" if self.frozen else "all"
        kept = {None: "", False: ", checkpointed", True: ", checkpointed (reentrant)"}[self.reentrant]
        return f"{self.kind}, trains {trained}{kept}, {self.loss.__name__}"

    def model(self, implementation: str) -> nn.Module:
        """Returns the model in float64, as it trains."""
        model = made_model(self.kind, implementation)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
        if self.reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
            if self.adapters:
                model.enable_input_require_grads()
        if self.adapters:
            torch.manual_seed(1)
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
            return get_peft_model(model, lora).to(torch.float64)
        return model


def made_model(kind: str, implementation: str) -> PreTrainedModel:
    """Returns a tiny model in float64; its weights are equal every time."""
    if kind in PATCH:
        return multimodal_model(kind, implementation).to(torch.float64)
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY}
        config: PreTrainedConfig = GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(torch.float64).train()
    if kind == "tied":
        kind, changes = "llama", changes | {"tie_word_embeddings": True}
    others: dict[str, Any] = {}
    if kind == "qwen3_moe":
        changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        others["experts_implementation"] = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind, **changes), attn_implementation=implementation, **others
    )
    return model.to(torch.float64).train()


def draw(seed: int, world: int) -> Draw:
    """Returns a model and batches, the same on every rank."""
    rng = random.Random(seed)
    kind = rng.choice(["llama"] * 4 + ["tied", "gemma3", "gpt2", "qwen3_moe", "qwen2_5_vl", "qwen3_vl"])
    reentrant = rng.choice([None, None, False, True])
    if kind in PATCH:
        frozen = rng.choice([(), ("model.visual",), ("model.visual", "model.language_model.embed_tokens")])
        steps = [_of_images(rng, kind, world) for _ in range(STEPS)]
        return Draw(kind, frozen, False, None, own_loss, steps, frozenset(), 1e-6)
    frozen = rng.choice([(), (), ("model.embed_tokens",), ("model.embed_tokens", "model.layers.0"), ("model.",)])
    loss = rng.choice([own_loss, own_loss, with_embeddings, of_all_hidden_states, of_logits, of_two_passes])
    adapters = kind == "llama" and not frozen and loss is not with_embeddings and rng.random() < 0.3
    if kind in ("tied", "gpt2", "gemma3") and frozen == ("model.",):
        frozen = ()
    if kind == "gpt2":
        frozen = tuple(
            name.replace("model.embed_tokens", "transformer.wte").replace("model.layers.", "transformer.h.")
            for name in frozen
        )
    if reentrant and (frozen or loss in (with_embeddings, of_two_passes)):
        reentrant = False  # refused by DDP, or no gradients for layers after frozen embeddings
    columns = {
        name: rng.random() < 0.2 for name in ("token_type_ids", "cache_position", "seq_idx", "num_items_in_batch")
    }
    columns["token_type_ids"] &= kind == "gpt2"  # others refuse it
    columns["has table"] = kind == "gpt2"
    if kind == "qwen3_moe":
        columns["num_items_in_batch"] = False  # auxiliary losses are not part of such a loss's mean
    steps, evens = [], set()
    for number in range(STEPS):
        if number == STEPS - 1 and rng.random() < 0.3:  # a form that comes back
            steps.append([_renewed(batch, seed) for batch in steps[0]])
        elif rng.random() < 0.25:
            lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 3))]
            steps.append([_batch(rng, loss, columns, lengths) for _ in range(world)])
            evens.add(number)
        else:
            steps.append([_batch(rng, loss, columns) for _ in range(world)])
            if all(not batch["input_ids"].numel() for batch in steps[-1]):
                steps[-1][0] = packed([5, 9], seed)
    is_exact = kind in ("llama", "tied")
    return Draw(kind, frozen, adapters, reentrant, loss, steps, frozenset(evens), 2e-6 if is_exact else 2e-5)


def _of_images(rng: random.Random, kind: str, world: int) -> list[Batch]:
    side = rng.choice(["right", "left"])
    return [
        with_images(kind, _lengths(rng, least=8), rng.randrange(1000), rng.random() < 0.5, side) for _ in range(world)
    ]


def _lengths(rng: random.Random, least: int = 1) -> list[int]:
    longest = rng.choice([least + 5, least + 30, 150])
    return [rng.randint(least, longest) for _ in range(rng.randint(1, 4))]


def _batch(rng: random.Random, loss: Loss, columns: dict[str, bool], lengths: list[int] | None = None) -> Batch:
    """Returns a batch of a rank, in any form."""
    seed, is_gpt2 = rng.randrange(1000), columns["has table"]
    form = rng.choice(["positions", "offsets", "right", "left", "none", "ones", "rows of packs", "empty"])
    if lengths is not None and form in ("none", "ones", "rows of packs", "empty"):
        form = "right"
    lengths = _lengths(rng) if lengths is None else lengths
    if form in ("positions", "offsets"):
        batch = packed(lengths, seed, form)
    elif form == "empty":
        batch = packed([], seed)
    elif form == "rows of packs":
        one, other = packed(lengths, seed), packed(lengths, seed + 1)
        batch = {name: torch.cat([one[name], other[name]]) for name in one}
    elif form in ("none", "ones"):
        batch = padded([lengths[0]] * len(lengths), seed, "none")
        if form == "ones":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if rng.random() < 0.5:
            rows = len(lengths) if rng.random() < 0.5 else 1
            batch["position_ids"] = torch.arange(lengths[0]).expand(rows, -1).contiguous()
    else:
        batch = padded(lengths, seed, form)
        mask = batch["attention_mask"]
        if rng.random() < 0.3 or (is_gpt2 and form == "left"):
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        batch["attention_mask"] = mask.to(rng.choice([torch.int64, torch.bool, torch.int32]))
    if loss is with_embeddings:
        batch["detached"] = rng.random() < 0.3
    ids = batch["input_ids"]
    if columns["token_type_ids"]:
        batch["token_type_ids"] = ids % 7
    if columns["cache_position"] and rng.random() < 0.5:
        batch["cache_position"] = torch.arange(ids.shape[1])
    if columns["seq_idx"] and form in ("positions", "offsets"):
        batch["seq_idx"] = (batch["position_ids"] == 0).cumsum(1).to(torch.int32) - 1
    if columns["num_items_in_batch"]:
        batch["num_items_in_batch"] = torch.tensor(50)
        if rng.random() < 0.3:
            batch["labels"] = torch.full_like(ids, -100)
    return batch


def _renewed(batch: Batch, seed: int) -> Batch:
    """Returns a batch of the same form with other tokens."""
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    return batch | {"input_ids": torch.randint(3, VOCABULARY, ids.shape, generator=generator)}


def gradients_of(model: nn.Module) -> Gradients:
    """Returns gradients of all trained parameters, zeros where there are none."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


# Largest difference of a loss and of a gradient on this rank in a step, and whether rows crossed.
Step = tuple[float, float, bool]


def worst_of(of_ranks: Sequence[Sequence[Step]]) -> tuple[float, float]:
    """Returns the largest difference of a loss and of a gradient on any rank in any step."""
    steps = [step for steps in of_ranks for step in steps]
    return max(step[0] for step in steps), max(step[1] for step in steps)


def train_all_drawn(seeds: Sequence[int]) -> dict[int, list[Step]]:
    """Returns what `train_drawn` does, by seed."""
    return {seed: train_drawn(seed) for seed in seeds}


def train_drawn(seed: int) -> list[Step]:
    """Trains on drawn batches with DDP, with sdpa and then with distca.

    Raises:
        AssertionError: no step has a gradient, or rows cross in a step in which ranks have equal work.
    """
    drawn, rank = draw(seed, dist.get_world_size()), dist.get_rank()
    plugin, results, any_gradient = distca_hf.DistCAPlugin(), [], False
    usual = drawn.model("sdpa")
    ours = drawn.model("sdpa")  # until it is enabled
    watched = distca_hf.enable(ours, plugin)
    some_unused = drawn.kind in PATCH or drawn.loss is with_embeddings
    usual_ddp, ours_ddp = (
        nn.parallel.DistributedDataParallel(model, find_unused_parameters=some_unused) for model in (usual, ours)
    )
    for number, batches in enumerate(drawn.steps):
        batch, losses = batches[rank], []
        for model, is_ours in ((usual_ddp, False), (ours_ddp, True)):
            model.zero_grad()
            if batch["input_ids"].numel() or is_ours:
                loss = drawn.loss(model, dict(batch))
            else:
                kept = {name: batch[name] for name in ("detached", "num_items_in_batch") if name in batch}
                loss = 0.0 * drawn.loss(model, packed([3], 0) | kept)  # no model of Transformers takes no token
            loss.backward()
            losses.append(loss.item())
        expected, found = gradients_of(usual), gradients_of(ours)
        assert all(gradient.isfinite().all() for gradient in (*expected.values(), *found.values()))
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        worst = max(
            ((found[name] - gradient).abs().max() / max(gradient.abs().max(), 1e-6 * largest, 1e-30)).item()
            for name, gradient in expected.items()
        )
        moves = watch_of(watched).planner.latest_moves
        # All that a rank without tokens has is padding, over which means of a caller are NaN.
        of_padding = not batch["input_ids"].numel() and drawn.loss is of_all_hidden_states
        # A mean over no label is NaN.
        is_equal = of_padding or (math.isnan(losses[0]) and math.isnan(losses[1]))
        difference = 0.0 if is_equal else abs(losses[0] - losses[1]) / max(1.0, abs(losses[0]))
        results.append((difference, worst, moves.crosses))
        assert not (moves.crosses and number in drawn.evens)
        any_gradient |= largest > 0
    assert any_gradient
    plugin.close()
    return results
