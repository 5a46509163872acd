"""Tiles: modules of decoder layers do a part of their work at a time, so that their inner tensors take little memory.

`mlp_tiles` and `head_tiles` say how.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from distca_hf.errors import ConfigError


# Weights with their versions, and whether they are trained.
Versions = list[tuple[torch.Tensor, int, bool]]


class TiledForward(ABC):
    """The function of a module that runs in tiles.

    Args:
        replaced: the function that the module had in place of its class's; None if it had none.
        most: most tokens, or heads, of a tile.
    """

    setting: ClassVar[str]

    def __init__(self, module: nn.Module, replaced: Callable[..., Any] | None, most: int) -> None:
        self.module, self.replaced, self.most = module, replaced, most

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""

    def check_weights(self) -> None:
        """Raises ConfigError if weights are gathered for each tile: tiles may use parts of weights, and ranks may have
        unequal numbers of tiles."""
        is_zero3 = any(hasattr(weight, "ds_id") for weight in self.module.parameters())
        if is_zero3 or any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in self.module.modules()):
            name = type(self.module).__name__
            what = "DeepSpeed ZeRO-3 gathers" if is_zero3 else f"FSDP around a part of {name} gathers"
            raise ConfigError(
                f"{self.setting}={self.most}: {what} weights for each tile; wrap whole decoder layers with FSDP, or "
                f"leave {self.setting} out"
            )

    def versions(self) -> Versions:
        """Returns all weights, with what differs once they are changed, or others are trained (another adapter)."""
        parts = [vars(part) for part in self.module.modules()]  # FSDP1 makes weights plain attributes
        weights = [weight for own in parts for weight in (*own["_parameters"].values(), own.get("weight"))]
        return [(weight, weight._version, weight.requires_grad) for weight in weights if weight is not None]

    def check_versions(self, of_forward: Versions) -> None:
        """Raises RuntimeError if weights were changed, or others are trained, since forward."""
        if any((weight._version, weight.requires_grad) != (version, trains) for weight, version, trains in of_forward):
            raise RuntimeError(
                f"weights of {type(self.module).__name__}, which runs in tiles, were changed, or others are trained, "
                f"between its forward pass and backward: change them after backward, or leave {self.setting} out"
            )


def tile(modules: Iterable[nn.Module], kind: type[TiledForward], most: int) -> None:
    """Lets modules run in tiles; call it before every pass, as others may replace their functions (Liger does)."""
    for module in modules:
        own = vars(module).get("forward")
        if not (isinstance(own, kind) and own.most == most):
            untile([module])
            setattr(module, "forward", kind(module, vars(module).get("forward"), most))  # noqa: B010


def untile(modules: Iterable[nn.Module]) -> None:
    """Restores the functions of modules that run in tiles; leaves others as they are."""
    for module in modules:
        own = vars(module).get("forward")
        if isinstance(own, TiledForward):
            del module.forward
            if own.replaced is not None:
                setattr(module, "forward", own.replaced)  # noqa: B010
