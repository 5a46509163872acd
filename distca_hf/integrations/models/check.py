"""Model check: accepts a model whose attention, and only attention, mixes tokens in a way that is computed here;
refuses others by name. In a multimodal model it checks the part that text runs through.

A placed document is cut between ranks. That is exact for causal attention and for everything that works on single
tokens. States of recurrent or convolutional layers travel, or documents stay whole (`mixers`). A mask of another kind,
or a loss that shifts labels itself, would silently give wrong results. So everything that is not known to be right is
refused before the first step.

Documents must not be longer than the model's positions reach (`PositionLimits`).

The check reads what a layer or a loss does from its source and settings. Two checks at run time follow: an attention
call with an unknown argument is refused, and in the first forward pass every attention layer must use distca.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.config import KernelName
from distca_hf.cost import Heads
from distca_hf.errors import UnsupportedAttentionError, and_more
from distca_hf.integrations.models.decoder_layers import empty_windows, heads_of_layers, makes_masks, masks_of_layers
from distca_hf.integrations.models.mixers import unknown_mixers
from distca_hf.integrations.models.structure import (
    attention_layers,
    backbone_of,
    forward_names,
    keyword_passed,
    passes_keywords_on,
    takes_shift_labels,
    text_decoder,
    text_modules,
    transformers_model,
    undivided,
)
from distca_hf.kernels.interface import AttentionSpec
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

REMEDY = "`distca check` shows it layer by layer. Else train it without distca_hf"
OWN_BATCHES = "leave tokens_per_rank out to train it on your own batches"
# Names of modules that look positions up in a table.
TABLE = re.compile(r"(^|\.)(wpe|embed_positions?|position_embeddings?|positions?_embed|pos_emb(ed)?)$")

# Methods of PEFT, by the package of their modules, that compute something of several tokens.
ADAPTERS_OF_ROWS = {
    "lily": "mixes its experts by a mean over all tokens of a batch",
    "poly": "takes a task for every row (task_ids)",
    "shadow": "runs another decoder on the rows of the batch",
    "xlora": "weighs its adapters in an earlier pass on the rows of the batch",
}


def longest_rotary_tokens(config: PreTrainedConfig) -> int | None:
    """Returns the longest document whose rotary frequencies do not depend on the longest document of its batch; None
    if they never do. Transformers picks them by the largest position that a rank holds: ranks would disagree."""
    rotary = getattr(config, "rope_parameters", None) or {}
    limits = []
    for parameters in (rotary, *(part for part in rotary.values() if isinstance(part, dict))):
        if parameters.get("rope_type") == "dynamic":
            limits.append(0)
        elif parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or 0)
    return min(limits, default=None)


def _rotary_refusal(limit: int, longest_document_tokens: int) -> str:
    """Returns why rotary embeddings with this limit cannot train on documents of this length."""
    if limit == 0:
        return (
            "its rotary frequencies (rope_type 'dynamic') change with the longest document of a batch, and ranks see "
            "parts of it; use 'yarn' or 'default'"
        )
    return (
        f"its rotary frequencies (rope_type 'longrope') change with a document of more than {limit} tokens, and they "
        f"have up to {longest_document_tokens}; use 'yarn' or 'default', or split them"
    )


class PositionLimits:
    """Lengths of the longest documents that a model can take, and that it was trained with."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        tables = [
            module.num_embeddings - int(getattr(module, "offset", 0))
            for name, module in text_modules(model).items()
            if isinstance(module, nn.Embedding) and TABLE.search(name)
        ]
        self._table = min(tables, default=None)
        self._rotary = longest_rotary_tokens(config)
        self.trained_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self._warned = False

    @property
    def has_table(self) -> bool:
        """Whether the model looks positions up in a table."""
        return self._table is not None

    @property
    def longest_tokens(self) -> int | None:
        """Longest document that is not refused; None if there is no limit."""
        return min((limit for limit in (self._table, self._rotary) if limit is not None), default=None)

    def check(self, longest_document_tokens: int, where: str) -> None:
        """Checks the length of a document; warns once if it is longer than the model was trained with. Raises
        UnsupportedAttentionError if the document has positions that the model lacks, or that depend on its batch."""
        longest = longest_document_tokens
        if self._rotary is not None and longest > self._rotary:
            raise UnsupportedAttentionError(f"{where}: {_rotary_refusal(self._rotary, longest)}")
        if self._table is not None and longest > self._table:
            raise UnsupportedAttentionError(
                f"{where}: a document has {longest} tokens, and the model's table of position embeddings ends at "
                f"{self._table}; split documents (overlong='split' with fewer tokens_per_rank), or remove longer ones"
            )
        if self.trained_tokens is not None and longest > self.trained_tokens and not self._warned:
            self._warned = True
            log.warning(
                "%s: a document has %d tokens, and the model was made for %d (max_position_embeddings): its rotary "
                "embeddings have not seen such positions. Scale them (rope_parameters, 'yarn'), or split documents",
                where,
                longest,
                self.trained_tokens,
            )


def check_model(
    model: nn.Module,
    longest_document_tokens: int,
    kernel: KernelName = "auto",
    device: torch.device | str = "cpu",
    given_batches: bool = False,
) -> None:
    """Accepts a model, or says why not. With `given_batches` the program gives all batches: they hold whole documents,
    so any loss is allowed.

    Raises:
        UnsupportedAttentionError: all reasons against the model, each with layer, setting and value.
    """
    inner = transformers_model(model)
    reasons = refusals(model, longest_document_tokens, given_batches)
    if attention_layers(inner):
        reasons += _kernel(inner, longest_document_tokens, kernel, torch.device(device))
    if reasons:
        raise UnsupportedAttentionError(f"{type(inner).__name__} cannot run on distca: {'; '.join(reasons)}. {REMEDY}")


def refusals(model: nn.Module, longest_document_tokens: int, given_batches: bool = False) -> list[str]:
    """Returns all reasons against a model, on any device; none if it can run with a kernel that computes its layers.
    Arguments are those of `check_model`. Weights are not read: the model may be on torch's meta device."""
    inner = transformers_model(model)
    config = inner.config.get_text_config()
    return [
        *undivided(inner),
        *_structure(model, given_batches),
        *unknown_mixers(inner, config),
        *_positions(inner, longest_document_tokens),
        *_settings(inner, config),
        *empty_windows(inner),
        *(() if given_batches else refused_loss(inner)),
    ]


def _structure(root: nn.Module, given_batches: bool) -> Iterator[str]:
    model = transformers_model(root)
    if getattr(model.config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, and only causal language models are computed"
    decoder = text_decoder(model)
    if not decoder._can_set_attn_implementation() or not attention_layers(model):
        yield "it would ignore attn_implementation: none of its layers looks attention up by name"
    elif not decoder._supports_flash_attn and not makes_masks(model, "chunked"):  # these are divided as documents are
        yield "its masks cannot be expressed as causal documents (_supports_flash_attn is False)"
    if forward_names(model, "start_positions", "end_positions"):
        yield (
            "its loss (start_positions, end_positions) chooses among all tokens of a row, padding included, and "
            "hidden states of padding are not computed"
        )
    # PEFT methods that add their own tokens, which no plan has, or that count tokens in rows.
    method: Any = getattr(root, "active_peft_config", None)
    if getattr(method, "alora_invocation_tokens", None):
        yield f"alora_invocation_tokens={method.alora_invocation_tokens} counts from the end of a row; use plain LoRA"
    if method is not None and getattr(method, "is_prompt_learning", False):
        yield f"{type(method).__name__} adds {method.num_virtual_tokens} virtual tokens to every row; use LoRA"
    paths = (type(module).__module__.split(".") for module in root.modules())
    for adapter in dict.fromkeys(path[2] for path in paths if path[:2] == ["peft", "tuners"]):
        if adapter in ADAPTERS_OF_ROWS:
            yield f"PEFT's method {adapter} {ADAPTERS_OF_ROWS[adapter]}; use LoRA"
    # Results of placed rows return at the end of the decoder, before the head.
    is_apart = decoder is not model or backbone_of(model) is not model
    if given_batches and not is_apart and model.get_output_embeddings() is not None:
        yield (
            "its head cannot be told from its decoder (base_model is the model itself, and no single part of it holds "
            "the attention layers): set base_model_prefix of the class to the decoder's name"
        )


def _positions(model: PreTrainedModel, longest_document_tokens: int) -> Iterator[str]:
    """Yields embeddings that count positions differently: a batch's positions inside documents would differ from those
    of the model's training. Also yields rotary embeddings that change with the longest document."""
    for name, module in text_modules(model).items():
        if forward_names(module, "create_position_ids_from_input_ids"):
            yield (
                f"{name} counts positions from padding_idx {getattr(module, 'padding_idx', '?')} in input_ids, not "
                "from 0 in each document"
            )
            break
    limit = longest_rotary_tokens(model.config.get_text_config())
    if limit is not None and longest_document_tokens > limit:
        yield _rotary_refusal(limit, longest_document_tokens)


def _settings(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "alibi", False):
        yield "alibi=True: attention bias is not computed"
    if getattr(config, "is_causal", True) is False:
        yield "config.is_causal=False: its masks are not causal"
    layers = attention_layers(model)
    dropped = {name: dropout for name, module in layers.items() if (dropout := _dropout(module)) > 0}
    if dropped:
        name, dropout = next(iter(dropped.items()))
        yield f"attention dropout {dropout} is not computed; set it to 0: {name}{and_more(len(dropped) - 1)}"
    others = [name for name, module in layers.items() if getattr(module, "is_causal", True) is False]
    if others:
        yield f"attention is not causal (is_causal=False): {others[0]}{and_more(len(others) - 1)}"
    # Layers left out at random: each rank leaves out different ones, and their exchanges would not match.
    for name in ("layerdrop", "decoder_layerdrop", "layer_dropout"):
        share = getattr(config, name, None)
        if isinstance(share, float | int) and share > 0:
            yield f"{name}={share} leaves out other layers on every rank; set it to 0"


class _InTraining:
    """A module's attributes as in training."""

    training = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def _dropout(layer: nn.Module) -> float:
    """Returns the dropout of an attention layer: what its own forward passes on in training, if that can be read."""
    passed = keyword_passed(type(layer), "attention_interface", "dropout")  # type: ignore[arg-type]
    dropout: Any
    if passed is not None:
        dropout = passed(cast(nn.Module, _InTraining(layer)))
    else:
        dropout = getattr(layer, "attention_dropout", None)
        dropout = getattr(layer, "attn_dropout", None) if dropout is None else dropout
    share = getattr(dropout, "p", dropout)
    return float(share) if isinstance(share, float | int) else 0.0


def loses_shift_labels(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward gives its loss no shift_labels."""
    forward = type(model).forward
    return not takes_shift_labels(forward) and not passes_keywords_on(forward, "loss_function")


def refused_loss(model: PreTrainedModel) -> Iterator[str]:
    """Yields why the loss of a model would be wrong if documents are cut between ranks."""
    if loses_shift_labels(model):
        yield (
            "its loss ignores shift_labels: it would shift labels itself, across documents and cuts between ranks "
            f"({type(model).__name__}.forward does not pass its keywords on to the loss); {OWN_BATCHES}"
        )
    loss_function = getattr(model, "loss_function", None)
    if callable(loss_function) and "shift_labels" not in inspect.signature(loss_function).parameters:
        yield (
            f"its loss_function {getattr(loss_function, '__name__', loss_function)} takes no shift_labels: labels of "
            f"documents that are cut between ranks must not be shifted again; {OWN_BATCHES}"
        )


class KernelNeed(NamedTuple):
    """Heads, window and softcap that a kernel must compute for some layers."""

    heads: Heads
    window_tokens: int  # the window; 0 if no document is longer
    softcap: float  # limit of the scores; 0 for none

    def operands(self, device_type: str, compute_capability: int | None, weights: torch.dtype) -> Operands:
        """Returns the operands of a call on a device. Assumes that fp32 weights compute in bf16 on a GPU."""
        return Operands(
            device_type=device_type,
            compute_capability=compute_capability,
            dtype=torch.bfloat16 if device_type == "cuda" and weights == torch.float32 else weights,
            num_heads=self.heads.query,
            num_kv_heads=self.heads.key_value,
            head_dim=self.heads.dim,
            value_dim=self.heads.value_dim,
        )

    @property
    def spec(self) -> AttentionSpec:
        """How a call attends; the scale is a placeholder."""
        return AttentionSpec(1.0, True, self.window_tokens, self.softcap)


def kernel_needs(model: PreTrainedModel, longest_document_tokens: int) -> dict[KernelNeed, list[str]]:
    """Returns what a model needs of kernels, each need with the names of its layers. A window that no document exceeds
    does not count. Raises AttributeError, KeyError, RuntimeError or ValueError if neither config nor layers say how
    many heads there are."""
    heads_of_layer = heads_of_layers(model)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) or 0.0
    layers_of_need: dict[KernelNeed, list[str]] = {}
    for name, mask in masks_of_layers(model).items():
        window = 0 if mask.chunked else mask.window_tokens or 0  # calls are cut at the beginnings of chunks
        shorter = window if window < longest_document_tokens else 0
        layers_of_need.setdefault(KernelNeed(heads_of_layer[name], shorter, softcap), []).append(name)
    return layers_of_need


def _kernel(
    model: PreTrainedModel, longest_document_tokens: int, kernel: KernelName, device: torch.device
) -> Iterator[str]:
    """Yields why no kernel can compute the model's layers."""
    try:
        needs = kernel_needs(model, longest_document_tokens)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        yield f"its heads can be read neither from its config nor from its layers ({error})"
        return
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    for need, layers in needs.items():
        try:
            choose_kernel(kernel, need.operands(device.type, capability, text_decoder(model).dtype), need.spec)
        except UnsupportedAttentionError as error:
            yield f"{layers[0]}{and_more(len(layers) - 1)}: {error}"
            return
