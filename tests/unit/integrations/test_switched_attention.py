"""A model that was loaded with any attention computes what it would if it had been loaded with distca."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import distca_hf
from support.models import VOCABULARY, tiny_model


FROM_THE_HUB = "somebodys_kernel"
IDS = torch.randint(3, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
PACK = {
    "input_ids": IDS,
    "labels": IDS,
    "position_ids": torch.cat([torch.arange(12), torch.arange(8)])[None],
    "use_cache": False,
}


@pytest.fixture(autouse=True)
def kernel_from_the_hub() -> Iterator[None]:
    """A kernel that was registered under a name, as Transformers does with those that it downloads.
    Its results are wrong, which shows where it is still called."""

    def attend_wrongly(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return 2 * sdpa_attention_forward(*args, **kwargs)[0], None

    AttentionInterface.register(FROM_THE_HUB, attend_wrongly)
    AttentionMaskInterface.register(FROM_THE_HUB, sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop(FROM_THE_HUB)
    AttentionMaskInterface._global_mapping.pop(FROM_THE_HUB)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**PACK).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def loaded(implementation: str) -> PreTrainedModel:
    return tiny_model(implementation=implementation, num_hidden_layers=2).train()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() != set()
    assert [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])] == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention", FROM_THE_HUB])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_a_model_that_was_loaded_with_distca(implementation: str, checkpointed: bool) -> None:
    models = []
    for name in (implementation, "distca"):
        model = loaded(name)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        models.append(distca_hf.enable(model, distca_hf.DistCAPlugin()))

    assert_same(*map(gradients, models))


def test_layers_that_ran_and_were_compiled_before_are_switched() -> None:
    model = loaded(FROM_THE_HUB)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    gradients(model)
    distca_hf.enable(model, distca_hf.DistCAPlugin())
    found = gradients(model)

    for name, expected in gradients(distca_hf.enable(loaded("distca"), distca_hf.DistCAPlugin())).items():
        torch.testing.assert_close(found[name], expected)


def test_adapters_and_two_models() -> None:
    base, plugin = loaded("sdpa"), distca_hf.DistCAPlugin()
    other = copy.deepcopy(base)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    distca_hf.enable(adapted, plugin)

    assert (base.config._attn_implementation, other.config._attn_implementation) == ("distca", "sdpa")
    distca_hf.enable(other, plugin)
    assert other.config._attn_implementation == "distca"
    assert gradients(adapted).keys().isdisjoint(gradients(other))


def test_model_that_cannot_attend_by_name_keeps_its_attention() -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)
    bloom = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(distca_hf.UnsupportedAttentionError, match="would ignore attn_implementation"):
        distca_hf.enable(bloom, distca_hf.DistCAPlugin())
    assert bloom.config._attn_implementation == "eager"
