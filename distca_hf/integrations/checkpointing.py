"""Activation checkpointing that does not attend twice: attention outputs are saved, the rest is recomputed.

Recomputing attention costs an exchange and the largest part of a long document's time. Its output and log-sum-exp
cost `N * V` elements and `N` fp32 numbers per token and layer: 8.1 KB for an 8B Llama in bf16, as much as the layer's
input, which is saved anyway. They may wait on the host (`offload`).

Where it is recomputed all the same, at least what came from other ranks is kept (`reuse`).

Done through the arguments of `torch.utils.checkpoint.checkpoint`, wherever Transformers
(`_gradient_checkpointing_func`) or torch's checkpoint wrapper (`checkpoint_fn`) keep it. Reentrant checkpointing
cannot save a part of a layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distca_hf.errors import ConfigError
from distca_hf.integrations.attention_mode import FLASH_ATTN, FLASH_ATTN_LOCAL
from distca_hf.integrations.offload import OffloadedAttention
from distca_hf.integrations.reuse import ReceivedRows
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in (FLASH_ATTN, FLASH_ATTN_LOCAL)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


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
        isinstance(function, functools.partial)
        and isinstance(function.keywords.get("context_fn"), ReceivedRows | None)
        for function in functions
    )


def save_attention(modules: Sequence[nn.Module], on_host: bool = False) -> bool:
    """Lets checkpointed modules keep their attention outputs, on their device or on the host, where they recompute
    everything so far.

    Returns:
        False if some of them are checkpointed in a way that cannot: reentrant.

    Raises:
        ConfigError: outputs on the host, of modules that are compiled together with their checkpointing.
    """
    if on_host and _compiled(modules):
        raise ConfigError(
            "checkpointed_attention='offload' cannot be compiled: torch.compile traces checkpointing of its own kind "
            "only. Compile modules inside the checkpointed ones (attention, MLP), or use checkpointed_attention='save'"
        )
    return _set_contexts(modules, OffloadedAttention() if on_host else _save_attention)


def reuse_received(modules: Sequence[nn.Module]) -> bool:
    """Lets checkpointed modules that recompute attention keep what came from other ranks in forward.

    Returns:
        False if some cannot, and exchange again: reentrant ones, and those compiled together with their checkpointing.
    """
    return not _compiled(modules) and _set_contexts(modules, ReceivedRows())


def _compiled(modules: Sequence[nn.Module]) -> bool:
    """torch.compile traces checkpointing of its own kind only."""
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)


def _set_contexts(modules: Sequence[nn.Module], contexts: Callable[[], Any]) -> bool:
    """Whether all that recompute everything so far now do so in these contexts."""
    able = True
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
