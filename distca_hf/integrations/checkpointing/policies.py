"""Activation checkpointing that does not attend twice: attention outputs are saved, the rest is recomputed.

Recomputing attention costs an exchange and the largest part of a long document's time. Its output and log-sum-exp
cost `N * V` elements and `N` fp32 numbers per token and layer. That is 8.1 KB for an 8B Llama in bf16, as much as the
layer's input, which is saved anyway. They may wait on the host (`offload`).

Where attention is recomputed all the same, at least rows of other ranks are kept (`runtime.retention`).

Done through the arguments of `torch.utils.checkpoint.checkpoint`, wherever Transformers
(`_gradient_checkpointing_func`) or torch's checkpoint wrapper (`checkpoint_fn`) keep it. Reentrant checkpointing
cannot save a part of a layer, and torch.compile traces contexts of torch's own selective checkpointing only.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distca_hf.errors import ConfigError
from distca_hf.integrations.checkpointing.offload import SAVED_OPERATORS, OffloadedAttention
from distca_hf.runtime.retention import retaining_contexts
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
# Attribute of a checkpointed module: for each of these names our function, and the one that it replaced.
REPLACED = "_distca_replaced"
Checkpoint = functools.partial[object]


def _policy(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_save_attention = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """Returns modules that are, or may be, checkpointed."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") or hasattr(module, "checkpoint_fn")
    ]


def recomputes_layers(modules: Sequence[nn.Module]) -> bool:
    """Returns whether some checkpointed modules recompute anything."""
    return any(_functions(module) for module in modules if getattr(module, "gradient_checkpointing", True))


def recomputes_attention(modules: Sequence[nn.Module]) -> bool:
    """Returns whether some checkpointed modules recompute everything, attention too."""
    return any(
        "context_fn" not in function.keywords
        for module in modules
        if getattr(module, "gradient_checkpointing", True)
        for _, function in _functions(module)
    )


def save_attention(modules: Sequence[nn.Module], on_host: bool = False) -> bool:
    """Lets checkpointed modules keep their attention outputs, on their device or on the host, where they recompute
    everything so far.

    Returns:
        False if some of them are checkpointed in a way that cannot: reentrant.

    Raises:
        ConfigError: outputs on the host, of modules that are compiled together with their checkpointing.
    """
    if on_host and any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        raise ConfigError(
            "checkpointed_attention='offload' cannot be compiled: torch.compile traces checkpointing of its own kind "
            "only. Compile modules inside the checkpointed ones (attention, MLP), or use checkpointed_attention='save'"
        )
    contexts = OffloadedAttention() if on_host else _save_attention

    def saving(function: Checkpoint) -> Checkpoint:
        runs = functools.partial(_checkpoint_on_host, function) if on_host else function
        return functools.partial(runs, context_fn=contexts)

    return _replace(modules, saving)


def keep_received(modules: Sequence[nn.Module]) -> bool:
    """Lets checkpointed modules that recompute attention keep rows that they received in forward. Modules that are
    compiled together with their checkpointing exchange again.

    Returns:
        False if some of them are checkpointed in a way that cannot: reentrant.
    """
    return _replace(modules, lambda function: functools.partial(_checkpoint_keeping_received, function))


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _checkpoint_on_host(function: Checkpoint, *args: object, **kwargs: object) -> object:
    """Runs a checkpointed region whose outputs wait on the host. Graphs of a compiled model break here."""
    return function(*args, **kwargs)


def _checkpoint_keeping_received(function: Checkpoint, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    return function(*args, **kwargs, context_fn=retaining_contexts)


def _replace(modules: Sequence[nn.Module], made: Callable[[Checkpoint], Checkpoint]) -> bool:
    """Replaces functions that recompute everything; returns False if one of them is reentrant and cannot be."""
    able = True
    for module in modules:
        for name, function in _functions(module):
            if "context_fn" in function.keywords or function.func is _checkpoint_keeping_received:
                continue
            if function.keywords.get("use_reentrant"):
                able = able and not getattr(module, "gradient_checkpointing", True)
            else:
                replacement = made(functools.partial(function, use_reentrant=False))
                vars(module).setdefault(REPLACED, {})[name] = replacement, function
                setattr(module, name, replacement)
    return able


def restore_functions(modules: Sequence[nn.Module]) -> None:
    """Gives checkpointed modules back the functions that they had, unless others have replaced them since."""
    for module in modules:
        for name, (replacement, function) in vars(module).pop(REPLACED, {}).items():
            if getattr(module, name, None) is replacement:
                setattr(module, name, function)


def _functions(module: nn.Module) -> list[tuple[str, Checkpoint]]:
    """Returns names and values of the functions that checkpoint a module."""
    named = [(name, getattr(module, name, None)) for name in FUNCTIONS]
    return [(name, function) for name, function in named if isinstance(function, functools.partial)]
