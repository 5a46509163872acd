"""Models: what planning needs of one. Heads, their dimension, and bytes of a number: from a table or a config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError
from distca_hf.planning.heads import Heads


BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer.

    Attributes:
        name: what to call it.
        heads: its heads.
        number_bytes: bytes of a number.
    """

    name: str
    heads: Heads
    number_bytes: int = 2

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes of one token in one layer."""
        return self.heads.token_bytes(self.number_bytes)


# Public config.json values: num_attention_heads, num_key_value_heads, head_dim; all in bfloat16.
PRESETS = {
    name: ModelShape(
        name,
        Heads.of_config({"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": head_dim}),
    )
    for name, heads, key_value_heads, head_dim in (
        ("llama3-8b", 32, 8, 128),
        ("llama3-70b", 64, 8, 128),
        ("llama3-405b", 128, 8, 128),
        ("llama3.2-1b", 32, 8, 64),
        ("llama3.2-3b", 24, 8, 128),
        ("mistral-7b", 32, 8, 128),
        ("mixtral-8x7b", 32, 8, 128),
        ("qwen2.5-7b", 28, 4, 128),
        ("qwen2.5-72b", 64, 8, 128),
        ("qwen3-0.6b", 16, 8, 128),
        ("qwen3-1.7b", 16, 8, 128),
        ("qwen3-4b", 32, 8, 128),
        ("qwen3-8b", 32, 8, 128),
        ("qwen3-14b", 40, 8, 128),
        ("qwen3-32b", 64, 8, 128),
        ("qwen3-30b-a3b", 32, 4, 128),
        ("qwen3-235b-a22b", 64, 4, 128),
    )
}


def preset(name: str) -> ModelShape:
    """Returns a model of the table.

    Raises:
        ConfigError: it has no such model; names those it has.
    """
    if name.lower() not in PRESETS:
        raise ConfigError(
            f"model {name!r} is not known; choose one of {', '.join(PRESETS)}, or give --model-config config.json"
        )
    return PRESETS[name.lower()]


def read_model_config(path: Path) -> ModelShape:
    """Reads the shape in a Transformers config.json, that of its `text_config` if it has one.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or wrong; names it.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config {path} must be a JSON object, as Transformers' config.json is")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    _check_heads(text, path)
    return ModelShape(
        name=str(text.get("model_type") or path.name),
        heads=Heads.of_config(text),
        number_bytes=_number_bytes(config | text, path),
    )


def _check_heads(config: Mapping[str, Any], path: Path) -> None:
    """Checks what `Heads.of_config` reads.

    Raises:
        ConfigError: a value is missing or wrong; names it.
    """
    heads = _positive(config, "num_attention_heads", path)
    for key in ("num_key_value_heads", "head_dim", "kv_channels", "v_head_dim"):
        if config.get(key) is not None:
            _positive(config, key, path)
    key_value_heads = config.get("num_key_value_heads") or heads
    if heads % key_value_heads:
        raise ConfigError(
            f"model config {path}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={key_value_heads}"
        )
    if config.get("kv_lora_rank") is not None:
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _positive(config, key, path)
    elif config.get("head_dim") is None and config.get("kv_channels") is None:
        if config.get("hidden_size") is None:
            raise ConfigError(f"model config {path} has neither head_dim nor hidden_size")
        hidden_size = _positive(config, "hidden_size", path)
        if hidden_size % heads:
            raise ConfigError(
                f"model config {path}: hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}; "
                "give head_dim"
            )


def _number_bytes(config: Mapping[str, Any], path: Path) -> int:
    """Returns bytes of `dtype`, which older configs call `torch_dtype`."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        raise ConfigError(f"model config {path} has neither dtype nor torch_dtype; add for example 'bfloat16'")
    if not isinstance(name, str) or name not in BYTES_OF_DTYPE:
        raise ConfigError(f"model config {path}: dtype {name!r} is not one of {', '.join(BYTES_OF_DTYPE)}")
    return BYTES_OF_DTYPE[name]


def _positive(config: Mapping[str, Any], key: str, path: Path) -> int:
    """Returns a whole number above zero.

    Raises:
        ConfigError: it is missing, or something else.
    """
    value = config.get(key)
    if value is None:
        raise ConfigError(f"model config {path} has no {key}")
    if type(value) is not int or value < 1:
        raise ConfigError(f"model config {path}: {key}={value!r} must be a whole number above zero")
    return value
