"""Activation checkpointing that does not attend twice: it saves attention outputs and recomputes the rest.

Recomputing attention costs an exchange and the largest part of a long document's time. Its output and log-sum-exp
cost `N * V` elements and `N` fp32 numbers per token and layer. That is 8.1 KB for an 8B Llama in bf16, as much as the
layer's input, which is saved anyway. Both may wait for backward in host memory (`integrations.offload`).

If attention is recomputed anyway, at least rows of other ranks are kept (`runtime.retention`). A region then holds
rows for all of its layers at the same time. Most regions are one layer of a model; torch's checkpoint wrapper may hold
several.

This sets arguments of `torch.utils.checkpoint.checkpoint`, wherever Transformers (`_gradient_checkpointing_func`) or
torch's checkpoint wrapper (`checkpoint_fn`) keep it. Reentrant checkpointing cannot save a part of a layer. In a
region that a compiler traces, contexts come from torch's selective checkpointing, the only kind the compiler knows;
it saves the same operators. Everywhere else they are ours (`runtime.regions`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

import distca_hf.runtime.local_attention
import distca_hf.runtime.op  # noqa: F401 (both register operators)
from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.errors import ConfigError
from distca_hf.integrations.offload import OffloadedLayers
from distca_hf.runtime.regions import retaining_contexts, saving_contexts
from distca_hf.runtime.retention import Regions
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Attributes under which Transformers and torch's wrapper keep the function that checkpoints a module.
FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
# Attribute of a checkpointed module: for each of these names, our function and the one it replaced.
REPLACED = "_distca_replaced"
Checkpoint = functools.partial[object]
# Operators whose outputs are saved: with a plan, and without.
SAVED_OPERATORS = (torch.ops.distca.flash_attn.default, torch.ops.distca.flash_attn_local.default)


def _policy(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_traced_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """Returns modules that are or may be checkpointed."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") or hasattr(module, "checkpoint_fn")
    ]


def recomputes_layers(modules: Sequence[nn.Module]) -> bool:
    """Returns whether any checkpointed module recomputes anything."""
    return any(_functions(module) for module in modules if getattr(module, "gradient_checkpointing", True))


class RecomputedLayers:
    """Finds the attention layers of one model that backward recomputes, and prepares checkpointing for them. A layer
    that makes several attention calls has several `masks`."""

    def __init__(self, masks: Mapping[nn.Module, Sequence[Mask]]) -> None:
        self._masks = masks
        # Indices of modules that recompute attention, among all that are or may be checkpointed.
        self.again: list[int] = []
        self.regions: Regions = ()  # for each region that recomputes attention, the masks of its attention calls
        self._modules: list[nn.Module] | None = None
        self._attributes: list[dict[str, object]] = []  # of these modules
        self._known: tuple[list[object], DistCAConfig, bool] | None = None
        self._rows_wait = False

    def prepare(self, model: nn.Module, config: DistCAConfig, has_peers: bool) -> bool:
        """Prepares checkpointing for a pass, and finds the regions that recompute attention. Returns whether received
        rows wait for recomputation.

        Args:
            model: the model with its wrappers, which may be added until the first forward pass.
            has_peers: whether other ranks send rows to this one.
        """
        is_first, modules = self._modules is None, self._found(model)
        if self._known == (self._checkpointed_by(), config, has_peers):  # in most passes nothing has changed
            return self._rows_wait
        self._rows_wait = False
        if config.checkpointed_attention != "recompute":
            offloads = config.checkpointed_attention == "offload"
            saves = save_attention(modules, offloads)
            if offloads and not saves:
                raise ConfigError(
                    "checkpointed_attention='offload' needs use_reentrant=False: reentrant checkpointing keeps its "
                    "inputs itself. Give that, or leave 'offload' out"
                )
            functions = [function for module in modules for _, function in _functions(module)]
            if offloads and is_first and not any(function.func is _checkpoint_on_host for function in functions):
                log.warning(
                    "checkpointed_attention='offload' moves what activation checkpointing keeps, and no layer is "
                    "checkpointed, or only with a context_fn of yours: set gradient_checkpointing=True, and leave "
                    "context_fn out"
                )
            if is_first and not saves:
                log.warning(
                    "reentrant activation checkpointing recomputes attention and its exchanges; use_reentrant=False "
                    "saves their outputs instead"
                )
        elif config.kv_residency != "refetch" and has_peers:
            # Modules that are compiled together with their checkpointing repeat the exchange.
            self._rows_wait = _replace(
                modules, lambda function: functools.partial(_checkpoint_keeping_received, function)
            )
        if (again := _attending_again(modules)) != self.again:  # looking into all modules takes a millisecond
            self.again, self.regions = again, self._find(modules, again)
        self._known = self._checkpointed_by(), config, has_peers
        return self._rows_wait

    def parts(self, model: nn.Module) -> tuple[bool, bool]:
        """Returns whether backward recomputes layers, and whether it recomputes their attention."""
        modules = self._found(model)
        return recomputes_layers(modules), bool(_attending_again(modules))

    def leave(self) -> None:
        """Restores the functions of checkpointed modules, unless others have replaced them since."""
        for module in self._modules or ():
            for name, (replacement, function) in vars(module).pop(REPLACED, {}).items():
                if getattr(module, name, None) is replacement:
                    setattr(module, name, function)

    def _found(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules that are or may be checkpointed, outer ones first. Searches only once."""
        if self._modules is None:
            self._modules = checkpointed_modules(model)
            self._attributes = list(map(vars, self._modules))  # quicker than asking a module for what it may not have
        return self._modules

    def _checkpointed_by(self) -> list[object]:
        """Returns what decides how modules are checkpointed: while it is equal, nothing has changed."""
        return [value for own in self._attributes for value in map(own.get, (*FUNCTIONS, "gradient_checkpointing"))]

    def _find(self, modules: Sequence[nn.Module], again: Sequence[int]) -> Regions:
        in_region: dict[nn.Module, nn.Module] = {}
        apart = set(self._masks)  # layers that no module checkpoints as a whole
        inside = {module: [part for part in module.modules() if part in self._masks] for module in modules}
        for place, module in enumerate(modules):
            if isinstance(module, GradientCheckpointingLayer) or hasattr(module, "checkpoint_fn"):  # as a whole
                apart.difference_update(inside[module])
                in_region |= dict.fromkeys(inside[module] if place in again else (), module)  # the innermost counts
        for place in again:  # models that checkpoint their layers one by one
            in_region |= {layer: layer for layer in inside[modules[place]] if layer in apart}
        regions: dict[nn.Module, list[Mask]] = {}
        for layer, region in in_region.items():
            regions.setdefault(region, []).extend(self._masks[layer])
        return tuple(tuple(masks) for masks in regions.values())


def _attending_again(modules: Sequence[nn.Module]) -> list[int]:
    """Returns indices in this list of checkpointed modules that recompute everything, including attention."""
    return [
        place
        for place, module in enumerate(modules)
        if getattr(module, "gradient_checkpointing", True)
        and any("context_fn" not in function.keywords for _, function in _functions(module))
    ]


def save_attention(modules: Sequence[nn.Module], on_host: bool = False) -> bool:
    """Makes checkpointed modules that recompute everything keep attention outputs, too. With `on_host`, these and
    inputs are kept in host memory. Returns False if some of them cannot, because their checkpointing is reentrant.
    Raises ConfigError if it waits on the host, and modules are compiled together with their checkpointing."""
    if on_host and any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        raise ConfigError(
            "checkpointed_attention='offload' cannot be compiled: torch.compile traces only its own kind of "
            "checkpointing. Compile modules inside the checkpointed ones (attention, MLP), or use "
            "checkpointed_attention='save'"
        )
    runs, contexts = (_checkpoint_on_host, OffloadedLayers()) if on_host else (_checkpoint_saving, saving_contexts)

    def saving(function: Checkpoint) -> Checkpoint:
        return functools.partial(runs, function, context_fn=contexts)

    return _replace(modules, saving)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _checkpoint_on_host(function: Checkpoint, *args: object, context_fn: OffloadedLayers, **kwargs: object) -> object:
    """Runs a checkpointed region of which everything waits on the host. Breaks graphs of a compiled model.
    `context_fn` runs it: this name marks functions that do not attend again."""
    return context_fn.run(function, *args, **kwargs)


def _checkpoint_saving(function: Checkpoint, *args: object, context_fn: object, **kwargs: object) -> object:
    is_traced = torch.compiler.is_compiling()
    return function(*args, **kwargs, context_fn=_traced_contexts if is_traced else context_fn)


def _checkpoint_keeping_received(function: Checkpoint, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    return function(*args, **kwargs, context_fn=retaining_contexts)


def _replace(modules: Sequence[nn.Module], made: Callable[[Checkpoint], Checkpoint]) -> bool:
    """Replaces functions that recompute everything; returns False if one cannot be replaced: it is reentrant."""
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


def _functions(module: nn.Module) -> list[tuple[str, Checkpoint]]:
    """Returns names and values of the functions that checkpoint a module."""
    own = vars(module)
    return [(name, own[name]) for name in FUNCTIONS if isinstance(own.get(name), functools.partial)]
