"""Verdict: whether a model works on distca, works with limits, or is refused, and why.

There are three checks, the first two with the functions that training runs. The model's modules and configuration are
checked on torch's meta device (`integrations.models.check.refusals`). Kernels are chosen for the given device. Then a
tiny version of the model trains a step on two ranks (`trial`): some classes need something unsupported only in their
first forward pass, and a class that mixes tokens in a way that its structure does not show gets other numbers.
"""

import inspect
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

import transformers
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from distca_hf.analysis.check.find import DEFAULT_SIZES, Candidate
from distca_hf.analysis.check.tiny_config import tiny_config, tiny_version
from distca_hf.analysis.check.trial import Numerics, TinyModel, compare, step_alone
from distca_hf.analysis.decoder_size import MLP_MATRICES, DecoderSize, LayerSize
from distca_hf.config import KernelName
from distca_hf.errors import ConfigError, DistCAError
from distca_hf.flops import Gpu
from distca_hf.integrations.models.check import REMEDY, KernelNeed, PositionLimits, kernel_needs, refusals
from distca_hf.integrations.models.decoder_layers import DecoderLayerKind, decoder_layers, layer_kinds, ranges
from distca_hf.integrations.models.head_tiles import head_refusals
from distca_hf.integrations.models.mixers import needs_whole_documents
from distca_hf.integrations.models.planner import share_of, shares_of_experts
from distca_hf.integrations.models.structure import (
    IMPLEMENTATION,
    attention_layers,
    text_decoder,
    towers,
    weights_outside_text,
)
from distca_hf.integrations.models.tiles import mlp_of
from distca_hf.kernels.registry import KERNELS, why_not


Status = Literal["works", "works with limits", "refused"]
# Most parameters of a tiny version to try.
MOST_PARAMETERS = 30_000_000


@dataclass(frozen=True)
class KernelChoice:
    """Kernels for layers with the same needs. `able`: kernels that can compute them, the fastest first; the first
    installed one is taken. `unable`: why each other kernel for this kind of device cannot; without kernels that are
    taken only by name."""

    need: KernelNeed
    layers: tuple[str, ...]
    able: tuple[KernelName, ...]
    unable: dict[KernelName, str]

    @property
    def why_not(self) -> str:
        """Why other kernels cannot, as text; equal reasons once."""
        kernels_of_reason: dict[str, list[KernelName]] = {}
        for name, reason in self.unable.items():
            kernels_of_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in kernels_of_reason.items())

    @property
    def needs_package(self) -> str:
        """How to install the kernels, if none of the able ones comes with torch; else empty."""
        if not self.able or any(KERNELS[name].module is None for name in self.able):
            return ""
        return KERNELS[self.able[0]].install

    def as_json(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "heads": asdict(self.need.heads),
            "window_tokens": self.need.window_tokens or None,
            "softcap": self.need.softcap,
            "able": list(self.able),
            "unable": self.unable,
            "install": self.needs_package,
        }


def decoder_size(model: PreTrainedModel, kinds: list[DecoderLayerKind]) -> DecoderSize | None:
    """Counts the weights of a model; None if its layers cannot be told apart, or no embedding is found. Weights that
    several modules share count once, in the first of them."""
    names = decoder_layers(model)
    try:
        embedding = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # some encoder-decoders
        return None
    if not names or embedding is None or len(names) != len(kinds):
        return None
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    hidden_size = int(getattr(config, "hidden_size", embedding.shape[-1]))
    shares = shares_of_experts(model)
    attention = attention_layers(model)
    counted: Counter[LayerSize] = Counter()
    for name, kind in zip(names, kinds, strict=True):
        attends = [module for inside, module in attention.items() if inside.startswith(f"{name}.")]
        # A token passes the experts that it is sent to, or all if the model does not give their number.
        passed = 0.0
        for inside, parameter in modules[name].named_parameters():
            share = share_of(f"{name}.{inside}", shares)
            passed += prod(parameter.shape) * (1.0 if share is None else share)
        mlp_size = max(0.0, passed - sum(map(_numbers, attends))) / (MLP_MATRICES * hidden_size)
        norms_heads = any(hasattr(module, "q_norm") for module in attends)
        tiles = mlp_of(modules[name]) is not None, not [one for module in attends for one in head_refusals(module)]
        of_kind = kind.heads, kind.mask.window_tokens, norms_heads, *tiles
        counted[LayerSize(1, _numbers(modules[name]), mlp_size, *of_kind)] += 1
    in_layers = {weight for name in names for weight in modules[name].parameters()}
    elsewhere = in_layers | set(weights_outside_text(model).values())
    head = getattr(model.get_output_embeddings(), "weight", None)
    return DecoderSize(
        hidden_size=hidden_size,
        vocabulary=0 if head is None else int(head.shape[0]),
        parameters=_numbers(model),
        embedding_parameters=sum(weight.numel() for weight in model.parameters() if weight not in elsewhere),
        layers=tuple(replace(layer, count=count) for layer, count in counted.items()),
    )


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class Verdict:
    """The verdict on a model, as it is found: reasons to refuse it, limits of a training, and notes, each a sentence.

    Attributes:
        kinds: how each decoder layer mixes tokens, in order.
        longest_document_tokens: longest document that is accepted; None if any is.
        whole_documents: whether documents stay whole on a rank.
        numerics: of the tiny version; None if it was not tried, or was refused.
    """

    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kinds: tuple[DecoderLayerKind, ...] = ()
    kernels: list[KernelChoice] = field(default_factory=list)
    longest_document_tokens: int | None = None
    whole_documents: bool = False
    numerics: Numerics | None = None

    @property
    def status(self) -> Status:
        return "refused" if self.reasons else "works with limits" if self.limits else "works"

    @property
    def cuts_documents(self) -> bool:
        return not self.reasons and not self.whole_documents


def judge(candidate: Candidate, gpu: Gpu, capacity_tokens: int, tries: bool = True) -> tuple[Verdict, PreTrainedModel]:
    """Judges a model; returns the verdict, and the model on torch's meta device. `capacity_tokens`: tokens that all
    ranks together hold, and so the longest document. `tries`: whether a tiny version trains a step, if the model is
    not refused before."""
    found = Verdict()
    model = _outline(candidate, found)
    found.kinds, found.whole_documents = tuple(layer_kinds(model)), needs_whole_documents(model)
    position_limits = PositionLimits(model)
    found.longest_document_tokens = longest = position_limits.longest_tokens
    if not found.reasons:
        # Too long documents are refused by their lengths; they are not a reason to refuse the model.
        longest_accepted = min(capacity_tokens, longest) if longest else 1
        found.reasons += refusals(model, longest_accepted)
        parameters = inspect.signature(model.forward).parameters.values()
        needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        others = [name for name in needed if name != "input_ids"]
        if others:
            found.reasons.append(f"every batch needs {' and '.join(others)}, and documents are only text")
    _quantised(candidate.config, found)
    found.kernels = _kernels(model, gpu, capacity_tokens, found)
    if not found.reasons:
        _limits(model, position_limits, capacity_tokens, gpu, found)
    if tries and not found.reasons:
        _try(candidate, found)
    if found.reasons:
        found.limits.clear()
    return found, model


def _quantised(config: PreTrainedConfig, found: Verdict) -> None:
    """Adds Trainer's refusal of quantised weights (`validate_quantization_for_training`), which it does not train."""
    parts = (config, config.get_text_config())
    given = [part.quantization_config for part in parts if getattr(part, "quantization_config", None) is not None]
    if not given:
        return
    values = dict(given[0] if isinstance(given[0], dict) else given[0].to_dict())
    is_bitsandbytes = values.get("load_in_4bit") or values.get("load_in_8bit")  # older checkpoints do not name it
    name = str(values.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "no quant_method"))
    config_class = AUTO_QUANTIZATION_CONFIG_MAPPING.get(name, BitsAndBytesConfig)
    if name == "no quant_method" or not AutoHfQuantizer.supports_quant_method(values):
        found.reasons.append(
            f"its weights are quantised ({name}), and Transformers {transformers.__version__} does not read them; "
            "take a checkpoint in bfloat16"
        )
        return
    why_unknown, adapters = "", True
    try:
        quantizer = AutoHfQuantizer.from_config(values, pre_quantized=True)
        adapters = bool(quantizer.is_trainable)
        if quantizer.is_qat_trainable or values.get("dequantize"):
            return
    except Exception as error:  # packages of quantised weights are missing, most often
        why_unknown = f", if its package trains them ({_named(error)})"
    dequantised = "dequantize" in inspect.signature(config_class).parameters
    ways = [f"load it with quantization_config={config_class.__name__}(dequantize=True)"] * dequantised
    ways += [f"train adapters (LoRA){why_unknown}"] * adapters
    reason = f"its weights are quantised ({name}), and Trainer does not train quantised weights"
    if ways:
        found.limits.append(f"{reason}: {', or '.join(ways)}. Memory is estimated for all weights, dequantised")
    else:
        found.reasons.append(f"{reason}, nor adapters of them; take a checkpoint in bfloat16")


def _outline(candidate: Candidate, found: Verdict) -> PreTrainedModel:
    """Returns the model without weights, with another attention if Transformers refuses distca for it."""
    try:
        return candidate.outline()
    except Exception as error:  # a model's code may raise anything
        refusal = error
    where = f"model {candidate.name}: {candidate.class_name} cannot be built"
    try:
        model = candidate.outline(implementation=None)
    except Exception as error:  # likewise
        hint = "; default sizes need not go together: give a config.json" if DEFAULT_SIZES in candidate.name else ""
        raise ConfigError(f"{where}: {_named(error)}{hint}") from error
    if IMPLEMENTATION not in str(refusal):
        raise ConfigError(f"{where}: {_named(refusal)}") from refusal
    message = " ".join(str(refusal).split())
    found.reasons.append(f"Transformers does not know attn_implementation={IMPLEMENTATION!r} for it ({message})")
    return model


def _kernels(model: PreTrainedModel, gpu: Gpu, capacity_tokens: int, found: Verdict) -> list[KernelChoice]:
    """Returns the kernels for the layers of a model. Layers that no kernel computes are a reason to refuse it."""
    if not attention_layers(model):
        return []
    try:
        needs = kernel_needs(model, capacity_tokens)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        found.reasons.append(f"its heads can be read neither from its config nor from its layers ({error})")
        return []
    choices = []
    for need, layers in needs.items():
        operands = need.operands(gpu.device_type, gpu.compute_capability, text_decoder(model).dtype)
        reasons = {
            name: why_not(name, operands, need.spec)
            for name, entry in KERNELS.items()
            if entry.capabilities.device_type in (None, gpu.device_type)
            and (entry.automatic or gpu.device_type == "cpu")
        }
        able = tuple(name for name, reason in reasons.items() if reason is None)
        unable = {name: reason for name, reason in reasons.items() if reason is not None}
        choices.append(choice := KernelChoice(need, tuple(layers), able, unable))
        if not able:
            which = "its layers" if len(needs) == 1 else f"{len(layers)} of its layers"
            found.reasons.append(f"no kernel for {gpu.name} computes {which} ({choice.why_not})")
    return choices


def _limits(
    model: PreTrainedModel, position_limits: PositionLimits, capacity_tokens: int, gpu: Gpu, found: Verdict
) -> None:
    choices = found.kernels
    if found.whole_documents:
        layers = ranges([number for number, kind in enumerate(found.kinds) if kind.whole_documents])
        found.limits.append(
            f"documents stay whole on a rank, because layers {layers} carry a state that cannot travel: in placed "
            "batches none may have more than tokens_per_rank tokens"
        )
        found.limits.append("ZeRO-3 is refused: it gathers the weights of such layers unequally often on each rank")
    if position_limits.longest_tokens is not None and position_limits.longest_tokens < capacity_tokens:
        why = "its table of positions ends there" if position_limits.has_table else "its RoPE changes with the batch"
        found.limits.append(f"documents have up to {position_limits.longest_tokens:,} tokens: {why}")
    trained = position_limits.trained_tokens
    if not position_limits.has_table and trained is not None and trained < capacity_tokens:
        found.notes.append(f"it was made for documents of up to {trained:,} tokens; longer ones bring a warning")
    for package in dict.fromkeys(choice.needs_package for choice in choices if choice.needs_package):
        of_package = [choice for choice in choices if choice.needs_package == package]
        count = "" if of_package == choices else f"{sum(len(choice.layers) for choice in of_package)} of "
        without = f"torch's own kernel {of_package[0].unable['torch_varlen']}"
        found.limits.append(f"on {gpu.name} {count}its layers need a package ({package}): {without}")
    if towers(model):
        found.limits.append(
            "text, and images in your own batches. Its towers attend with sdpa, on each rank separately"
        )


def _try(candidate: Candidate, found: Verdict) -> None:
    tiny = make_tiny(candidate)
    if tiny is None:
        found.limits.append("it was not tried: no tiny version of its configuration could be built")
        return
    try:
        found.numerics = compare(tiny)
        if not found.numerics.agree:
            found.reasons.append(
                "its tokens see each other otherwise than by attention, or it attends otherwise than it says: a tiny "
                f"version on two ranks differs from each document by itself, {found.numerics.in_words()}"
            )
    except DistCAError as refusal:
        opening = f"{candidate.class_name} cannot run on distca: "
        found.reasons.append(str(refusal).removeprefix(opening).removesuffix(f". {REMEDY}"))
    except Exception as failure:  # a model's code may raise anything
        try:
            step_alone(tiny.build_plain())
        except Exception:  # whatever it raises
            found.limits.append(f"it was not tried: a tiny version fails without distca, too ({_named(failure)})")
        else:
            found.reasons.append(f"a tiny version of it fails, and trains with sdpa: {_named(failure)}")


def make_tiny(candidate: Candidate) -> TinyModel | None:
    """Returns a tiny version of a model that can be built, with the flags of its configuration or else of its class;
    None if there is none."""
    for config_of in (lambda: tiny_version(candidate.config), lambda: tiny_config(type(candidate.config))):
        try:
            tiny = TinyModel(config_of(), candidate.make)
            if tiny.num_parameters() <= MOST_PARAMETERS:
                return tiny
        except Exception:  # a configuration or a class that does not work with small sizes
            continue
    return None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
