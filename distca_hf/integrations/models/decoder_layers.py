"""Decoder layers: heads and masks of their attention, and how each of them mixes tokens, in text that tells layers
apart. Reads modules and configuration, as the model check does.

Ranks that hold parts of the same layers (tensor parallelism) have equally many heads each. Most models have the same
heads in all layers. If not (Gemma 4: wide heads in full layers, narrow ones in layers with a window), Transformers
refuses to give one number, and each layer gives its own.

Transformers models give a window to the attention function (`sliding_window`), or only to the mask. Placement must
know it before the first pass. A window first seen in that pass is routed then, with a warning (`forward_check`).

`distca check` prints the kinds of all layers, and a training logs them in one line when its model is enabled.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.cost import CAUSAL_MASK, Heads, LayerMasks, Mask, TokenBytes, divide_heads, head_groups, heads_of_tiles
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.integrations.models.carried_mixers import carries
from distca_hf.integrations.models.distributed import heads_divided_by, model_mesh
from distca_hf.integrations.models.mixers import LAYER_TYPES, mixers_of
from distca_hf.integrations.models.structure import (
    attention_layers,
    forward_names,
    keyword_passed,
    text_modules,
    transformers_model,
)


NUMBER = "num_attention_heads"
# Layer types in configurations whose tokens do not see each other.
ALONE = frozenset({"moe", "mlp"})
# Matches the name of the outermost numbered module around a module.
ENTRY_OF_LIST = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
# Largest number of ranges of layers to write out.
MOST_RANGES = 4
# Largest number of kinds of layers in the log of a training. If every layer has its own heads, there are many.
MOST_KINDS = 4


def heads_of_layers(model: nn.Module) -> dict[str, Heads]:
    """Returns this rank's heads of every attention layer of the text part, by the layer's name. Raises the errors of
    `whole_heads_of_layers`."""
    ranks = heads_divided_by(model)
    return {name: _of_rank(heads, ranks) for name, heads in whole_heads_of_layers(model).items()}


def whole_heads_of_layers(model: nn.Module) -> dict[str, Heads]:
    """Returns all heads, of all tensor ranks together, of every attention layer of the text part, by its name. Raises
    AttributeError, KeyError, RuntimeError or ValueError if neither the config nor the layers say how many heads there
    are, or how wide they are."""
    layers = attention_layers(transformers_model(model))
    try:
        same = _heads_of_config(model)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        query = transformers_model(model).config.get_text_config().num_attention_heads
        own: dict[str, Heads] = {}
        for name, layer in layers.items():
            key_value = query // int(layer.num_key_value_groups)  # type: ignore[arg-type]
            sizes = {NUMBER: query, "num_key_value_heads": key_value, "head_dim": layer.head_dim}
            own[name] = Heads.of_config(sizes)
        return own
    return dict.fromkeys(layers, same)


def heads_of(model: nn.Module) -> Heads:
    """Returns this rank's heads of a layer; if layers differ, of the one with the most numbers in keys and values.
    Raises the errors of `heads_of_layers`."""
    layers = heads_of_layers(model)
    if not layers:
        return _of_rank(_heads_of_config(model), heads_divided_by(model))
    return max(layers.values(), key=lambda heads: heads.key_value * (heads.dim + heads.value_dim))


def head_groups_of(model: nn.Module, tensor_ranks: int = 1, tile_heads: int = 0) -> int:
    """Returns the number of groups of this rank's heads: KV heads, or several of them together; 1 if the config does
    not say. Layers with other numbers of KV heads (Gemma 4), and tiles of heads, have equally many groups.

    Args:
        tensor_ranks: number of ranks that divide the heads, used if Transformers did not divide the model.
        tile_heads: most KV heads that a layer attends with at a time; 0: all.
    """
    ranks = tensor_ranks if model_mesh(model) is None else heads_divided_by(model)
    try:
        config = _config(model, NUMBER, "num_key_value_heads")
    except (RuntimeError, ValueError):  # Transformers refuses to give the number of some layers
        own = gcd(*(heads.key_value for heads in whole_heads_of_layers(model).values()))
        config = {"num_key_value_heads": own}
    groups = head_groups(config, ranks)
    if tile_heads:
        layers = whole_heads_of_layers(model).values()
        groups = gcd(groups, *(tile for layer in layers for tile in heads_of_tiles(layer.key_value, tile_heads)))
    return groups


def num_layers_of(model: nn.Module) -> int | None:
    """Returns the number of layers of a model's text part; None if its configuration does not say."""
    return getattr(transformers_model(model).config.get_text_config(), "num_hidden_layers", None)


def token_bytes_of(model: nn.Module) -> TokenBytes:
    """Returns bytes of a token in one layer, in 16-bit numbers; planning needs only their ratios. Raises the errors of
    `heads_of`."""
    return heads_of(model).token_bytes()


def _of_rank(heads: Heads, ranks: int) -> Heads:
    """Returns the heads of one tensor rank, given the heads of all."""
    if ranks == 1:
        return heads
    key_value = heads.key_value // ranks
    return replace(heads, query=heads.query // ranks, key_value=key_value, groups=divide_heads(key_value))


def _heads_of_config(model: nn.Module) -> Heads:
    """Returns the heads of all layers. If layers differ, Transformers refuses to give the first number."""
    number = transformers_model(model).config.get_text_config().num_attention_heads
    return Heads.of_config(_config(model, "num_key_value_heads", "hidden_size", "head_dim") | {NUMBER: number})


def _config(model: nn.Module, *names: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, with values under these common names, which it may map to its
    own names."""
    config = transformers_model(model).config.get_text_config()
    named = {name: getattr(config, name, None) for name in names}
    return config.to_dict() | {name: value for name, value in named.items() if value is not None}


def layer_masks_of(model: nn.Module) -> LayerMasks:
    """Returns the masks of a model, each with the number of its layers: full causal layers first, then windows from
    the shortest on. Raises UnsupportedAttentionError if a window holds no token."""
    for refusal in empty_windows(model):
        raise UnsupportedAttentionError(f"{type(transformers_model(model)).__name__}: {refusal}")
    counted = Counter(masks_of_layers(model).values())
    return tuple(sorted(counted.items(), key=lambda item: (item[0].window_tokens or 0, item[0].chunked)))


def empty_windows(model: nn.Module) -> Iterator[str]:
    """Yields a refusal of the first window that holds not even the token itself."""
    for name, window, _ in _windows(model):
        if window is not None and window < 1:
            yield f"sliding window {window} ({name}) holds no token; it counts the token itself, so 1 is the shortest"
            return


def masks_of_layers(model: nn.Module) -> dict[str, Mask]:
    """Returns the mask of every attention layer, by name."""
    return {name: Mask(window, is_chunk) for name, window, is_chunk in _windows(model)}


def _windows(model: nn.Module) -> Iterator[tuple[str, int | None, bool]]:
    """Yields name and window of every attention layer, None if it sees all of its document; and whether the window is
    a chunk.

    A layer attends with the window that it passes to the attention function, or with its mask's. Its attribute does
    not count: many classes set one on layers that do not pass it.
    """
    inner = transformers_model(model)
    in_mask, in_chunks = (makes_masks(inner, kind) for kind in ("sliding_window", "chunked"))
    for name, module in attention_layers(inner).items():
        config = getattr(module, "config", inner.config.get_text_config())
        chunk = getattr(config, "attention_chunk_size", None)
        if in_chunks and isinstance(chunk, int) and "chunked" in _kind_of(module, config, ""):
            yield name, chunk, True
            continue
        pass_on = keyword_passed(type(module), "attention_interface", "sliding_window")  # type: ignore[arg-type]
        passed = None if pass_on is None else pass_on(module)
        is_sliding = in_mask and "sliding" in _kind_of(module, config, "sliding_attention")
        of_mask = getattr(config, "sliding_window", None) if is_sliding else None
        yield name, min((one for one in (passed, of_mask) if isinstance(one, int)), default=None), False


def _kind_of(module: nn.Module, config: PreTrainedConfig, otherwise: str) -> str:
    """Returns the type of a layer in its model's configuration, or `otherwise` if types are not listed."""
    kinds, number = getattr(config, "layer_types", None) or [], getattr(module, "layer_idx", None)
    return str(kinds[number]) if isinstance(number, int) and number < len(kinds) else otherwise


def makes_masks(model: nn.Module, kind: str) -> bool:
    """Returns whether a forward function of a model's text part calls Transformers' maker of causal masks of this kind
    ("chunked", "sliding_window")."""
    parts = text_modules(transformers_model(model)).values()
    return any(forward_names(part, f"create_{kind}_causal_mask") for part in parts)


@dataclass(frozen=True)
class DecoderLayerKind:
    """How a decoder layer mixes tokens."""

    attends: bool  # whether it looks attention up by name, which lets distca compute it
    heads: Heads | None = None  # heads of its attention; None without attention, or if they cannot be read
    mask: Mask = CAUSAL_MASK
    softcap: float = 0.0  # limit of its scores; 0 for none
    sinks: bool = False  # whether rows of its softmax have one more term
    latent: bool = False
    mixer: str = ""  # class of the part that carries a state from token to token; empty without one
    whole_documents: bool = False  # whether its state cannot travel, and documents must stay whole on a rank
    refused: str = ""  # type or description of the layer if it mixes tokens in an unsupported way; otherwise empty

    @property
    def cuts_documents(self) -> bool:
        """Whether a part of a document can be computed separately, with keys, values and states of earlier parts."""
        return not self.whole_documents and not self.refused

    def in_words(self) -> str:
        """Returns the kind as text: "window 1,024, 32/16 heads of 128"."""
        if self.refused:
            return f"refused: {self.refused}"
        parts = [f"state ({self.mixer})"] if self.mixer else []
        parts += ["whole documents"] * self.whole_documents
        if self.attends:
            name = "chunks of" if self.mask.chunked else "window"
            parts.append("full" if self.mask.window_tokens is None else f"{name} {self.mask.window_tokens:,}")
        if self.heads is not None:
            width = f"{self.heads.dim}" + (
                f" (values {self.heads.value_dim})" if self.heads.value_dim != self.heads.dim else ""
            )
            parts.append(f"{self.heads.query}/{self.heads.key_value} heads of {width}")
        parts += ["MLA"] * self.latent + ["sinks"] * self.sinks
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        return ", ".join(parts) or "tokens only"


def layer_kinds(model: nn.Module) -> list[DecoderLayerKind]:
    """Returns the kind of every decoder layer of the text part, in order; empty if its layers cannot be told apart.
    The model may be on torch's meta device."""
    inner = transformers_model(model)
    config = inner.config.get_text_config()
    attention, masks, mixers = attention_layers(inner), masks_of_layers(inner), mixers_of(inner)
    try:
        heads: dict[str, Heads] = heads_of_layers(inner)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        heads = {}
    kinds = []
    for number, layer in enumerate(decoder_layers(inner)):
        inside = [part for name, part in mixers.items() if _is_inside(name, layer)]
        mixer, whole = type(inside[0]).__name__ if inside else "", not all(map(carries, inside))
        name = next((name for name in attention if _is_inside(name, layer)), None)
        refused = _refused(config, number, bool(mixer), name is not None, bool(attention))
        if name is None:
            kinds.append(DecoderLayerKind(False, mixer=mixer, whole_documents=whole, refused=refused))
            continue
        module = attention[name]
        kinds.append(
            DecoderLayerKind(
                attends=True,
                heads=heads.get(name),
                mask=masks[name],
                softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
                sinks=any("sink" in of for of, _ in module.named_parameters(recurse=False))
                and forward_names(module, "s_aux"),
                latent=getattr(module, "kv_lora_rank", None) is not None,
                mixer=mixer,
                whole_documents=whole,
                refused=refused,
            )
        )
    return kinds


def decoder_layers(model: PreTrainedModel) -> list[str]:
    """Returns names of the decoder layers of a model's text part, in order: the outermost modules that Transformers
    checkpoints or, if there are none, the entries of the list that holds the attention layers."""
    text = text_modules(model)
    checkpointed = [name for name, module in text.items() if isinstance(module, GradientCheckpointingLayer)]
    if not checkpointed:
        entries = {found[0] for name in attention_layers(model) if (found := ENTRY_OF_LIST.match(name))}
        checkpointed = sorted(entries, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
    return [name for name in checkpointed if not any(_is_inside(name, other) for other in checkpointed)]


def grouped(kinds: Sequence[DecoderLayerKind]) -> list[tuple[list[int], DecoderLayerKind]]:
    """Groups equal kinds, each with the numbers of its layers, in the order of their first layers."""
    layers: dict[DecoderLayerKind, list[int]] = {}
    for number, kind in enumerate(kinds):
        layers.setdefault(kind, []).append(number)
    return [(numbers, kind) for kind, numbers in layers.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text: "0-4, 6-10", or "0, 2, ... 24". Leaves out the middle of many ranges."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    if len(numbers) > MOST_RANGES and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    if len(parts) > MOST_RANGES:
        parts = [*parts[: MOST_RANGES - 1], f"... {parts[-1]}"]
    return ", ".join(parts)


def verdict_in_short(model: PreTrainedModel) -> str:
    """Returns a line about an accepted model for the log of a training: its layers, and the command that shows
    everything, if the command would find this model with the class that its checkpoint names."""
    kinds = grouped(layer_kinds(model))
    layers = "; ".join(f"layers {ranges(numbers)}: {kind.in_words()}" for numbers, kind in kinds[:MOST_KINDS])
    layers += f"; {len(kinds) - MOST_KINDS} more kinds of layers" if len(kinds) > MOST_KINDS else ""
    name, class_name = model.config.name_or_path, type(model).__name__
    is_found = name and class_name in (model.config.architectures or ())
    command = f" The whole answer: distca check {shlex.quote(name)}" if is_found else ""
    return f"{class_name} works. {layers}.{command}"


def _refused(config: PreTrainedConfig, number: int, has_mixer: bool, attends: bool, others_attend: bool) -> str:
    """Returns the type of a layer that mixes tokens in an unsupported way; empty if it does not."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    kind = str(types[number]) if number < len(types) else ""
    if kind and kind not in LAYER_TYPES and not has_mixer:
        return kind
    if attends or has_mixer or kind in ALONE or (others_attend and not kind):
        return ""
    return "attention that is not looked up by name"


def _is_inside(name: str, layer: str) -> bool:
    return name.startswith(f"{layer}.")
