"""Hooks of an enabled model, and hooks around its backbone.

Copies of the model share its hooks; a pickled hook is restored without its method, and does nothing.

Programs with their own head call the backbone (`model.model`) instead of the enabled root: fused losses, and trainers
of TRL, which also run their methods instead of the root's forward to involve DDP and FSDP. Hooks here begin and end
these training passes, as the root's hooks do for others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from distca_hf.integrations.models.structure import backbone_of, names_by_position
from distca_hf.torch_private import hidden_from_dynamo


Keywords = dict[str, Any]
# Packages whose hooks do not read the results of a pass: they gather weights, or are ours.
KNOWN_HOOKS = frozenset({"accelerate", "deepspeed", "distca_hf", "peft", "torch", "transformers", "trl"})
# Packages whose modules inside a decoder are known: they compute every token by itself, or the model check knows them.
KNOWN_MODULES = KNOWN_HOOKS.union(
    ("abc", "builtins", "typing"),  # of Python's own base classes
    ("auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "gptqmodel", "hqq", "optimum", "torchao"),
    ("apex", "causal_conv1d", "fla", "flash_attn", "kernels", "liger_kernel", "mamba_ssm", "transformer_engine"),
)


class Hook:
    """A hook that calls a method, and that a compiler may trace."""

    def __init__(self, method: Callable[..., object] | None = None) -> None:
        self._method = method

    def __call__(self, *arguments: object) -> object:
        return None if self._method is None else self._method(*arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> "Hook":
        return self

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return type(self), ()


class HiddenHook(Hook):
    """A hook that no compiler traces."""

    @hidden_from_dynamo
    def __call__(self, *arguments: object) -> object:  # quicker than `super()`, in every pass
        return None if self._method is None else self._method(*arguments)


class BackboneCalls:
    """Hooks around the backbone of one model. `begin` and `end` are the hooks around the root, called as for a pass of
    the root, with keywords only."""

    def __init__(
        self,
        model: PreTrainedModel,
        root: nn.Module,
        begin: Callable[[nn.Module, tuple[object, ...], Keywords], object],
        end: Callable[[nn.Module, tuple[object, ...], Keywords, object], object],
        is_running: Callable[[], bool],
    ) -> None:
        self._root, self._backbone, self._names = root, backbone_of(model), names_by_position(backbone_of(model))
        self._is_watched = self._backbone not in (model, root)
        self._begin, self._end, self._is_running = begin, end, is_running
        self._handles: list[RemovableHandle] = []
        self._is_open = False

    def enter(self) -> None:
        """Adds the hooks, unless the backbone is the whole model."""
        if self._is_watched:
            self._handles = [
                self._backbone.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
                self._backbone.register_forward_hook(Hook(self._after), with_kwargs=True),
            ]

    def leave(self, backbone: nn.Module) -> None:
        """Removes the hooks from the backbone, or from the backbone of a copy, whose hooks are copies too."""
        for handle in self._handles:
            if backbone is self._backbone:
                handle.remove()
            backbone._forward_pre_hooks.pop(handle.id, None)
            backbone._forward_hooks.pop(handle.id, None)

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Begins a pass if the root was not called, otherwise does nothing. torch.compile traces this."""
        if kwargs.get("distca_plan") is not None or not (module.training and torch.is_grad_enabled()):
            return None
        return None if self._is_running() and not self._is_open else self._open(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords, output: object) -> object:
        return self._close(module, args, kwargs, output) if self._is_open else None

    @hidden_from_dynamo
    def _open(self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords) -> object:
        self._is_open = True
        root = self._root if module is self._backbone else module  # a copy is refused
        return self._begin(root, (), dict(zip(self._names, args, strict=False)) | kwargs)

    @hidden_from_dynamo
    def _close(self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords, output: object) -> object:
        self._is_open = False
        return self._end(self._root, args, kwargs, output)


def hooks_of(part: nn.Module) -> list[object]:
    """Returns the hooks of a module that run in forward and backward passes."""
    found = list[object]()
    for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
        if hooks:
            found += hooks.values()
    return found


def unknown_hook(part: nn.Module) -> str:
    """Returns the Python module of a hook that may read or change results, or their gradients; empty if a module has
    none."""
    for hook in hooks_of(part):
        function = getattr(hook, "func", hook)  # of a partial
        module: str = getattr(function, "__module__", None) or type(function).__module__
        if module.partition(".")[0] not in KNOWN_HOOKS:
            return module
    return ""


def unknown_class(part: nn.Module) -> type | None:
    """Returns the class of an unknown package that a module has or is derived from; None if there is none."""
    return next((one for one in type(part).__mro__ if one.__module__.partition(".")[0] not in KNOWN_MODULES), None)
