"""Model parts: the Transformers model inside others, its attention layers, and the arguments that it takes."""

import inspect
from collections.abc import Hashable
from functools import lru_cache

from torch import nn
from transformers import PreTrainedModel

from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.source_inspection import source_of


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the Transformers model inside a PEFT model, or the model itself.

    Raises:
        UnsupportedAttentionError: there is none.
    """
    get_base_model = getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedAttentionError(
            f"{type(inner).__name__} is no Transformers model; enable the model before it is wrapped, and load it "
            "with from_pretrained or from_config"
        )
    return inner


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns modules whose forward looks attention up in Transformers' interface, by name."""
    return {name: module for name, module in model.named_modules() if _uses_interface(type(module))}  # type: ignore[arg-type]


def forward_accepts(model: nn.Module, keyword: str) -> bool:
    """Returns whether `model.forward` has a parameter of this name."""
    return keyword in inspect.signature(model.forward).parameters


def names_by_position(model: nn.Module) -> list[str]:
    """Returns names of the arguments that `model.forward` takes by position. A PEFT model without a task passes them
    all on: then they are those of the model inside."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        parameters = inspect.signature(transformers_model(model).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@lru_cache(maxsize=1024)
def _uses_interface(module_class: Hashable) -> bool:
    """Returns whether the class's own forward calls the attention interface."""
    source = source_of(getattr(module_class, "forward", None))
    return "attention_interface" in source and "ALL_ATTENTION_FUNCTIONS" in source
