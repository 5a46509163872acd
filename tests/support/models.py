"""Models small enough to train fifty steps in a second or two."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


VOCABULARY = 128
# Of models with sliding windows: shorter than most documents.
WINDOW_TOKENS = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of a tiny "llama" or "qwen3", or of a "gemma3" or "gpt_oss" (with sinks) whose last layer is full
    and the others have windows; a "qwen3_moe" has eight experts, of which a token uses two."""
    sizes = SIZES | changes
    if kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return Qwen3MoeConfig(**{"head_dim": 16, "decoder_sparse_step": 1} | experts | sizes)
    if kind in ("gemma3", "gpt_oss"):
        layers = [*["sliding_attention"] * (sizes["num_hidden_layers"] - 1), "full_attention"]
        sizes = {"sliding_window": WINDOW_TOKENS, "head_dim": 16, "layer_types": layers} | sizes
        if kind == "gpt_oss":
            # Every token uses every expert: rounding that depends on the CPU cannot route a token to another one.
            return GptOssConfig(num_local_experts=4, num_experts_per_tok=4, **sizes)
        return Gemma3TextConfig(query_pre_attn_scalar=16, **sizes)
    if kind == "llama4":  # the last layer is full, and its queries grow; the others attend inside of chunks
        experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        layers = {
            "no_rope_layers": [*[1] * (sizes["num_hidden_layers"] - 1), 0],
            "attention_chunk_size": WINDOW_TOKENS,
        }
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        widths = {"head_dim": 16, "intermediate_size_mlp": 64, "floor_scale": 8, "attn_scale": 0.5}
        return Llama4TextConfig(**experts | layers | special | widths | sizes)
    layers = [*["linear_attention"] * (sizes["num_hidden_layers"] - 1), "full_attention"]
    if kind == "minimax":  # the last layer is full, the others carry a state that cannot travel
        return MiniMaxConfig(head_dim=16, layer_types=layers, num_local_experts=4, num_experts_per_tok=4, **sizes)
    if kind == "nemotron_h":  # the last layer attends, the others carry a state
        blocks = [*["mamba"] * (sizes["num_hidden_layers"] - 1), "attention"]
        mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
        return NemotronHConfig(head_dim=16, layers_block_type=blocks, **mamba, **sizes)
    if kind == "qwen3_5":  # the last layer is full, the others carry a state
        linear = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
        linear |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
        return Qwen3_5TextConfig(head_dim=16, layer_types=layers, **linear, **sizes)
    return Qwen3Config(head_dim=16, **sizes) if kind == "qwen3" else LlamaConfig(**sizes)


def plain_attention(kind: str) -> str:
    """The implementation that a model is compared with: sdpa knows no sinks."""
    return "eager" if kind == "gpt_oss" else "sdpa"


def tiny_model(kind: str = "llama", implementation: str = "distca", **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights that are the same every time."""
    import distca_hf  # noqa: F401  registers "distca"

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **changes), attn_implementation=implementation)
