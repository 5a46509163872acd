"""Why documents of some models and batches must not share prefixes."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

import distca_hf
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
