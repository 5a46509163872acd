"""Find model: shape and size of the model that `--model` or `--model-config` names.

Built-in names (`PRESETS`) need no library. A config.json is read without one, too, except for its number of
weights. All other names are those of Transformers: a model type or class, with the sizes of its default configuration.
Weights are counted in a model without memory (torch's meta device).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distca_hf.analysis.request import PRESETS, ModelShape, ModelSize, preset
from distca_hf.cost import Heads
from distca_hf.errors import ConfigError
from distca_hf.whole_file import read_at_most


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CONFIG_FILE, MOST_CONFIG_BYTES = "config.json", 2**26
# Length of documents with which a model is checked: one that every model has positions for.
ANY_DOCUMENT_TOKENS = 128
# Forward operations of one token and weight: a multiplication and an addition.
FLOPS_OF_WEIGHT = 2


def find_model(name: str) -> ModelShape:
    """Returns the model of a name.

    Args:
        name: a built-in name; path of a config.json or of its folder; model type or class of Transformers; or name
            on the Hub. From there only the configuration is loaded.

    Raises:
        ConfigError: there is no such model, or its configuration is not understood.
    """
    if name.lower() in PRESETS:
        return preset(name)
    if name.endswith(".json") or (Path(name) / CONFIG_FILE).is_file():
        return read_model(Path(name))
    if "/" in name:
        return _shape_of(load_config(name), name, f"the configuration of {name}")
    model_type = _type_of(name)
    if model_type is None:
        return preset(name)  # raises, with a list of all names
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    return _shape_of(config, f"{model_type} (default sizes)", f"the default configuration of {model_type}")


def load_config(name: str, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Loads a configuration from the Hub, from its cache, or from a folder.

    Args:
        trust_remote_code: whether Python code that lies beside it may run.

    Raises:
        ConfigError: the Hub has no configuration of this name, or cannot be reached.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, **({"trust_remote_code": True} if trust_remote_code else {}))
    except Exception as error:  # of the network, the Hub, or the file
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model {name}: there is no such folder with a {CONFIG_FILE}, and the Hub has no configuration of it or "
            f"cannot be reached: {reason}"
        ) from error


def _shape_of(whole: "PretrainedConfig", name: str, where: str) -> ModelShape:
    """Returns shape and size of the model of a Transformers configuration.

    Raises:
        ConfigError: a value is missing or wrong, or there is no causal language model with this configuration.
    """
    config = whole.get_text_config()
    others = {key: getattr(config, key) for key in config.attribute_map}  # GPT-2 writes n_head
    values = {key: value for key, value in {**config.to_dict(), **others}.items() if value is not None}
    dtype = str(values.get("dtype") or "bfloat16").removeprefix("torch.")
    return _counted(shape_of_config({**values, "dtype": dtype}, name, where), whole, name)


def read_model(path: Path) -> ModelShape:
    """Reads a config.json, or that of a folder; with its size, if Transformers has the model type.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or wrong; names the value.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    shape, config = read_model_config(path), read_config(path)
    if "model_type" not in config:
        return shape
    from transformers import CONFIG_MAPPING, AutoConfig

    if config["model_type"] not in CONFIG_MAPPING:
        return shape
    try:
        with without_hub():
            known = AutoConfig.for_model(**config)
    except Exception as error:  # configurations check themselves, each in its own way
        raise ConfigError(f"model config {path} is not one of {config['model_type']}: {error}") from error
    return _counted(shape, known, str(path))


@contextmanager
def without_hub() -> Iterator[None]:
    """Keeps Transformers off the network, except for what is in its cache. The configuration in a file may name
    kernels, code and backbones on the Hub, and planning needs none of them.

    Raises:
        ConfigError: it cannot do without one of them.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except OfflineModeIsEnabled as error:
        address = str(error).removeprefix("Cannot reach ").partition(": ")[0]
        raise ConfigError(f"it needs {address}, and nothing is fetched that a configuration names") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _type_of(name: str) -> str | None:
    """Returns the model type of a type or a class; None if Transformers has neither."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name in CONFIG_MAPPING:
        return name
    classes = {of: model_type for model_type, of in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return classes.get(name)


def _counted(shape: ModelShape, whole: "PretrainedConfig", name: str) -> ModelShape:
    """Returns a shape with numbers of weights, if it is known how many of them a token passes, and with words for
    layers that are not full attention. Of a multimodal model the text part is counted, with its towers where
    Transformers has no model of the text alone.

    Raises:
        ConfigError: Transformers has no such model with this configuration, or cannot build it.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    from distca_hf.integrations.models.operations import step_flops

    config = whole.get_text_config()
    as_it_is = {"attn_implementation": "eager", "trust_remote_code": False}  # whatever the configuration names
    try:
        with torch.device("meta"), without_hub():
            model = (
                AutoModelForCausalLM.from_config(config, **as_it_is)
                if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
                else AutoModelForImageTextToText.from_config(whole, **as_it_is)
            )
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    except Exception as error:  # a model's code may raise anything
        raise ConfigError(f"model {name}: Transformers builds no causal language model of it: {error}") from error
    shape, flops = _with_layers(shape, model), step_flops(model)
    if flops is None:
        return shape
    size = ModelSize(
        layers=config.num_hidden_layers,
        hidden_size=head.shape[1],
        vocabulary=head.shape[0],
        parameters=sum(weight.numel() for weight in model.parameters()),
        layer_parameters=round(flops.layers_forward / FLOPS_OF_WEIGHT),
        embedding_parameters=embedding.numel() + (0 if head is embedding else head.numel()),
    )
    return replace(shape, size=size)


def _with_layers(shape: ModelShape, model: "PreTrainedModel") -> ModelShape:
    """Returns a shape with numbers of, and words for, layers that are not full attention."""
    from distca_hf.integrations.models.check import refusals
    from distca_hf.integrations.models.layer_masks import layer_windows
    from distca_hf.integrations.models.mixers import mixers_of

    layers = Counter(window for _, window in layer_windows(model))
    windows = {window: count for window, count in layers.items() if window is not None}
    words = [f"{count} with a window of {tokens:,} tokens" for tokens, count in sorted(windows.items())]
    mixers = {name.rpartition(".")[0] for name in mixers_of(model)}
    if mixers:
        words.append(f"{len(mixers)} that carry a state, so that documents stay whole in training")
    return replace(
        shape,
        other_layers=", ".join(words),
        full_layers=layers[None],
        window_layers=tuple(sorted(windows.items())),
        mixer_layers=len(mixers),
        refusals=tuple(refusals(model, ANY_DOCUMENT_TOKENS, whole_documents=bool(mixers))),
    )


# Bytes of a weight by the names that configurations have for dtypes.
BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def read_model_config(path: Path) -> ModelShape:
    """Reads the shape in a Transformers config.json, or in its `text_config` if it has one.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or wrong; names the value.
    """
    config = read_config(path)
    text = _text_part(config)
    dtypes: dict[str, object] = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
    return shape_of_config({**dtypes, **text}, str(text.get("model_type") or path.name), f"model config {path}")


def read_config(path: Path) -> dict[str, object]:
    """Reads a config.json.

    Raises:
        ConfigError: the file cannot be read, or holds no object.
    """
    try:
        with path.open("rb") as file:
            config = json.loads(read_at_most(file, MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model config {path} must be a JSON object, as Transformers' config.json is")
    return config


def shape_of_config(config: Mapping[str, object], name: str, where: str) -> ModelShape:
    """Returns the shape of a model from the values of its configuration.

    Args:
        config: values of the text model, by Transformers' names.
        name: name of the model in output.
        where: source of the values, for errors.

    Raises:
        ConfigError: a value is missing or wrong; names the value.
    """
    _check_heads(config, where)
    return ModelShape(name=name, heads=Heads.of_config(config), number_bytes=_number_bytes(config, where))


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the configuration of the text model, which is a part in models of several modalities."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _check_heads(config: Mapping[str, object], where: str) -> None:
    """Checks the values that `Heads.of_config` reads.

    Raises:
        ConfigError: a value is missing or wrong; names the value.
    """
    heads = _positive(config, "num_attention_heads", where)
    for key in ("num_key_value_heads", "head_dim", "kv_channels", "v_head_dim"):
        if config.get(key) is not None:
            _positive(config, key, where)
    grouped = config.get("num_key_value_heads") is not None
    key_value_heads = _positive(config, "num_key_value_heads", where) if grouped else heads
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


def _number_bytes(config: Mapping[str, object], where: str) -> int:
    """Returns bytes of a number of `dtype`, which older configurations call `torch_dtype`."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        raise ConfigError(f"{where} has neither dtype nor torch_dtype; add for example 'bfloat16'")
    if not isinstance(name, str) or name not in BYTES_OF_DTYPE:
        raise ConfigError(f"{where}: dtype {name!r} is not one of {', '.join(BYTES_OF_DTYPE)}")
    return BYTES_OF_DTYPE[name]


def _positive(config: Mapping[str, object], key: str, where: str) -> int:
    """Returns a whole number above zero.

    Raises:
        ConfigError: the value is missing, or something else.
    """
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no {key}")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above zero")
    return value
