"""Model parts: the Transformers model inside others, its text decoder, attention layers, heads and functions, and its
operations.

Some properties of a function are known only from its source before it runs. Without a source every answer is no.
Operations are counted from parameters, before the model is wrapped.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.cost import Heads, TokenBytes, head_groups
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.flops import StepFlops


# Common names that a configuration may map to others of its own. Where layers have heads of their own, Transformers
# refuses to say how many there are, or how wide they are.
NUMBER = "num_attention_heads"
OTHERS = ("num_key_value_heads", "hidden_size", "head_dim")
# A method that a class may or may not have.
Function = Callable[..., object] | None
# Names that configurations have for the experts of a layer, and for the experts of one token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


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


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the decoder of a multimodal model, which has a configuration of its own. Any other model is returned
    itself, also one whose decoder cannot be told from its towers."""
    text = model.config.get_text_config()
    if text is model.config or getattr(model.config, "is_encoder_decoder", False):
        return model
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) and decoder.config is text else model


def text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns modules that text runs through, by name: the decoder, all that it is inside of, and the head. In a model
    for text these are all modules."""
    decoder, head = text_decoder(model), model.get_output_embeddings()
    if decoder is model:
        return dict(model.named_modules())
    inside = {*decoder.modules(), *(() if head is None else head.modules())}
    return {
        name: module for name, module in model.named_modules() if module in inside or decoder in set(module.modules())
    }


def weights_beside_text(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns weights that no text runs through, by name: of towers, and of what is between them and the decoder."""
    text = {weight for module in text_modules(model).values() for weight in module.parameters(recurse=False)}
    return {name: weight for name, weight in model.named_parameters() if weight not in text}


def attention_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns modules of the text part whose forward looks attention up in Transformers' interface, by name."""
    return {name: module for name, module in text_modules(model).items() if looks_attention_up(module)}


def looks_attention_up(module: nn.Module) -> bool:
    """Returns whether the module's own forward calls Transformers' attention interface."""
    return _uses_interface(type(module))  # type: ignore[arg-type]


def forward_accepts(model: PreTrainedModel, keyword: str) -> bool:
    """Returns whether `model.forward` has a parameter of this name. A multimodal model may pass it on to its text
    decoder."""
    parameters = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (
        passes_on and keyword in inspect.signature(text_decoder(model).forward).parameters
    )


def names_by_position(model: nn.Module) -> list[str]:
    """Returns names of the arguments that `model.forward` takes by position. A PEFT model without a task passes them
    all on: then names are those of the model inside."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        parameters = inspect.signature(transformers_model(model).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def head_groups_of(model: nn.Module) -> int:
    """Returns the number of groups of heads: KV heads, or several of them together; 1 if the config does not say."""
    return head_groups(_config(model, NUMBER, "num_key_value_heads"))


def heads_of(model: nn.Module) -> Heads:
    """Returns the heads of a layer.

    Raises:
        AttributeError, KeyError: its config does not say how many heads there are, or how wide they are.
        AttributeError, RuntimeError, ValueError: layers have heads of their own, as versions of Transformers say it.
    """
    number = transformers_model(model).config.get_text_config().num_attention_heads
    return Heads.of_config(_config(model, *OTHERS) | {NUMBER: number})


def token_bytes_of(model: nn.Module) -> TokenBytes:
    """Returns bytes of a token in one layer, in 16-bit numbers; planning needs their proportion alone.

    Raises:
        AttributeError, KeyError, RuntimeError, ValueError: as `heads_of`.
    """
    return heads_of(model).token_bytes()


def _config(model: nn.Module, *names: str) -> dict[str, Any]:
    """Returns the configuration of a model's text part, with values by these common names where it has any."""
    config = transformers_model(model).config.get_text_config()
    named = {name: getattr(config, name, None) for name in names}
    return config.to_dict() | {name: value for name, value in named.items() if value is not None}


@lru_cache(maxsize=1024)
def _uses_interface(module_class: Hashable) -> bool:
    """Returns whether the class's own forward calls the attention interface."""
    source = source_of(getattr(module_class, "forward", None))
    return "attention_interface" in source and "ALL_ATTENTION_FUNCTIONS" in source


def source_of(function: Function) -> str:
    """Returns the source of a function, without its decorators; empty if there is none."""
    try:
        return inspect.getsource(inspect.unwrap(function)) if function is not None else ""
    except (OSError, TypeError):
        return ""


def takes_shift_labels(function: Function) -> bool:
    """Returns whether a function has a parameter `shift_labels`, or takes the key out of its keywords. Losses that
    shift labels themselves have a variable of that name."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "shift_labels")
        or (isinstance(node, ast.Constant) and node.value == "shift_labels")
        for node in _nodes(function)
    )


def passes_keywords_on(function: Function, name: str) -> bool:
    """Returns whether a method calls `self.name(..., **keywords)`."""
    calls = (node for node in _nodes(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == name
        and any(keyword.arg is None for keyword in call.keywords)
        for call in calls
    )


def calls_super(function: Function, name: str) -> bool:
    """Returns whether a method calls `super().name(...)`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in _nodes(function)
    )


def _nodes(function: Function) -> Iterator[ast.AST]:
    """Returns all nodes of a function's syntax tree."""
    return ast.walk(ast.parse(textwrap.dedent(source_of(function))))


def step_flops(model: nn.Module) -> StepFlops | None:
    """Counts the operations of a model's forward and backward pass; None where its configuration does not say enough,
    or weights are quantised.

    Args:
        model: a Transformers model, or a PEFT model around one; ZeRO-3 may have divided it already.
    """
    try:
        heads = heads_of(model)
        counted = list(_matrices(model))
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None
    layers = len(attention_layers(transformers_model(model)))
    pair_forward = 2.0 * layers * heads.query * (heads.dim + heads.value_dim)
    weights = sum(numbers for numbers, _ in counted)
    trained = sum(numbers for numbers, is_trained in counted if is_trained)
    head = getattr(transformers_model(model).get_output_embeddings(), "weight", None)
    return StepFlops.of(weights, trained, pair_forward, 0 if head is None else prod(_shape(head)))


def _matrices(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yields the numbers of every matrix that a token of text is multiplied with, and whether it is trained. An
    embedding is looked up, unless it is the output's as well.

    Raises:
        ValueError: weights are quantised, or it is not known how many experts a token takes.
    """
    inner = transformers_model(model)
    head = inner.get_output_embeddings()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {getattr(head, "weight", None)}
    beside_text = set(weights_beside_text(inner).values())
    share = _share_of_experts(inner.config.get_text_config())
    for name, parameter in model.named_parameters():
        shape = _shape(parameter)
        if parameter in tables or parameter in beside_text or len(shape) < 2:
            continue
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is quantised")
        numbers = prod(shape)
        if ".experts." in name:
            if share is None:
                raise ValueError(f"{name}: the configuration does not say how many experts a token takes")
            numbers = int(numbers * share)
        yield numbers, parameter.requires_grad


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    """Returns the shape of a parameter as it was before ZeRO-3 divided it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _share_of_experts(config: PreTrainedConfig) -> float | None:
    """Returns which part of its experts a token takes; None if the configuration does not say."""
    total, taken = (
        next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)
        for names in (EXPERTS, EXPERTS_OF_A_TOKEN)
    )
    return taken / total if total and taken else None
