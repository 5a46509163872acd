"""Find: finds the class and the configuration of a name, and builds their model without weights.

A name is a model type or a class of Transformers, a class that can be imported, a config.json or its folder, a name of
`distca plan` (llama3-8b), or a name on the Hub. There is no list of models that work.
"""

import copy
import importlib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from distca_hf.analysis.check.trial import Make
from distca_hf.analysis.models import CONFIG_FILE, CONFIGS, PRESETS, content_of, read_config, without_hub
from distca_hf.errors import ConfigError, did_you_mean, first_line
from distca_hf.integrations.models.structure import IMPLEMENTATION


# Follows the name of a model whose sizes were not given.
DEFAULT_SIZES = "default sizes"
# Most characters of a quoted message of another package.
MOST_CHARACTERS = 300
# Auto classes with their mappings, in the order in which they are searched for a model type.
AUTO: tuple[tuple[Any, Any], ...] = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),
    (MODEL_MAPPING, AutoModel),
)


@dataclass(frozen=True)
class Candidate:
    """A model to check. `name`: as it is printed. `make`: builds the class from a configuration."""

    name: str
    config: PreTrainedConfig
    make: Make
    class_name: str

    def outline(self, implementation: str | None = IMPLEMENTATION) -> PreTrainedModel:
        """Returns the model on torch's meta device, without memory for weights. `implementation`: of attention; None
        for the class's default."""
        asked = {} if implementation is None else {"attn_implementation": implementation}
        with torch.device("meta"):
            return self.make(copy.deepcopy(self.config), **asked)


def find_candidate(name: str, trust_remote_code: bool = False) -> Candidate:
    """Returns the model of a name. `name`: see above. `trust_remote_code`: whether Python code next to a configuration
    may run."""
    if name.endswith(".json") or (Path(name) / CONFIG_FILE).is_file():
        return _of_file(Path(name), trust_remote_code)
    if name.lower() in PRESETS:
        return _of_preset(name.lower())
    if name in CONFIG_MAPPING:
        return _of_config(_default(CONFIG_MAPPING[name]), f"{name}, {DEFAULT_SIZES}")
    model_class = None if Path(name).exists() else _class_of(name)
    if model_class is not None:
        config_class: Any = model_class.config_class
        return _of_class(model_class, _default(config_class), f"{config_class.model_type}, {DEFAULT_SIZES}")
    if "/" in name or Path(name).exists():
        return _of_config(_load_config(name, trust_remote_code), name)
    raise ConfigError(
        f"model {name!r} is not known; give one of {', '.join(PRESETS)}, a model type or class of Transformers "
        "(llama, Qwen3ForCausalLM), a class that can be imported (package.module.Class), or the path of a config.json."
        f"{_type_hint(name)}"
    )


def _load_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads a configuration from the Hub, from its cache, or from a folder."""
    path = Path(name)
    if path.exists() and not (path / CONFIG_FILE).is_file():
        raise ConfigError(f"model {name} is not a model of Transformers: {content_of(path)} (docs/models.md)")
    try:
        return AutoConfig.from_pretrained(name, **({"trust_remote_code": True} if trust_remote_code else {}))
    except Exception as error:  # of the network, the Hub, or the file
        if path.exists():
            raise ConfigError(f"model {name}: its {CONFIG_FILE} cannot be loaded: {_in_one_line(error)}") from error
        raise ConfigError(
            f"model {name}: no such folder with a {CONFIG_FILE} exists, and the Hub has no configuration of it or "
            f"cannot be reached: {first_line(error)}"
        ) from error


def _type_hint(name: str) -> str:
    """Returns a hint about a model type that Transformers does not have, to follow a message: other versions of it,
    which were probably not meant, or the nearest name."""

    def letters(model_type: str) -> str:
        return re.sub(r"[\d.]+", "", model_type.lower())

    versions = [known for known in CONFIG_MAPPING if letters(known) == letters(name)]
    if not versions:
        return did_you_mean(name, [*PRESETS, *CONFIG_MAPPING])
    return f" It has {', '.join(versions)}; a newer one may have this: pip install --upgrade transformers"


def _of_file(path: Path, trust_remote_code: bool) -> Candidate:
    file = path / CONFIG_FILE if path.is_dir() else path
    values = read_config(file)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"model config {file} has no model_type: it is not a configuration of Transformers")
    if not isinstance(values.get("quantization_config"), dict | None):
        raise ConfigError(f"model config {file}: quantization_config must be an object")
    if model_type not in CONFIG_MAPPING or (trust_remote_code and "auto_map" in values):
        return _of_own_code(file, model_type, values.get("auto_map"), trust_remote_code)
    try:
        with without_hub():
            config = AutoConfig.for_model(**values)
    except Exception as error:  # configurations check themselves, each in its own way
        raise ConfigError(f"model config {file} is not one of {model_type}: {_in_one_line(error)}") from error
    return _of_config(config, str(path))


def _of_own_code(file: Path, model_type: str, code: Any, trust_remote_code: bool) -> Candidate:
    """Returns the model of a configuration whose class Transformers does not have."""
    if not isinstance(code, dict):
        raise ConfigError(
            f"model config {file}: Transformers {transformers.__version__} has no model type {model_type!r}"
            f".{_type_hint(model_type)}"
        )
    files = (str(place).rpartition(".")[0] + ".py" for place in code.values() if "--" not in str(place))  # of a hub
    missing = [name for name in dict.fromkeys(files) if not (file.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"model config {file}: model type {model_type!r} needs {' and '.join(missing)}, which its auto_map names "
            f"and {file.parent} does not have: download these files, too"
        )
    if not trust_remote_code:
        raise ConfigError(
            f"model config {file}: model type {model_type!r} brings its own Python code; read it, and give "
            "--trust-remote-code to run it"
        )
    config = _load_config(str(file.parent), trust_remote_code)
    make: Any = AutoModelForCausalLM

    def build(config: PreTrainedConfig, **asked: Any) -> PreTrainedModel:
        model: PreTrainedModel = make.from_config(config, trust_remote_code=True, **asked)
        return model

    return Candidate(str(file.parent), config, build, _architecture(config) or model_type)


def _of_preset(name: str) -> Candidate:
    model_type, (heads, kv_heads, head_dim), (layers, hidden_size, mlp_size, vocabulary), more = CONFIGS[name]
    experts, experts_per_token = more.get("experts", (0, 0))
    experts_field = "num_local_experts" if model_type == "mixtral" else "num_experts"
    of_experts = {"num_experts_per_tok": experts_per_token, "moe_intermediate_size": mlp_size}
    config = AutoConfig.for_model(
        model_type,
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        intermediate_size=mlp_size,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings="tied" in more,
        max_position_embeddings=131_072,
        **({"sliding_window": None} if model_type in ("mistral", "mixtral") else {}),
        **({experts_field: experts, **of_experts} if experts else {}),
    )
    return _of_config(config, name)


def _of_config(config: PreTrainedConfig, name: str) -> Candidate:
    """Returns the model of a configuration: of the class that it names, or of the first auto class that has one."""
    named: Any = getattr(transformers, _architecture(config) or "", None)
    if _is_model_class(named) and isinstance(config, named.config_class):
        return _of_class(named, config, name)
    for mapping, auto in AUTO:
        if type(config) in mapping:
            model_class = mapping[type(config)]
            found = model_class[0] if isinstance(model_class, tuple) else model_class
            return Candidate(name, config, auto.from_config, found.__name__)
    raise ConfigError(f"model {name}: Transformers has no model of a {type(config).__name__}")


def _of_class(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> Candidate:
    return Candidate(name, config, model_class._from_config, model_class.__name__)


def _class_of(name: str) -> type[PreTrainedModel] | None:
    """Returns the model class of a name: of Transformers, or of a module that can be imported."""
    found: Any
    module_name, _, class_name = name.replace(":", ".").rpartition(".")
    if not module_name:
        found = getattr(transformers, name, None)
    elif all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        try:
            found = getattr(importlib.import_module(module_name), class_name, None)
        except Exception as error:  # modules may do anything when imported
            raise ConfigError(f"model {name}: {module_name} cannot be imported: {_in_one_line(error)}") from error
        if found is None:
            raise ConfigError(f"model {name}: {module_name} has no {class_name}")
    else:
        return None
    if found is None or _is_model_class(found):
        return found
    raise ConfigError(f"model {name} is not a model class with a configuration")


def _is_model_class(found: Any) -> bool:
    is_class = isinstance(found, type) and issubclass(found, PreTrainedModel)
    return is_class and getattr(found, "config_class", None) is not None


def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return config_class()
    except Exception as error:  # as above
        raise ConfigError(
            f"{config_class.__name__} has no default configuration ({_in_one_line(error)}); give a config.json"
        ) from error


def _architecture(config: PreTrainedConfig) -> str | None:
    architectures = getattr(config, "architectures", None)
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def _in_one_line(error: Exception) -> str:
    """Returns another package's message, which may have its reason in a later line."""
    return textwrap.shorten(str(error), MOST_CHARACTERS)
