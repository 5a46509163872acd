"""Find model: shape and size of the model that `--model` names.

Built-in names (`PRESETS`) need no library. Neither does a config.json, except for its number of weights. All other
names are from Transformers: a model type or class, with the sizes of its default configuration. Weights are counted in
a model without memory (torch's meta device).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distca_hf.analysis.decoder_size import FLOPS_OF_WEIGHT, state_size_of
from distca_hf.analysis.models import (
    CONFIG_FILE,
    DEFAULT_MODEL,
    PRESETS,
    ModelShape,
    ModelSize,
    preset,
    read_config,
    without_hub,
)
from distca_hf.cost import CAUSAL_MASK, Heads
from distca_hf.errors import ConfigError
from distca_hf.flops import find_gpu


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distca_hf.analysis.check.find import Candidate

# Length of the documents that a model is checked with: every model has positions for it.
ANY_DOCUMENT_TOKENS = 128
# The GPU whose kernels a model is judged by: the one of the shipped times.
GPU = "h200"


def find_model(name: str | None, tries: bool = True) -> ModelShape:
    """Returns the model of a name: a built-in one, the path of a config.json or of its folder, or what `distca check`
    takes; None for `DEFAULT_MODEL`. `tries`: whether the verdict includes a step of a tiny version, which a process of
    a group cannot run. Raises ConfigError if no such model exists, or its configuration is not understood."""
    name = DEFAULT_MODEL if name is None else name
    if not name:
        raise ConfigError(f"--model is empty: give a model, or leave it out for {DEFAULT_MODEL}")
    if name.endswith(".json") or (Path(name) / CONFIG_FILE).is_file():
        return read_model(Path(name), tries)
    if name.lower() in PRESETS:
        return preset(name)
    from distca_hf.analysis.check.find import find_candidate

    return _shape_of(find_candidate(name), tries)


def read_model(path: Path, tries: bool = True) -> ModelShape:
    """Reads a config.json, or the one in a folder. Adds size and verdict if Transformers has the model type. `tries`:
    see `find_model`."""
    path = path / CONFIG_FILE if path.is_dir() else path
    if "model_type" not in (config := read_config(path)):
        return read_model_config(path)
    from transformers import CONFIG_MAPPING

    from distca_hf.analysis.check.find import find_candidate

    known = config["model_type"] in CONFIG_MAPPING
    return _shape_of(find_candidate(str(path)), tries) if known else read_model_config(path)


def _shape_of(candidate: "Candidate", tries: bool) -> ModelShape:
    """Returns the shape of a model of Transformers, with the verdict of `distca check`, and with its size if it is
    known how many weights a token passes."""
    from distca_hf.analysis.check.run_check import judge_quietly
    from distca_hf.analysis.check.verdict import decoder_size
    from distca_hf.integrations.models.planner import step_flops
    from distca_hf.pipelines.stages.divided_model import LayerStack

    name = candidate.name.replace(", default sizes", " (default sizes)")
    with without_hub():
        verdict, model = judge_quietly(candidate, find_gpu(GPU), ANY_DOCUMENT_TOKENS, tries)
    if verdict.reasons:
        raise ConfigError(
            f"model {name} is refused: {'; '.join(verdict.reasons)}. `distca check` shows it layer by layer"
        )
    no_stages = ""
    try:
        LayerStack.of(model)
    except Exception as error:  # without some of its modules, a model's code may raise anything
        no_stages = str(error)
    config = candidate.config.get_text_config()
    others = {key: getattr(config, key) for key in config.attribute_map}  # CodeGen writes n_head
    values = {key: value for key, value in {**config.to_dict(), **others}.items() if value is not None}
    shape = replace(
        _with_layers(shape_of_config(values, name, f"model {name}"), model),
        limits=tuple(verdict.limits),
        longest_document_tokens=verdict.longest_document_tokens,
        no_stages=no_stages,
    )
    decoder, flops = decoder_size(model, list(verdict.kinds)), step_flops(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if decoder is None or flops is None or head is None:
        return shape
    tied = head.weight is embedding.weight
    size = ModelSize(
        layers=decoder.num_layers,
        hidden_size=head.weight.shape[1],
        vocabulary=head.weight.shape[0],
        parameters=decoder.parameters,
        layer_parameters=round(flops.layers_forward / FLOPS_OF_WEIGHT),
        embedding_parameters=embedding.weight.numel() + (0 if tied else head.weight.numel()),
        of_layers=decoder,
    )
    return replace(shape, size=size)


def _with_layers(shape: ModelShape, model: "PreTrainedModel") -> ModelShape:
    """Returns a shape with numbers of, and text for, layers that are not full attention."""
    from distca_hf.integrations.models.decoder_layers import layer_masks_of
    from distca_hf.integrations.models.mixers import mixers_of, needs_whole_documents

    masks = dict(layer_masks_of(model))
    windows = {mask: count for mask, count in masks.items() if mask.window_tokens is not None}
    mixers = {name.rpartition(".")[0] for name in mixers_of(model)}
    kinds = [
        f"{count} with {'chunks' if mask.chunked else 'a window'} of {mask.window_tokens:,} tokens"
        for mask, count in windows.items()
    ]
    kinds += [f"{len(mixers)} that carry a state"] * bool(mixers)
    return replace(
        shape,
        other_layers=", ".join(kinds),
        full_layers=masks.get(CAUSAL_MASK, 0),
        window_layers=tuple(windows.items()),
        mixer_layers=len(mixers),
        whole_documents=needs_whole_documents(model),
        state_size=state_size_of(model),
    )


# Bytes of a weight by the names that configurations have for dtypes.
BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def read_model_config(path: Path) -> ModelShape:
    """Reads the shape in a Transformers config.json, or in its `text_config` if it has one."""
    config = read_config(path)
    text = config.get("text_config")  # the text model, in models of several modalities
    text = text if isinstance(text, dict) else config
    dtypes: dict[str, object] = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
    return shape_of_config({**dtypes, **text}, str(text.get("model_type") or path.name), f"model config {path}")


def shape_of_config(config: Mapping[str, object], name: str, where: str) -> ModelShape:
    """Returns the shape of a model from the values of its configuration. `config`: values of the text model, by
    Transformers' names."""
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
    given = config.get("dtype") or config.get("torch_dtype") or "bfloat16"  # older configurations have the second
    dtype = str(given).removeprefix("torch.")
    if dtype not in BYTES_OF_DTYPE:
        raise ConfigError(f"{where}: dtype {given!r} is not one of {', '.join(BYTES_OF_DTYPE)}")
    return ModelShape(name=name, heads=Heads.of_config(config), number_bytes=BYTES_OF_DTYPE[dtype])


def _positive(config: Mapping[str, object], key: str, where: str) -> int:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no {key}")
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above zero")
    return value
