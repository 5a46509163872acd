"""Facts about a model: alike on ranks that run the same model, whatever wraps it, and different if it differs."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from distca_hf.integrations.models.forward_check import ConfigFacts, module_facts
from support.models import tiny_model


def test_parts_of_weights_that_a_rank_holds_do_not_count() -> None:
    whole, sharded = tiny_model(), tiny_model()
    norm = sharded.model.layers[0].input_layernorm
    del norm.weight
    norm.weight = torch.zeros(0)  # as FSDP leaves it on a rank without a part of it

    assert module_facts(sharded)["modules and their settings"] == module_facts(whole)["modules and their settings"]


def test_attributes_of_modules_of_the_user_s_own_do_not_count() -> None:
    class Probe(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    models = [tiny_model() for _ in range(2)]
    for rank, model in enumerate(models):
        model.model.layers[0].self_attn.probe = Probe(rank)

    assert module_facts(models[0]) == module_facts(models[1])


def test_where_a_model_was_loaded_from_does_not_count(tmp_path: Path) -> None:
    """Nodes keep copies of a model in places of their own, or one rank alone reads its weights."""
    made = tiny_model()
    for folder in ("one", "other"):
        made.save_pretrained(tmp_path / folder)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("one", "other")]
    of_models = [module_facts(model) | ConfigFacts(model).now() for model in (made, *models)]

    assert of_models[0] == of_models[1] == of_models[2]


def test_other_settings_of_modules_count() -> None:
    def change_scaling(model: Any) -> None:
        model.model.layers[1].self_attn.scaling *= 2

    def change_eps(model: Any) -> None:
        model.model.norm.variance_epsilon = 0.1

    def widen(model: Any) -> None:
        model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features + 1)

    def set_mode_of_a_layer(model: Any) -> None:
        model.model.layers[1].train(not model.training)

    def scale_adapters(model: Any) -> None:
        model.model.layers[1].self_attn.q_proj.scale_layer(2.0)

    for change in (change_scaling, change_eps, widen, set_mode_of_a_layer, scale_adapters):
        model = tiny_model()
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # puts adapters into the model
        before = module_facts(model)["modules and their settings"]
        change(model)
        assert module_facts(model)["modules and their settings"] != before, change.__name__


def test_config_entries_follow_every_change() -> None:
    model = tiny_model()
    facts = ConfigFacts(model)
    before = dict(facts.now())
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 7.0}

    assert facts.now() != before
    assert facts.now()["config.num_hidden_layers"] == before["config.num_hidden_layers"]
