"""Models: what planning needs of one. Heads, bytes of a number, and numbers of weights: from a table or a config.json.

`plan_model` finds models by other names, and counts the weights of those that are not in the table.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca_hf.analysis.plan_size import ModelSize
from distca_hf.cost import TokenBytes
from distca_hf.errors import ConfigError
from distca_hf.planning.heads import Heads
from distca_hf.spelling import did_you_mean


BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer, and the size of the model around it.

    Attributes:
        name: what to call it.
        heads: its heads.
        number_bytes: bytes of a number.
        size: numbers of weights; None if they are not known.
    """

    name: str
    heads: Heads
    number_bytes: int = 2
    size: ModelSize | None = None

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes of one token in one layer."""
        return self.heads.token_bytes(self.number_bytes)


def _public(
    name: str,
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    tied: bool = False,
    experts: tuple[int, int] = (1, 1),
) -> ModelShape:
    """Returns the shape of a model from the values of its public config.json; all are in bfloat16.

    Args:
        heads: num_attention_heads, num_key_value_heads, head_dim.
        sizes: num_hidden_layers, hidden_size, intermediate_size (that of an expert), vocab_size.
        tied: tie_word_embeddings.
        experts: experts of a layer, and how many a token is sent to.
    """
    query, key_value, dim = heads
    shape = Heads.of_config({"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": dim})
    return ModelShape(name, shape, size=ModelSize.of_gated_layers(shape, *sizes, tied, *experts))


PRESETS = {
    shape.name: shape
    for shape in (
        _public("llama3-8b", (32, 8, 128), (32, 4096, 14336, 128256)),
        _public("llama3-70b", (64, 8, 128), (80, 8192, 28672, 128256)),
        _public("llama3-405b", (128, 8, 128), (126, 16384, 53248, 128256)),
        _public("llama3.2-1b", (32, 8, 64), (16, 2048, 8192, 128256), tied=True),
        _public("llama3.2-3b", (24, 8, 128), (28, 3072, 8192, 128256), tied=True),
        _public("mistral-7b", (32, 8, 128), (32, 4096, 14336, 32768)),
        _public("mixtral-8x7b", (32, 8, 128), (32, 4096, 14336, 32000), experts=(8, 2)),
        _public("qwen2.5-7b", (28, 4, 128), (28, 3584, 18944, 152064)),
        _public("qwen2.5-72b", (64, 8, 128), (80, 8192, 29568, 152064)),
        _public("qwen3-0.6b", (16, 8, 128), (28, 1024, 3072, 151936), tied=True),
        _public("qwen3-1.7b", (16, 8, 128), (28, 2048, 6144, 151936), tied=True),
        _public("qwen3-4b", (32, 8, 128), (36, 2560, 9728, 151936), tied=True),
        _public("qwen3-8b", (32, 8, 128), (36, 4096, 12288, 151936)),
        _public("qwen3-14b", (40, 8, 128), (40, 5120, 17408, 151936)),
        _public("qwen3-32b", (64, 8, 128), (64, 5120, 25600, 151936)),
        _public("qwen3-30b-a3b", (32, 4, 128), (48, 2048, 768, 151936), experts=(128, 8)),
        _public("qwen3-235b-a22b", (64, 4, 128), (94, 4096, 1536, 151936), experts=(128, 8)),
    )
}


def preset(name: str) -> ModelShape:
    """Returns a model of the table.

    Raises:
        ConfigError: it has no such model; names those it has.
    """
    if name.lower() not in PRESETS:
        raise ConfigError(
            f"model {name!r} is not known; choose one of {', '.join(PRESETS)}, a model type or class of Transformers "
            f"(llama, Qwen3ForCausalLM), or the path of a config.json.{did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name.lower()]


def read_model_config(path: Path) -> ModelShape:
    """Reads the shape in a Transformers config.json, that of its `text_config` if it has one.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or wrong; names it.
    """
    config = read_config(path)
    text = _text_part(config)
    dtypes: dict[str, Any] = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
    return shape_of_config({**dtypes, **text}, str(text.get("model_type") or path.name), f"model config {path}")


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config.json.

    Raises:
        ConfigError: the file cannot be read, or holds no object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config {path} must be a JSON object, as Transformers' config.json is")
    return config


def shape_of_config(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """Returns the shape that the values of a configuration say.

    Args:
        config: of the text model, by Transformers' names.
        name: what to call it.
        where: where the values come from, for errors.

    Raises:
        ConfigError: a value is missing or wrong; names it.
    """
    _check_heads(config, where)
    return ModelShape(name=name, heads=Heads.of_config(config), number_bytes=_number_bytes(config, where))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _check_heads(config: Mapping[str, Any], where: str) -> None:
    """Checks what `Heads.of_config` reads.

    Raises:
        ConfigError: a value is missing or wrong; names it.
    """
    heads = _positive(config, "num_attention_heads", where)
    for key in ("num_key_value_heads", "head_dim", "kv_channels", "v_head_dim"):
        if config.get(key) is not None:
            _positive(config, key, where)
    key_value_heads = config.get("num_key_value_heads") or heads
    if heads % key_value_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={key_value_heads}"
        )
    if config.get("kv_lora_rank") is not None:
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _positive(config, key, where)
    elif config.get("head_dim") is None and config.get("kv_channels") is None:
        if config.get("hidden_size") is None:
            raise ConfigError(f"{where} has neither head_dim nor hidden_size")
        hidden_size = _positive(config, "hidden_size", where)
        if hidden_size % heads:
            raise ConfigError(
                f"{where}: hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}; give head_dim"
            )


def _number_bytes(config: Mapping[str, Any], where: str) -> int:
    """Returns bytes of `dtype`, which older configs call `torch_dtype`."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        raise ConfigError(f"{where} has neither dtype nor torch_dtype; add for example 'bfloat16'")
    if not isinstance(name, str) or name not in BYTES_OF_DTYPE:
        raise ConfigError(f"{where}: dtype {name!r} is not one of {', '.join(BYTES_OF_DTYPE)}")
    return BYTES_OF_DTYPE[name]


def _positive(config: Mapping[str, Any], key: str, where: str) -> int:
    """Returns a whole number above zero.

    Raises:
        ConfigError: it is missing, or something else.
    """
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no {key}")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above zero")
    return value
