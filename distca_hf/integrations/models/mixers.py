"""Mixers: parts of layers that mix tokens by other means than attention, found by their structure.

A mixer is a module that a layer calls directly, that has no attention of Transformers' interface inside, and whose
class carries a state. Generation needs only that state from all earlier tokens, so no token depends on later ones.
Anything else that mixes tokens is refused by name.

    gated delta nets, KDA, Mamba, short convolutions    states travel, documents are cut as usual (`carried_mixers`)
    lightning attention, RG-LRU, unknown classes        documents stay whole, each in a separate row
                                                        (`DocumentRows`), and only tasks of attention layers move

`mixer_calls` makes them keep documents apart.
"""

import re
from collections.abc import Hashable, Iterator
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.integrations.models.carried_mixers import carries, halo_tokens_of
from distca_hf.integrations.models.structure import attention_layers, source_of, text_modules, transformers_model


# Layer types in configurations whose tokens attend to earlier tokens, or do not see each other.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"})
# Lowest Transformers whose mixers call functions by known names, which lets their states travel.
LOWEST_STATES = "5.15"
# Modules that compute from all rows of a batch, and from their padding.
OVER_ROWS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Names of states in Transformers' classes, as attributes or in a cache.
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
    """Returns whether a model has attention and mixers whose states cannot travel. A model without attention is
    refused elsewhere."""
    inner = transformers_model(model)
    mixers = mixers_of(inner)
    return bool(attention_layers(inner) and mixers) and not all(map(carries, mixers.values()))


def halo_tokens_for(model: nn.Module) -> int | None:
    """Returns how many tokens before a part of a document the mixers of a model see; None if it has no mixers, or
    needs whole documents."""
    mixers = mixers_of(transformers_model(model)).values()
    return max(map(halo_tokens_of, mixers)) if mixers and all(map(carries, mixers)) else None


def unknown_mixers(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    """Yields layers that mix tokens in a way that is neither attention nor a mixer."""
    mixers = mixers_of(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    with_mixer = {next((int(part) for part in name.split(".") if part.isdigit()), None) for name in mixers}
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
        yield f"{others[0]} (and {len(others) - 1} more) mixes tokens, or computes from all rows of a batch"


def _mixes_tokens(part: nn.Module, attention: set[nn.Module], mixers: set[nn.Module]) -> bool:
    """Returns whether a module that is not a mixer convolves, carries a state or computes from all rows. A module that
    holds attention or a mixer may name its states."""
    if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.RNNBase, *OVER_ROWS)):
        return True
    inside = set(part.modules())
    return attention.isdisjoint(inside) and mixers.isdisjoint(inside) and _carries_state(type(part))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _carries_state(module_class: Hashable) -> bool:
    """Returns whether the source of a class names a state; False without a source."""
    return STATE.search(source_of(module_class)) is not None  # type: ignore[arg-type]
