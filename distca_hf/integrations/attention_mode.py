"""A mode in which attention operators are run by somebody else: how checkpointing keeps and reuses what they return.

For `torch.utils.checkpoint.checkpoint(context_fn=...)`, which runs a region's forward pass in one mode, and its
recomputation in another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import distca_hf.runtime.local
import distca_hf.runtime.op  # noqa: F401 (both register operators)


FLASH_ATTN, FLASH_ATTN_LOCAL = torch.ops.distca.flash_attn.default, torch.ops.distca.flash_attn_local.default

# Called with the operator and its arguments; returns its outputs.
Runner = Callable[..., tuple[torch.Tensor, ...]]


class AttentionMode(TorchDispatchMode):
    """Hands attention operators to `run`; everything else runs as it is."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, run: Runner) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FLASH_ATTN or func is FLASH_ATTN_LOCAL:
            return self._run(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
