"""Why documents of some models and batches must not share prefixes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

import distca_hf
from distca_hf.batches.read_documents import ReadingCollator, take_reading
from distca_hf.integrations.models.forward_watch import watch_of
from support.models import tiny_model


def with_adapters(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], lora_dropout=0.25))


def with_noise(model: nn.Module) -> nn.Module:
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    return model


def with_setting(model: nn.Module) -> nn.Module:
    model.config.router_jitter_noise = 0.5
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model, ""),
        (with_adapters, "lora_dropout.default drops 0.25 of its values at random"),
        (with_noise, "embeddings get noise (NEFTune)"),
        (with_setting, "router_jitter_noise=0.5 in the model's config makes rows random"),
    ],
)
def test_random_models_share_nothing_while_they_train(change: Callable[[nn.Module], nn.Module], said: str) -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
    model = distca_hf.enable(change(tiny_model()), plugin).train()
    watch, prompt = watch_of(model), torch.arange(60)
    ids = torch.stack([torch.cat([prompt, torch.tensor([token])]) for token in (70, 71)])

    for _ in range(2):  # hooks of noise are replaced in the first pass
        loss = model(input_ids=ids, labels=ids).loss
        refusal = watch._sharing.refusal({"input_ids": ids}, True, watch._counted.has_noise())
        assert refusal.endswith(said)
        assert bool(refusal) == bool(said)
    assert loss.isfinite()
    assert watch._sharing.refusal({"input_ids": ids}, False, watch._counted.has_noise()) == ""
    assert (watch.planner is None) == bool(said)
    plugin.close()


class OfLanguages(LlamaForCausalLM):
    """Adds something of each row to embeddings of its tokens."""

    def forward(self, input_ids: torch.Tensor, languages_B: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(
            inputs_embeds=self.get_input_embeddings()(input_ids) + languages_B[:, None, None], **kwargs
        )


def hooked(model: nn.Module) -> nn.Module:
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: None)
    return model


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (hooked, {}, f"a hook of {__name__} on a LlamaDecoderLayer may compute something of each row"),
        (
            lambda model: OfLanguages(model.config),
            {"languages_B": torch.tensor([0.0, 1.0])},
            f"forward of OfLanguages, of {__name__}, may change tokens before layers see them",
        ),
    ],
)
def test_unknown_functions_see_every_row(
    change: Callable[[nn.Module], nn.Module], given: dict[str, torch.Tensor], said: str
) -> None:
    ids = torch.arange(60).expand(2, -1) + torch.tensor([[0], [1]]) * (torch.arange(60) == 59)
    losses = {}
    for tokens in (0, 20):
        torch.manual_seed(0)
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=tokens)
        model = distca_hf.enable(change(tiny_model()), plugin).train()
        watch = watch_of(model)
        losses[tokens] = model(input_ids=ids, labels=ids, **given).loss.item()
        assert watch.planner is None
        if tokens:
            assert watch._sharing.refusal({"input_ids": ids}, False, False) == said
        plugin.close()
    assert losses[20] == losses[0]


def test_dropout_that_was_added_later_is_seen() -> None:
    plugin = distca_hf.DistCAPlugin()
    model = distca_hf.enable(tiny_model(), plugin).train()
    refusal, batch = watch_of(model)._sharing.refusal, {"input_ids": torch.ones(2, 5)}
    for _ in range(4):
        assert refusal(batch, True, False) == ""
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], lora_dropout=0.25), model)
    assert refusal(batch, True, False).endswith("lora_dropout.default drops 0.25 of its values at random")
    plugin.close()


@pytest.mark.parametrize("change", ["cache", "empty row", "hole", "positions that count padding"])
def test_one_rank_trains_on_batches_that_ranks_cannot_place(change: str) -> None:
    ids = torch.arange(60).expand(2, -1).contiguous()
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    kind = "llama"
    if change == "cache":
        batch |= {"use_cache": True}
    elif change == "positions that count padding":
        kind = "llama4"
        batch["input_ids"][1] = ids[1].roll(1)
        batch["attention_mask"][1, 0], batch["labels"][1, :2] = 0, -100
    else:
        batch["attention_mask"][1, slice(0, 60) if change == "empty row" else slice(20, 25)] = 0
        batch["labels"][1] = -100
    losses = []
    for tokens in (0, 20):
        torch.manual_seed(0)
        plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=tokens)
        model = distca_hf.enable(tiny_model(kind), plugin).train()
        losses.append(model(**batch).loss.item())
        plugin.close()
    assert losses[1] == losses[0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("labels", torch.ones(2, 5), ""),
        ("position_ids", torch.ones(2, 5), ""),
        ("weights", torch.ones(2), ""),
        ("kinds", torch.ones(2, 5), "the batch has kinds, which may differ for equal tokens"),
        ("inputs", torch.ones(2, 5, 8), "the batch has inputs, which may differ for equal tokens"),
    ],
)
def test_further_columns_of_tokens_are_not_shared(name: str, value: torch.Tensor, said: str) -> None:
    plugin = distca_hf.DistCAPlugin()
    watch = watch_of(distca_hf.enable(tiny_model(), plugin))
    assert watch._sharing.refusal({"input_ids": torch.ones(2, 5), name: value}, True, False) == said
    plugin.close()


def test_nothing_is_shared_if_the_setting_is_0() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=0)
    model = distca_hf.enable(tiny_model(), plugin).train()
    ids = torch.arange(60)[None].expand(2, -1)
    model(input_ids=ids, labels=ids).loss.backward()
    assert watch_of(model).planner is None
    plugin.close()


def test_one_rank_reads_ahead_and_plans_ahead_once_prefixes_were_shared() -> None:
    plugin = distca_hf.DistCAPlugin(shared_prefix_tokens=20)
    model = distca_hf.enable(tiny_model(), plugin).train()
    watch = watch_of(model)
    batches: list[dict[str, Any]] = [{"input_ids": torch.arange(60).expand(2, -1) + at} for at in range(3)]
    collated = [ReadingCollator(lambda batch: {**batch}, watch.reader)(batch) for batch in batches]
    readings = [take_reading(batch) for batch in collated]
    planned_ahead = []
    for at, batch in enumerate(collated):
        following = readings[at + 1 : at + 2]
        watch.begin_step(following, 1, torch.device("cpu"))
        step = watch.planner and watch.planner._step
        planned_ahead.append(step is not None and readings[at].documents in step._planned)
        model(**batch).logits.sum().backward()
        assert all("documents" in vars(reading) for reading in following)
    assert planned_ahead == [False, False, True]
    plugin.close()
