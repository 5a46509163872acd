"""Tiny config: a configuration of any Transformers model that reads text, built in a fraction of a second.

The fields that make a model large, or random, have few names. `SIZES` holds a value for each of them, and a
configuration gets the values of its own fields; so do its parts (text, vision, audio). `EXCEPTIONS` has sizes of
single classes that must fit each other. Nothing here says whether a class works.

A tiny version of a given configuration keeps its flags, names and factors, and one layer of each of its kinds.
"""

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig


VOCABULARY = 128
LONGEST_TOKENS = 80
WINDOW_TOKENS = 16
HEAD_DIM = 16
HIDDEN = 4 * HEAD_DIM
DENSE = {"mlp_layer_types": ["dense", "dense"]}
MIXED = {"mlp_layer_types": ["dense", "sparse"]}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (0, "pad_token_id"),
        (1, "bos_token_id"),
        (2, "eos_token_id sep_token_id"),
        (256, "max_position_embeddings n_positions max_seq_len n_ctx"),
        # layers
        (2, "num_hidden_layers n_layer n_layers num_layers num_blocks depth encoder_layers decoder_layers"),
        (2, "num_encoder_layers num_decoder_layers"),
        # widths
        (HIDDEN, "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim mm_embed_dim adapter_in_dim"),
        (HIDDEN, "intermediate_size ffn_dim d_ff dff dim_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim"),
        (HIDDEN, "ffn_hidden_size feed_forward_size output_proj_dims adapter_out_dim"),
        # widths between a tower and the text
        (HIDDEN, "out_hidden_size alignment_intermediate_size projector_hidden_size projection_dim"),
        (HIDDEN, "text_hidden_size image_token_embed_dim projector_input_dim projector_output_dim vision_output_dim"),
        # attention: windows are shorter than most documents
        (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"),
        (4, "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads index_n_heads"),
        (2, "num_key_value_heads"),
        (HEAD_DIM, "head_dim d_kv kv_channels d_head dim_head index_head_dim index_topk"),
        (WINDOW_TOKENS, "sliding_window sliding_window_size attention_chunk_size"),
        # linear attention
        (4, "linear_num_heads linear_num_key_heads linear_num_value_heads"),
        (HEAD_DIM, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
        # Mamba: twice as wide as the model
        (2 * HIDDEN, "mamba_d_ssm"),
        (2 * HIDDEN // HEAD_DIM, "mamba_n_heads mamba_num_heads"),
        (HEAD_DIM, "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size mamba_chunk_size"),
        # experts
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok moe_topk moe_k"),
        (1, "n_group topk_group n_shared_experts first_k_dense_replace num_dense_layers"),
        (HIDDEN // 2, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        (HIDDEN // 2, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
        # nothing random, no other losses, and weights large enough for attention to matter
        (0.0, "dropout attention_dropout attn_pdrop attention_probs_dropout_prob activation_dropout layerdrop"),
        (0.0, "hidden_dropout hidden_dropout_prob residual_dropout resid_pdrop embd_pdrop emb_pdrop"),
        (False, "output_router_logits"),
        (0.1, "initializer_range"),
        (True, "is_decoder"),
    )
    for name in names.split()
}
# Multi-head latent attention: every head has its own keys, and a part of each key is rotated.
LATENT: dict[str, Any] = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), HEAD_DIM),
    **{"qk_rope_head_dim": HEAD_DIM // 2, "head_dim": HEAD_DIM // 2, "num_key_value_heads": 4},
}
# Rotary embeddings in which each axis of an image rotates a section; sections sum to half a head.
SECTIONS = {"rope_parameters": ROTARY | {"mrope_section": [2, 3, 3]}}
HALF_SECTIONS = {"rope_parameters": ROTARY | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
# The last layers use keys and values of earlier ones.
SHARED_KEYS = {
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# By model type; a dict adds to the settings of the part of that name.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cosmos3_edge_text": SECTIONS,
    "beam": MIXED,
    "codegen": {"rotary_dim": HEAD_DIM // 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": HIDDEN},
    },
    "dots3_note": {"vision_config": DENSE, "audio_config": {"adapter_input_size": HIDDEN}},
    "dots3_note_text": {"per_layer_config": {1: {"head_dim": HEAD_DIM + HEAD_DIM // 2}}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": ROTARY | {"mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [HIDDEN // 2, HIDDEN // 2],
    },
    "gemma3n_text": SHARED_KEYS,
    "gemma4_unified_assistant": {"text_config": SHARED_KEYS},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm4v_moe_text": HALF_SECTIONS,
    "glm4v_text": HALF_SECTIONS,
    "glm_ocr_text": HALF_SECTIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": HEAD_DIM // 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": SECTIONS,
    "hy_v4_vl_text": {"rope_parameters": ROTARY | {"mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "modernbert-decoder": {"local_attention": 2 * WINDOW_TOKENS},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "paddleocr_vl_text": SECTIONS,
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "qwen2_vl_vision": {"embed_dim": HIDDEN},
    "nemotron_h": {"chunk_size": HEAD_DIM},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM},
        **{"indexer_budget": 32, "indexer_compress_ratio": 4},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (HIDDEN // 2, HIDDEN // 2)},
    "roc_bert": {"shape_vocab_size": 1000, "shape_embed_dim": HIDDEN, "pronunciation_embed_dim": HIDDEN},
    "zamba": {
        "layers_block_type": 2 * ["linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


# Fields of a given configuration that a tiny version does not keep.
NAMES_OF_ITS_OWN = frozenset({"model_type", "dtype", "torch_dtype", "architectures", "name_or_path", "use_cache"})
# Sizes without which a layer attends differently.
WINDOWS = frozenset({"sliding_window", "sliding_window_size", "attention_chunk_size"})


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Returns a small configuration of this class."""
    return config_class(**_settings(config_class))


def tiny_version(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small configuration with the flags, names, factors and kinds of layers of this one."""
    return type(config)(**_settings_like(config))


def _settings_like(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns keywords of a small version; keywords of its parts are dicts."""
    settings = _settings(type(config))
    exceptions = EXCEPTIONS.get(config.model_type, {})
    for field in dataclasses.fields(type(config)):
        name = field.name
        if name in NAMES_OF_ITS_OWN or name in exceptions:
            continue
        value = _value_of_all_layers(config, name)
        if isinstance(value, PreTrainedConfig):
            if isinstance(settings.get(name), dict) and settings[name]["model_type"] == value.model_type:
                settings[name] = _settings_like(value) | {"model_type": value.model_type}
        elif isinstance(value, bool | str | float) and name not in SIZES:
            settings[name] = value
        elif value is None and (name not in SIZES or name in WINDOWS):
            settings[name] = None
    if "num_hidden_layers" not in exceptions:
        settings |= _lists_of_layers(config, exceptions)
    return settings


def _value_of_all_layers(config: PreTrainedConfig, name: str) -> object:
    """Returns a value of a configuration. Sizes that differ between layers (heads of Gemma 4) are a size of its own:
    Transformers refuses to give one number for all."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return SIZES.get(name)


def _lists_of_layers(config: PreTrainedConfig, exceptions: dict[str, Any]) -> dict[str, Any]:
    """Returns all lists with a value for each layer, reduced to the first layer of each kind."""
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or "layer_types" in exceptions:
        return {}
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = chosen if len(chosen) > 1 else [*chosen, *range(1, min(2, len(kinds)))]
    lists: dict[str, Any] = {"num_hidden_layers": len(chosen)}
    for field in dataclasses.fields(type(config)):
        value = _value_of_all_layers(config, field.name)
        if isinstance(value, list | tuple) and len(value) == layers and field.name not in exceptions:
            lists[field.name] = [value[layer] for layer in chosen]
    return lists


def _settings(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns keywords of a small configuration; keywords of its parts are dicts."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:
        settings |= LATENT
    if "layer_types" in fields:
        settings |= _one_layer_of_each_kind(config_class)
    for name, part_class in _parts(config_class).items():
        settings[name] = _settings(part_class) | {"model_type": part_class.model_type}
    for name, value in EXCEPTIONS.get(config_class.model_type, {}).items():
        part_settings = settings.get(name)
        settings[name] = part_settings | value if isinstance(part_settings, dict) else value
    return settings


def _parts(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    if hasattr(config_class, "sub_configs_defaults"):
        parts = config_class.sub_configs_defaults.items()
        return {
            name: CONFIG_MAPPING[part.model_type] if part.model_type else part.config_class for name, part in parts
        }
    parts = config_class.sub_configs  # Transformers 5.17; a part of any class is seen in a default configuration
    default = config_class() if AutoConfig in parts.values() else None
    found = {name: type(getattr(default, name, None)) if part is AutoConfig else part for name, part in parts.items()}
    return {name: part for name, part in found.items() if issubclass(part, PreTrainedConfig)}


def _one_layer_of_each_kind(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns layers of all kinds that the class has by default, if there are several."""
    try:
        layer_types = config_class().layer_types
    except ValueError:  # the class refuses its own default
        return {}
    kinds = list(dict.fromkeys(layer_types or []))
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)} if len(kinds) > 1 else {}
