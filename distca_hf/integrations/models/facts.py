"""Model facts: all that ranks must share about a model before they run it together."""

import copy
import json
import zlib
from collections.abc import Mapping

import torch
from torch import nn

from distca_hf.integrations.models.parts import transformers_model


# Entries of a config that do not change the numbers of a forward pass: origin of the model, kind of its answers.
# Saving a model sets some of them, on the rank that saves.
ABOUT_A_CONFIG = frozenset(
    {
        "architectures",
        "dtype",
        "model_type",
        "name_or_path",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


# Attributes of modules that other facts cover, or that do not change numbers.
ABOUT_A_MODULE = frozenset({"gradient_checkpointing", "name_or_path", "training"})


def module_facts(model: nn.Module, attention_layers: Mapping[str, nn.Module]) -> dict[str, object]:
    """Returns facts about modules and parameters. Computed once: reading all modules takes milliseconds.

    Args:
        model: a Transformers model, or a PEFT model around one.
        attention_layers: its attention layers by name, in the order of their numbers.
    """
    names = [(name, getattr(layer, "layer_idx", None)) for name, layer in attention_layers.items()]
    trained = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return {
        "model class": type(transformers_model(model)).__name__,
        "attention layers": len(names),
        "names and numbers of attention layers": _checksum(names),
        "modules and their settings": _checksum(_settings(transformers_model(model))),
        "parameters and which of them are trained": _checksum(trained),
        "dtypes of parameters": ", ".join(dtypes),
    }


def _settings(model: nn.Module) -> list[tuple[str, str, list[tuple[str, object]]]]:
    """Returns name, class and plain attributes of every module. Shapes of weights are left out: sharding leaves each
    rank another part of them."""
    return [
        (name, type(module).__name__, _plain_attributes(module) if _is_known(module) else [])
        for name, module in model.named_modules()
    ]


def _is_known(module: nn.Module) -> bool:
    """Returns whether a module is of torch or Transformers: others may hold their rank, for example."""
    return type(module).__module__.startswith(("torch.nn.modules.", "transformers."))


def _plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in ABOUT_A_MODULE and isinstance(value, bool | int | float | str)
    ]


class ConfigFacts:
    """Entries of a model's config, which programs may change at any time."""

    def __init__(self, model: nn.Module) -> None:
        self._config = transformers_model(model).config.get_text_config()
        self._seen: dict[str, object] | None = None
        self._facts: dict[str, object] = {}

    def now(self) -> dict[str, object]:
        """Returns them by name. Written out anew only if they have changed: that takes a fifth of a millisecond."""
        if self._seen != vars(self._config):
            self._seen = copy.deepcopy(vars(self._config))
            self._facts = {
                f"config.{name}": json.dumps(value, default=_name_of, sort_keys=True)
                for name, value in sorted(self._seen.items())
                if not name.startswith("_") and name not in ABOUT_A_CONFIG
            }
        return self._facts


def _name_of(value: object) -> str:
    """Returns a stand-in for a value that JSON cannot write; memory addresses would differ between ranks."""
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _checksum(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"
