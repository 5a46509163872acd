"""Activation checkpointing that does not attend twice: attention outputs are saved, the rest is recomputed.

Recomputing attention costs an exchange and the largest part of a long document's time. Its output and log-sum-exp
cost `N * V` elements and `N` fp32 numbers per token and layer: 8.1 KB for an 8B Llama in bf16, as much as the layer's
input, which is saved anyway.

Done through the arguments of `torch.utils.checkpoint.checkpoint`, wherever Transformers
(`_gradient_checkpointing_func`) or torch's checkpoint wrapper (`checkpoint_fn`) keep it. Reentrant checkpointing
cannot save a part of a layer.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distca_hf.telemetry import get_logger


log = get_logger(__name__)

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in (torch.ops.distca.flash_attn.default, torch.ops.distca.flash_attn_local.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_save_attention = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that are, or may be, checkpointed."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") or hasattr(module, "checkpoint_fn")
    ]


def save_attention(modules: Sequence[nn.Module]) -> bool:
    """Lets checkpointed modules keep their attention outputs, where they recompute everything so far.

    Returns:
        False if some of them are checkpointed in a way that cannot: reentrant.
    """
    able = True
    for module in modules:
        for name in FUNCTIONS:
            function = getattr(module, name, None)
            if not isinstance(function, functools.partial) or "context_fn" in function.keywords:
                continue
            if not function.keywords.get("use_reentrant"):
                keywords = {**function.keywords, "use_reentrant": False, "context_fn": _save_attention}
                setattr(module, name, functools.partial(function.func, *function.args, **keywords))
            elif getattr(module, "gradient_checkpointing", True):
                able = False
    return able
