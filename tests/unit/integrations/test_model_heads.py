"""Heads of a model: in how many groups they are divided, and what a token weighs; read alike from models and files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPTNeoXConfig,
    JetMoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from distca_hf.analysis.find_model import read_model_config
from distca_hf.cost import TokenBytes, divide_heads, head_groups
from distca_hf.integrations.models.decoder_layers import head_groups_of, heads_of_layers, token_bytes_of
from support.versions import classes_of_today


def test_latent_attention_sends_keys_and_values_of_their_own_widths(tmp_path: Path) -> None:
    """As in DeepSeek-V3: keys of 192 numbers a head, values of 128."""
    config = {"num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512}
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | widths))
    shape = read_model_config(tmp_path / "config.json")

    assert shape.heads.groups == 8
    assert shape.token_bytes == TokenBytes(query=128 * 192 * 2, output=128 * 128 * 2, key_value=128 * 320 * 2)


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, Qwen2Config, Qwen3MoeConfig, GPTNeoXConfig, DeepseekV3Config, JetMoeConfig]
)
def test_a_config_file_says_what_the_model_says(config_class: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Head dimensions that are derived, that have another name, and that keys and values do not share."""
    config = config_class(num_hidden_layers=1, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_model_config(tmp_path / "config.json")

    assert shape.heads.groups == head_groups_of(model)
    assert shape.token_bytes == token_bytes_of(model)


@pytest.mark.parametrize(
    ("key_value_heads", "groups"),
    [(1, 1), (2, 2), (4, 4), (8, 8), (10, 5), (11, 11), (12, 6), (16, 8), (32, 8), (40, 8), (71, 71)],
)
def test_heads_are_divided_in_at_most_eight_groups_where_a_number_divides_them(
    key_value_heads: int, groups: int
) -> None:
    assert divide_heads(key_value_heads) == groups


@classes_of_today
def test_layers_with_other_numbers_of_kv_heads_have_equally_many_groups() -> None:
    """As in Gemma 4 31B, whose full layers have wide heads, and fewer of them."""
    heads = {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
    config = CONFIG_MAPPING["gemma4_text"](num_attention_heads=32, num_hidden_layers=6, **heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    of_layers = heads_of_layers(model).values()

    assert {(heads.dim, heads.key_value) for heads in of_layers} == {(256, 16), (512, 4)}
    assert head_groups_of(model) == 4
    assert head_groups_of(model, tensor_ranks=2) == 2


def test_groups_divide_the_heads_of_every_layer() -> None:
    config = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 4}
    assert head_groups(config) == 4
    assert head_groups({"num_attention_heads": 12, "num_key_value_heads": None}) == 6
    assert head_groups({"model_type": "mamba"}) == 1
