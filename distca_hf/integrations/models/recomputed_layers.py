"""Recomputed layers: attention layers that backward runs again, by the checkpointed region that they are in.

A region holds rows of other ranks for all of its layers at the same time, once it is recomputed. Most regions are one
layer of a model. Wrappers of torch may hold several, and layers that are in no region attend once.
"""

from collections.abc import Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.integrations.models.layer_masks import layer_windows
from distca_hf.integrations.models.structure import attention_layers, transformers_model
from distca_hf.runtime.pass_layers import Regions


class RecomputedLayers:
    """Attention layers of one model that are recomputed.

    Args:
        model: a Transformers model, or a PEFT model around one.
    """

    def __init__(self, model: nn.Module) -> None:
        layers, windows = attention_layers(transformers_model(model)), dict(layer_windows(model))
        self._windows = {layer: windows[name] or 0 for name, layer in layers.items()}
        self._again: Sequence[int] = ()
        self._regions: Regions = ()

    def regions(self, modules: Sequence[nn.Module], again: Sequence[int]) -> Regions:
        """Returns windows of the attention layers in each region that attends again.

        Args:
            modules: of the model that are, or may be, checkpointed, outer ones first; the same in every call.
            again: places in this list of those that recompute attention.
        """
        if again != self._again:  # to look into all modules takes a millisecond
            self._again, self._regions = again, self._find(modules, again)
        return self._regions

    def _find(self, modules: Sequence[nn.Module], again: Sequence[int]) -> Regions:
        in_region: dict[nn.Module, nn.Module] = {}
        apart = set(self._windows)  # layers that no module checkpoints by itself
        inside = {module: [part for part in module.modules() if part in self._windows] for module in modules}
        for place, module in enumerate(modules):
            if isinstance(module, GradientCheckpointingLayer) or hasattr(module, "checkpoint_fn"):  # as a whole
                apart.difference_update(inside[module])
                in_region |= dict.fromkeys(inside[module] if place in again else (), module)  # the innermost counts
        for place in again:  # models that checkpoint layers of theirs one by one
            in_region |= {layer: layer for layer in inside[modules[place]] if layer in apart}
        regions: dict[nn.Module, list[int]] = {}
        for layer, region in in_region.items():
            regions.setdefault(region, []).append(self._windows[layer])
        return tuple(tuple(windows) for windows in regions.values())
