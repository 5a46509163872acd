"""Tiny hybrids in fp64 throughout: copies of Transformers' modelling files without their casts to fp32, so that a step
on cut documents can be told from rounding."""

import importlib
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel


VOCABULARY = 64
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Attention comes second: gradients of the first mixer go through it, and exchanges of both are apart.
LINEAR = {
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}


class Family(NamedTuple):
    """A class of models.

    Attributes:
        prefix: of the names of its classes.
        sizes: fields of its configuration, besides `SIZES`.
        plain: the attention implementation that it is compared with.
        config_name: of its configuration class; None if it begins with the prefix as well.
    """

    prefix: str
    sizes: dict[str, Any]
    plain: str = "sdpa"
    config_name: str | None = None


FAMILIES = {
    "qwen3_next": Family(
        "Qwen3Next",
        LINEAR
        | EXPERTS
        | {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": Family("Qwen3_5", LINEAR | {"head_dim": 8}, config_name="Qwen3_5TextConfig"),
    "olmo_hybrid": Family("OlmoHybrid", LINEAR | {"linear_num_key_heads": 4}),
    "kimi_linear": Family(
        "KimiLinear",
        {
            **{"num_hidden_layers": 3, "layer_types": LINEAR["layer_types"], "num_key_value_heads": 4},
            **{"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4},
            **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
            **{"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_token": 2, "first_k_dense_replace": 1},
        },
        plain="eager",
    ),
    "bamba": Family("Bamba", MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": Family("FalconH1", MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        MAMBA2
        | {
            **{"num_hidden_layers": 3, "layer_types": LINEAR["layer_types"], "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "shared_intermediate_size": 32},
        },
    ),
    "nemotron_h": Family(
        "NemotronH",
        EXPERTS
        | {
            **{"layers_block_type": ["mamba", "attention", "moe", "mamba"], "head_dim": 8, "expand": 2},
            **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4},
            **{"chunk_size": 16, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16},
            **{"n_group": 1, "topk_group": 1},
        },
    ),
    "jamba": Family(
        "Jamba",
        {
            **{"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1},
            **{"mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4},
        },
    ),
    "zamba2": Family(
        "Zamba2",
        {
            **{"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3},
            **{"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 6, "mamba_ngroups": 2, "mamba_d_conv": 4},
            **{"mamba_expand": 2, "chunk_size": 16, "num_key_value_heads": 4, "num_mem_blocks": 1},
        },
    ),
    "lfm2": Family(
        "Lfm2",
        {
            **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            **{"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        },
    ),
}


@cache
def _folder() -> TemporaryDirectory[str]:
    """Holds the copies until the process ends: distca_hf reads the source of a model's classes."""
    return TemporaryDirectory(prefix="wide-models-")


@cache
def wide_module(model_type: str) -> ModuleType:
    """Returns the copy of a modelling file; the module of Transformers stays as it is."""
    package = f"transformers.models.{model_type}"
    found = importlib.util.find_spec(f"{package}.modeling_{model_type}")
    assert found is not None
    assert found.origin is not None
    wide = re.sub(r"torch\.float(32)?\b", "torch.float64", Path(found.origin).read_text())
    copied = Path(_folder().name, f"wide_{model_type}_{os.getpid()}.py")  # forked ranks have one folder
    copied.write_text(wide.replace(".float()", ".double()"))
    spec = importlib.util.spec_from_file_location(f"{package}.wide_{model_type}", copied)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def tiny_config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Returns the configuration of a tiny model, for its copy or for Transformers' own class."""
    family = FAMILIES[model_type]
    config_class = getattr(transformers, family.config_name or f"{family.prefix}Config")
    config: PreTrainedConfig = config_class(**SIZES | family.sizes | changes)
    return config


def wide_model(model_type: str, implementation: str, **changes: Any) -> PreTrainedModel:
    """Returns a model whose states matter: weights have their usual size, and decays are slow."""
    model_class = getattr(wide_module(model_type), f"{FAMILIES[model_type].prefix}ForCausalLM")
    torch.manual_seed(0)
    config = tiny_config_of(model_type, **changes)
    model = model_class._from_config(config, attn_implementation=implementation, experts_implementation="eager")
    model = model.double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter.copy_(-3 + 1.5 * torch.rand_like(parameter))
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.rand_like(parameter) - 1)
            elif parameter.ndim > 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.2 * noise)
    return model
