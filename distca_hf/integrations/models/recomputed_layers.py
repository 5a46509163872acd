"""Recomputed layers: finds the attention layers that backward recomputes, and the checkpointed region each is in.

When a region is recomputed, it holds rows of other ranks for all of its layers at the same time. Most regions are one
layer of a model; torch's checkpoint wrapper may hold several. Layers outside of regions attend once.
"""

from collections.abc import Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.config import DistCAConfig
from distca_hf.cost import Mask
from distca_hf.integrations.checkpointing import (
    checkpointed_by,
    checkpointed_modules,
    keep_received,
    places_that_attend_again,
    recomputes_attention,
    recomputes_layers,
    restore_functions,
    save_attention,
)
from distca_hf.integrations.models.layer_masks import masks_of_layers
from distca_hf.integrations.models.structure import attention_layers, transformers_model
from distca_hf.runtime.retention import Regions
from distca_hf.telemetry import get_logger


log = get_logger(__name__)


class RecomputedLayers:
    """Finds the attention layers of one model that are recomputed, and prepares checkpointing for them.

    Args:
        model: a Transformers model, or a PEFT model around one.

    Attributes:
        again: indices of the modules that recompute attention, among all that are or may be checkpointed.
        regions: for each region that attends again, the masks of its attention layers.
    """

    def __init__(self, model: nn.Module) -> None:
        layers, masks = attention_layers(transformers_model(model)), masks_of_layers(model)
        self._masks = {layer: masks[name] for name, layer in layers.items()}
        self.again: Sequence[int] = ()
        self.regions: Regions = ()
        self._modules: list[nn.Module] | None = None
        self._known: tuple[list[object], DistCAConfig, bool] | None = None
        self._rows_wait = False

    def prepare(self, model: nn.Module, config: DistCAConfig, has_peers: bool) -> bool:
        """Prepares checkpointing for a pass, and finds what attends again; returns whether received rows wait for
        recomputation.

        Args:
            model: the model with its wrappers, which may be added until the first forward pass.
            has_peers: whether other ranks send rows to this one.
        """
        is_first, modules = self._modules is None, self._found(model)
        if self._known == (checkpointed_by(modules), config, has_peers):  # in most passes nothing has changed
            return self._rows_wait
        self._rows_wait = False
        if config.checkpointed_attention != "recompute":
            saves = save_attention(modules, config.checkpointed_attention == "offload")
            if is_first and not saves:
                log.warning(
                    "reentrant activation checkpointing recomputes attention and its exchanges; use_reentrant=False "
                    "saves their outputs instead"
                )
        elif config.kv_residency != "refetch" and has_peers:
            self._rows_wait = keep_received(modules)
        if (again := places_that_attend_again(modules)) != self.again:  # to look into all modules takes a millisecond
            self.again, self.regions = again, self._find(modules, again)
        self._known = checkpointed_by(modules), config, has_peers
        return self._rows_wait

    def parts(self, model: nn.Module) -> tuple[bool, bool]:
        """Returns whether backward recomputes layers, and whether it recomputes their attention."""
        modules = self._found(model)
        return recomputes_layers(modules), recomputes_attention(modules)

    def leave(self) -> None:
        """Restores the checkpointing functions that modules had before."""
        restore_functions(self._modules or [])

    def _found(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules that are or may be checkpointed, outer ones first. They are looked for only once."""
        if self._modules is None:
            self._modules = checkpointed_modules(model)
        return self._modules

    def _find(self, modules: Sequence[nn.Module], again: Sequence[int]) -> Regions:
        in_region: dict[nn.Module, nn.Module] = {}
        apart = set(self._masks)  # layers that no module checkpoints by itself
        inside = {module: [part for part in module.modules() if part in self._masks] for module in modules}
        for place, module in enumerate(modules):
            if isinstance(module, GradientCheckpointingLayer) or hasattr(module, "checkpoint_fn"):  # as a whole
                apart.difference_update(inside[module])
                in_region |= dict.fromkeys(inside[module] if place in again else (), module)  # the innermost counts
        for place in again:  # models that checkpoint layers of theirs one by one
            in_region |= {layer: layer for layer in inside[modules[place]] if layer in apart}
        regions: dict[nn.Module, list[Mask]] = {}
        for layer, region in in_region.items():
            regions.setdefault(region, []).append(self._masks[layer])
        return tuple(tuple(masks) for masks in regions.values())
