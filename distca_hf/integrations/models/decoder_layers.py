"""Layer kinds: how every decoder layer of a model mixes tokens, in words that tell layers apart.

Read from the modules and the configuration, as the model check reads them. `distca check` prints all kinds, and a
training writes one line of them when its model is enabled.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.cost import CAUSAL_MASK, Heads, Mask
from distca_hf.integrations.models.heads_and_masks import heads_of_layers, masks_of_layers
from distca_hf.integrations.models.mixers import LAYER_TYPES, mixers_of
from distca_hf.integrations.models.structure import attention_layers, forward_names, text_modules, transformers_model


# Layer types of configurations whose tokens do not see each other.
ALONE = frozenset({"moe", "mlp"})
# Most ranges of layers that are written out.
MOST_RANGES = 4
# Kinds of layers in the log of a training. If every layer has its own heads, there are many.
MOST_KINDS = 4


@dataclass(frozen=True)
class DecoderLayerKind:
    """How a decoder layer mixes tokens.

    Attributes:
        attends: whether it looks attention up by name, so that distca computes it.
        heads: of its attention; None without attention, or if they cannot be read.
        mask: keys that a token sees.
        softcap: of its scores; 0 if they stay.
        sinks: whether rows of its softmax have one more term.
        latent: whether it is multi-head latent attention.
        mixer: class of the part that carries a state from token to token; empty without one.
        refused: its type, or words for it, if it mixes tokens in a way that is not computed; else empty.
    """

    attends: bool
    heads: Heads | None = None
    mask: Mask = CAUSAL_MASK
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    mixer: str = ""
    refused: str = ""

    @property
    def cuts_documents(self) -> bool:
        """Whether a part of a document can be computed apart, with keys and values of what comes before."""
        return not self.mixer and not self.refused

    def in_words(self) -> str:
        """Returns the kind in words: "window 1,024, 32/16 heads of 128"."""
        if self.refused:
            return f"refused: {self.refused}"
        parts = [f"state ({self.mixer})"] if self.mixer else []
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
        return ", ".join(parts) or "tokens alone"


def layer_kinds(model: nn.Module) -> list[DecoderLayerKind]:
    """Returns the kind of every decoder layer of the text part, in order; empty if its layers cannot be told apart.

    Args:
        model: a Transformers model, or a PEFT model around one; it may be on torch's meta device.
    """
    inner = transformers_model(model)
    config = inner.config.get_text_config()
    attention, masks, mixers = attention_layers(inner), masks_of_layers(inner), mixers_of(inner)
    try:
        heads: dict[str, Heads] = heads_of_layers(inner)
    except (AttributeError, KeyError, RuntimeError, ValueError):
        heads = {}
    kinds = []
    for number, layer in enumerate(decoder_layers(inner)):
        mixer = next((type(part).__name__ for name, part in mixers.items() if _is_inside(name, layer)), "")
        name = next((name for name in attention if _is_inside(name, layer)), None)
        refused = _refused(config, number, bool(mixer), name is not None, bool(attention))
        if name is None:
            kinds.append(DecoderLayerKind(False, mixer=mixer, refused=refused))
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
                refused=refused,
            )
        )
    return kinds


def decoder_layers(model: PreTrainedModel) -> list[str]:
    """Returns the names of the decoder layers of a model's text part, in order: of the outermost modules that
    Transformers checkpoints, or else of what lies in the list that holds the attention layers."""
    text = text_modules(model)
    checkpointed = [name for name, module in text.items() if isinstance(module, GradientCheckpointingLayer)]
    if not checkpointed:
        checkpointed = sorted({_entry_of_list(name) for name in attention_layers(model)} - {""}, key=_numbers)
    return [name for name in checkpointed if not any(_is_inside(name, other) for other in checkpointed)]


def grouped(kinds: Sequence[DecoderLayerKind]) -> list[tuple[list[int], DecoderLayerKind]]:
    """Returns equal kinds together, each with the numbers of its layers, in the order of their first layers."""
    layers: dict[DecoderLayerKind, list[int]] = {}
    for number, kind in enumerate(kinds):
        layers.setdefault(kind, []).append(number)
    return [(numbers, kind) for kind, numbers in layers.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in words: "0-4, 6-10", or "0, 2, ... 24"; the middle of many ranges is left out."""
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    if len(numbers) > MOST_RANGES and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    if len(words) > MOST_RANGES:
        words = [*words[: MOST_RANGES - 1], f"... {words[-1]}"]
    return ", ".join(words)


def verdict_in_short(model: PreTrainedModel) -> str:
    """Returns a line about an accepted model for the log of a training: its layers, and the command that says all, if
    it would find this model, of the class that its checkpoint names."""
    kinds = grouped(layer_kinds(model))
    layers = "; ".join(f"layers {ranges(numbers)}: {kind.in_words()}" for numbers, kind in kinds[:MOST_KINDS])
    layers += f"; {len(kinds) - MOST_KINDS} more kinds of layers" if len(kinds) > MOST_KINDS else ""
    name, class_name = model.config.name_or_path, type(model).__name__
    is_found = name and class_name in (model.config.architectures or ())
    command = f" The whole answer: distca check {shlex.quote(name)}" if is_found else ""
    return f"{class_name} works. {layers}.{command}"


def _refused(config: PreTrainedConfig, number: int, has_mixer: bool, attends: bool, others_attend: bool) -> str:
    """Returns the type of a layer that mixes tokens in a way that is not computed; empty if it does not."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    kind = str(types[number]) if number < len(types) else ""
    if kind and kind not in LAYER_TYPES and not has_mixer:
        return kind
    if attends or has_mixer or kind in ALONE or (others_attend and not kind):
        return ""
    return "attention that is not looked up by name"


def _is_inside(name: str, layer: str) -> bool:
    return name.startswith(f"{layer}.")


def _entry_of_list(name: str) -> str:
    """Returns the name of the outermost numbered module that a module is inside of; empty if there is none."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
