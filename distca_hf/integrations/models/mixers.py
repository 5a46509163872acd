"""Mixers: parts of layers that mix tokens by other means than attention, found by their structure.

Gated delta nets, Mamba, lightning attention, RG-LRU and short convolutions carry a state from token to token. They are
not computed here. A model that has them trains with whole documents on every rank, and `documents_apart` keeps these
apart. Only tasks of its attention layers move.

A mixer is a module that a layer calls directly, that has no attention of Transformers' interface inside, and whose
class carries a state. Generation needs that state alone of all tokens before, so no token depends on later ones.
Anything else that mixes tokens is refused by name.
"""

import re
from collections.abc import Hashable, Iterator
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.integrations.models.structure import attention_layers, source_of, text_modules, transformers_model


# Layer types of configurations whose tokens attend to tokens before them, or do not see each other.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp"})
# Names that Transformers' classes have for a state, as an attribute or in a cache.
STATE = re.compile(r"(conv|conv1d|recurrent|ssm|linear)_(states?|cache)\b")


def mixers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the mixers of a model's text part by name; none in a model whose layers only attend."""
    attention = set(attention_layers(model).values())
    layers = {name: part for name, part in text_modules(model).items() if isinstance(part, GradientCheckpointingLayer)}
    return {
        f"{name}.{child_name}": child
        for name, layer in layers.items()
        for child_name, child in layer.named_children()
        if not isinstance(child, GradientCheckpointingLayer)
        and attention.isdisjoint(child.modules())
        and any(_carries_state(type(part)) for part in child.modules())  # type: ignore[arg-type]
    }


def needs_whole_documents(model: nn.Module) -> bool:
    """Returns whether a model has mixers beside attention. One without attention is refused.

    Args:
        model: a Transformers model, or a PEFT model around one.
    """
    inner = transformers_model(model)
    return bool(attention_layers(inner) and mixers_of(inner))


def unknown_mixers(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    """Yields layers that mix tokens in a way that is neither attention nor a mixer.

    Args:
        config: of the text part.
    """
    mixers = mixers_of(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    with_mixer = {_layer_number(name) for name in mixers}
    for kind in sorted({str(kind) for kind in kinds} - LAYER_TYPES):
        layers = [index for index, name in enumerate(kinds) if name == kind and index not in with_mixer]
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        if layers:
            yield f"layers {layers[:3]}{more} are of type {kind!r}, which is not computed"
    inside = {part for mixer in mixers.values() for part in mixer.modules()}
    attention = set(attention_layers(model).values())
    others = [
        name
        for name, part in text_modules(model).items()
        if part not in inside and not isinstance(part, PreTrainedModel) and _mixes_tokens(part, attention, inside)
    ]
    if others:
        yield f"{others[0]} (and {len(others) - 1} more) mixes neighbouring tokens"


def _mixes_tokens(part: nn.Module, attention: set[nn.Module], mixers: set[nn.Module]) -> bool:
    """Returns whether a module that is no mixer convolves or carries a state. Modules that hold attention or a mixer
    may name the states of these."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase):
        return True
    inside = set(part.modules())
    return attention.isdisjoint(inside) and mixers.isdisjoint(inside) and _carries_state(type(part))  # type: ignore[arg-type]


def _layer_number(name: str) -> int | None:
    """Returns the first number in the name of a module: the number of its layer."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@lru_cache(maxsize=1024)
def _carries_state(module_class: Hashable) -> bool:
    """Returns whether the source of a class names a state; False if there is no source."""
    return STATE.search(source_of(module_class)) is not None  # type: ignore[arg-type]
