"""Structure of a model: the Transformers model inside others, its text decoder, towers, attention layers, functions.

Before a function runs, only its source shows some of its properties. Without a source every answer is no.

Towers are the parts of a multimodal model that see images, videos or sound. Their attention is bidirectional, so they
keep an attention of Transformers, and nothing in them is checked. A tower must be a model with its own configuration.
Otherwise its attention could not be told from the decoder's, and the model is refused.
"""

import ast
import builtins
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca_hf.batches.batch_documents import KINDS_OF_TOKENS, Batch
from distca_hf.errors import UnsupportedAttentionError
from distca_hf.telemetry import get_logger


# Threads parse one at a time: CPython counts the depth of trees over all threads, and may fail.
PARSING = threading.Lock()
# A method that a class may or may not have.
Function = Callable[..., object] | None
log = get_logger(__name__)

# Name of the attention implementation in Transformers' registers.
IMPLEMENTATION = "distca"
# Attention given to towers that were loaded with distca.
OF_TOWERS = "sdpa"


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the Transformers model inside a PEFT model, or the model itself. Raises UnsupportedAttentionError if
    there is none."""
    get_base_model = getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    if not isinstance(inner, PreTrainedModel):
        parts = (
            f"{name!r}, a {type(part).__name__}"
            for name, part in inner.named_modules()
            if isinstance(part, PreTrainedModel)
        )
        found = next(parts, None)
        take = "load it with from_pretrained or from_config" if found is None else f"take its part {found}"
        trained = "" if found is None else ". A Trainer of the module around it then needs no attach"
        raise UnsupportedAttentionError(
            f"{type(inner).__name__} is not a Transformers model; {take}, and give it to enable and plugin.dataloader "
            f"as it was before DDP, FSDP, torch.compile or prepare wrapped it (accelerator.unwrap_model){trained}"
        )
    return inner


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the decoder of a multimodal model, which has its own configuration. Returns any other model itself, and
    also a multimodal one whose decoder cannot be told from its towers."""
    text = model.config.get_text_config()
    if text is model.config or getattr(model.config, "is_encoder_decoder", False):
        return model
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) and decoder.config is text else model


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its head. If the class names no base (Llama 4), this is the only part that holds
    attention layers; if there is not exactly one, the model itself."""
    base: PreTrainedModel = model.base_model
    if base is not model:
        return base
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel) and attention_layers(part)]
    return parts[0] if len(parts) == 1 else model


def embedding_holder(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a model whose `get_input_embeddings` finds the embeddings of tokens fastest."""
    decoder = text_decoder(model)
    part = backbone_of(model) if decoder is model else decoder
    return part if part.get_input_embeddings() is model.get_input_embeddings() else model


def text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns modules that text runs through, by name: the decoder, all modules around it, and the head. In a model
    for text these are all modules."""
    decoder, head = text_decoder(model), model.get_output_embeddings()
    if decoder is model:
        return dict(model.named_modules())
    inside = {*decoder.modules(), *(() if head is None else head.modules())}
    around: dict[nn.Module, bool] = {decoder: True}

    def holds_decoder(module: nn.Module) -> bool:
        if module not in around:
            around[module] = any([holds_decoder(part) for part in module.children()])
        return around[module]

    return {name: module for name, module in model.named_modules() if module in inside or holds_decoder(module)}


def weights_outside_text(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns weights that no text runs through, by name: in towers, and between towers and decoder."""
    text = {weight for module in text_modules(model).values() for weight in module.parameters(recurse=False)}
    return {name: weight for name, weight in model.named_parameters() if weight not in text}


def attention_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns modules of the text part whose forward looks attention up in Transformers' interface, by name."""
    return {name: module for name, module in text_modules(model).items() if looks_attention_up(module)}


def looks_attention_up(module: nn.Module) -> bool:
    """Returns whether the module's own forward calls Transformers' attention interface."""
    return forward_names(module, "attention_interface", "ALL_ATTENTION_FUNCTIONS")


def forward_names(module: nn.Module, *words: str) -> bool:
    """Returns whether the source of the module's own forward contains all of these words; False without a source."""
    return _class_names(type(module), words)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _class_names(module_class: Hashable, words: tuple[str, ...]) -> bool:
    source = source_of(getattr(module_class, "forward", None))
    return all(word in source for word in words)


def names_by_position(model: nn.Module) -> list[str]:
    """Returns names of the arguments that `model.forward` takes by position. A PEFT model without a task passes all of
    them on, so this reads the model inside."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        parameters = inspect.signature(transformers_model(model).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def takes_use_cache(model: PreTrainedModel) -> bool:
    """Returns whether a model's forward takes `use_cache`, or passes it on to a part that does."""
    parts = model, text_decoder(model), backbone_of(model)
    parameters, *inside = (inspect.signature(part.forward).parameters for part in parts)
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (passes_on and any("use_cache" in of for of in inside))


def source_of(part: Function | type) -> str:
    """Returns the source of a function, without its decorators, or of a class; empty if there is none."""
    try:
        with PARSING:
            source = _source_in_module(part) if isinstance(part, type) else ""
            return source or (inspect.getsource(inspect.unwrap(part)) if part is not None else "")
    except (OSError, TypeError):
        return ""


def _source_in_module(part: type) -> str:
    """Returns the source of a class if that of its module has it; otherwise empty, as in a notebook."""
    try:
        return _classes_of(inspect.getsource(sys.modules[part.__module__])).get(part.__qualname__, "")
    except (KeyError, OSError, SyntaxError, TypeError):
        return ""


@lru_cache(maxsize=16)
def _classes_of(source: str) -> dict[str, str]:
    """Returns the source of every class in a module's source, by qualified name. Python's own look-up parses the whole
    module once for each class.

    If a module defines a class several times, as for several versions of a package, it has the source of all: which of
    them is in use cannot be told from their name.
    """
    lines, found = source.split("\n"), dict[str, str]()

    def visit(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            inside = prefix
            if isinstance(node, ast.ClassDef):
                name, text = prefix + node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found[name] = f"{found[name]}\n{text}" if name in found else text
                inside = f"{name}."
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{prefix}{node.name}.<locals>."
            if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):  # no expression holds a class
                visit(node, inside)

    visit(ast.parse(source), "")
    return found


@lru_cache(maxsize=256)
def takes_shift_labels(function: Function) -> bool:
    """Returns whether a function has a parameter `shift_labels`, or reads that key of its keywords. A variable of that
    name does not count: losses that shift labels themselves have one."""
    return any(
        (isinstance(node, ast.arg) and node.arg == "shift_labels")
        or (isinstance(node, ast.Constant) and node.value == "shift_labels")
        for node in syntax_of(function)
    )


@lru_cache(maxsize=256)
def passes_keywords_on(function: Function, name: str) -> bool:
    """Returns whether a method calls `self.name(..., **keywords)`."""
    calls = (node for node in syntax_of(function) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == name
        and any(keyword.arg is None for keyword in call.keywords)
        for call in calls
    )


@lru_cache(maxsize=1024)
def keyword_passed(module_class: Hashable, function: str, keyword: str) -> Callable[[nn.Module], object] | None:
    """Returns what the class's own forward gives to `function(..., keyword=...)`, as a function of the module; None if
    it does not give this keyword, or if the value depends on variables of the forward pass, which has not run."""
    forward: Any = getattr(module_class, "forward", None)
    for call in (node for node in syntax_of(forward) if isinstance(node, ast.Call)):
        given = next((one.value for one in call.keywords if one.arg == keyword), None)
        if given is None or not isinstance(call.func, ast.Name) or call.func.id != function:
            continue
        names = inspect.unwrap(forward).__globals__
        if {node.id for node in ast.walk(given) if isinstance(node, ast.Name)} <= {"self", *names, *dir(builtins)}:
            code = compile(ast.Expression(given), str(module_class), "eval")
            return lambda module: eval(code, names, {"self": module})  # every pass runs this expression
    return None


def calls_super(function: Function, name: str) -> bool:
    """Returns whether a method calls `super().name(...)`, or `Parent.name(...)` of a class of its module."""
    known = getattr(inspect.unwrap(function), "__globals__", {}) if function is not None else {}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and (
            (isinstance(of := node.value, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super")
            or (isinstance(of, ast.Name) and isinstance(known.get(of.id), type))
        )
        for node in syntax_of(function)
    )


def syntax_of(function: Function) -> Iterator[ast.AST]:
    """Returns all nodes of a function's syntax tree."""
    source = textwrap.dedent(source_of(function))
    with PARSING:
        return ast.walk(ast.parse(source))


def towers(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Returns the outermost Transformers models outside the text part, by name; none in a model for text."""
    text, found = text_modules(model), dict[str, PreTrainedModel]()
    for name, module in model.named_modules():  # outer ones come first
        is_inside = any(name.startswith(f"{tower}.") for tower in found)
        if name not in text and not is_inside and isinstance(module, PreTrainedModel):
            found[name] = module
    return found


def undivided(model: PreTrainedModel) -> Iterator[str]:
    """Yields why the text decoder of a multimodal model cannot be told from its towers."""
    text = model.config.get_text_config()
    is_divided = text is model.config or text_decoder(model) is not model
    if not is_divided and not getattr(model.config, "is_encoder_decoder", False):
        yield "its text decoder cannot be told from its towers: get_decoder() returns no part with the text's config"
        return
    in_towers = {module for tower in towers(model).values() for module in tower.modules()}
    of_text = text_modules(model)
    for name, layer in model.named_modules():
        if name in of_text or not looks_attention_up(layer):
            continue
        config = getattr(layer, "config", text)
        if layer not in in_towers or config is text or config is model.config:
            yield (
                f"{name} attends outside the text decoder and belongs to no tower with its own config: it would "
                "attend through distca as well"
            )
            return


def text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Returns the configurations that say how text attends: of its layers, and of the models around them, which make
    their masks."""
    around = [part.config for part in text_modules(model).values() if isinstance(part, PreTrainedModel)]
    text = model.config.get_text_config()
    of_layers = [getattr(layer, "config", text) for layer in attention_layers(model).values()]
    return list({id(config): config for config in (*around, *of_layers)}.values())


def attention_of(config: PreTrainedConfig) -> str | None:
    """Returns the attention of one configuration. Its public getter takes longer, and is asked in every pass."""
    found: str | None = own_entries(config).get("_attn_implementation_internal")
    return found


def own_entries(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns what `vars` returns, without the configuration's own look-up of names, which takes longer."""
    entries: dict[str, Any] = object.__getattribute__(config, "__dict__")
    return entries


def set_attention(config: PreTrainedConfig, implementation: str | None) -> None:
    """Sets the attention of one configuration; its public setter would also set the towers' attention."""
    config._attn_implementation_internal = implementation


def attend_with_distca(model: PreTrainedModel) -> None:
    """Makes the text part of a checked model attend with distca, whatever it was loaded with. Towers keep their
    attention, but a tower that was loaded with distca changes to sdpa or eager."""
    configs = text_configs(model)
    others = sorted({str(config._attn_implementation) for config in configs} - {IMPLEMENTATION})
    if others:
        log.info("%s attends with distca, no longer with %s", type(model).__name__, " and ".join(others))
    for config in configs:
        set_attention(config, IMPLEMENTATION)
    give_own_attention(model)


def give_own_attention(model: PreTrainedModel) -> None:
    """Gives towers that were loaded with distca their own attention, and logs it. The model was checked, or is not
    enabled (a reference model)."""
    for name, tower in towers(model).items():
        layers = (layer for layer in tower.modules() if looks_attention_up(layer))
        if any(getattr(layer, "config", tower.config)._attn_implementation == IMPLEMENTATION for layer in layers):
            own = OF_TOWERS if tower._supports_sdpa else "eager"
            tower.set_attn_implementation(own)
            log.info("%s: %s attends with %s, on each rank separately", type(model).__name__, name, own)


def asks_for_kinds(model: PreTrainedModel) -> bool:
    """Returns whether a model in training refuses a batch without kinds of tokens (Molmo2)."""
    return any(forward_names(part, "self.training and mm_token_type_ids is None") for part in model.modules())


def without_kinds_of_text(batch: Batch) -> Batch:
    """Returns a batch without kinds of tokens if these say that all are text: a model would make a mask for images
    from them. Keeps them next to grids of images, because a model asks for both. Returns the batch itself if it has no
    kinds; otherwise waits for the device."""
    if any(name.endswith("_grid_thw") and given is not None for name, given in batch.items()):
        return batch
    of_text = {
        name
        for name in KINDS_OF_TOKENS
        if isinstance(kinds := batch.get(name), torch.Tensor) and not bool(kinds.any())
    }
    return {name: given for name, given in batch.items() if name not in of_text} if of_text else batch
