"""Activation checkpointing that does not attend twice: attention outputs are saved, the rest is recomputed.

Recomputing attention costs an exchange and the largest part of a long document's time. Its output and log-sum-exp
cost `N * V` elements and `N` fp32 numbers per token and layer: 8.1 KB for an 8B Llama in bf16, as much as the layer's
input, which is saved anyway. They may wait on the host (`offload`).

Done through the arguments of `torch.utils.checkpoint.checkpoint`, wherever Transformers
(`_gradient_checkpointing_func`) or torch's checkpoint wrapper (`checkpoint_fn`) keep it. Reentrant checkpointing
cannot save a part of a layer.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distca_hf.errors import ConfigError
from distca_hf.integrations.offload import SAVED_OPERATORS, OffloadedAttention
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_save_attention = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that are, or may be, checkpointed."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") or hasattr(module, "checkpoint_fn")
    ]


def recomputes_attention(modules: Sequence[nn.Module]) -> bool:
    """Whether some checkpointed modules recompute everything, attention too."""
    functions = [
        getattr(module, name, None)
        for module in modules
        for name in FUNCTIONS
        if getattr(module, "gradient_checkpointing", True)
    ]
    return any(
        isinstance(function, functools.partial) and "context_fn" not in function.keywords for function in functions
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
    able, contexts = True, OffloadedAttention() if on_host else _save_attention
    for module in modules:
        for name in FUNCTIONS:
            function = getattr(module, name, None)
            if not isinstance(function, functools.partial) or "context_fn" in function.keywords:
                continue
            if not function.keywords.get("use_reentrant"):
                keywords = {**function.keywords, "use_reentrant": False, "context_fn": contexts}
                setattr(module, name, functools.partial(function.func, *function.args, **keywords))
            elif getattr(module, "gradient_checkpointing", True):
                able = False
    return able
