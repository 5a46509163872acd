"""Tiles: modules of decoder layers do a part of their work at a time, so that their inner tensors take little memory.

MLPs run on some tokens at a time; for attention's heads see `head_tiles`.

    forward     input ──┬─ tile ── MLP ──┬─▶ output              backward    each tile forward again, then backward
                        ├─ tile ── MLP ──┤
                        └─ tile ── MLP ──┘

Only the input is kept. It is saved before the MLP runs. Recomputation of a checkpointed layer ends with the last
tensor that the layer saved, so it does not run the MLP again if nothing after it is saved. Then tiles cost no time.

Gradients of weights are summed over tiles in fp32. Tiles are checkpointed one by one, and run once more, if a compiler
traces the MLP, or if gradients of something else must flow: weights that FSDP1 flattened, hooks of weights, tensors
that are not weights of the MLP.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.structure import text_decoder
from distca_hf.kernels.interface import accumulation_dtype
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Weights with their versions, and whether they are trained.
Versions = list[tuple[torch.Tensor, int, bool]]
# Names that Transformers gives to the MLP of a decoder layer.
NAMES = ("mlp", "feed_forward")


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


def tiled_mlps(model: PreTrainedModel, tile_tokens: int) -> list[nn.Module]:
    """Returns the MLPs of a model that can run in tiles. Raises ConfigError if there are none."""
    layers = [part for part in text_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    mlps = [mlp for layer in layers if (mlp := mlp_of(layer)) is not None]
    if not mlps:
        raise ConfigError(
            f"mlp_tokens={tile_tokens}: no layer of {type(model).__name__} has an MLP that runs on some tokens at a "
            f"time (a module called {' or '.join(NAMES)}, without experts): leave mlp_tokens out"
        )
    log.info("MLPs of %d of %d layers run on %d tokens at a time", len(mlps), len(layers), tile_tokens)
    return mlps


def mlp_of(layer: nn.Module) -> nn.Module | None:
    """Returns the MLP of a decoder layer that can run in tiles; None if there is none.

    Experts cannot: what their routers compute, and losses of them, are of all tokens.
    """
    for name in NAMES:
        mlp = getattr(layer, name, None)
        if isinstance(mlp, nn.Module) and not any("expert" in part for part, _ in mlp.named_modules()):
            return mlp
    return None


class TiledMlp(TiledForward):
    """The function of an MLP that runs in tiles of at most `most` tokens."""

    setting = "mlp_tokens"
    _needs_graph = False

    def run(self, x_1TD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = (
            type(self.module).forward(self.module, x_1TD) if self.replaced is None else self.replaced(x_1TD)
        )
        return output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the MLP on tokens `[..., hidden size]`."""
        x_1TD = x.reshape(1, -1, x.shape[-1])
        tiles = x_1TD.split(self.most, dim=1)
        if len(tiles) == 1:
            return self.run(x)
        self.check_weights()
        if not torch.is_grad_enabled():
            output = torch.cat([self.run(one) for one in tiles], dim=1)
        else:
            output = self._with_gradients(x_1TD)
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def _with_gradients(self, x_1TD: torch.Tensor) -> torch.Tensor:
        if x_1TD.requires_grad and not torch.compiler.is_compiling():
            weights = [weight for weight in self.module.parameters() if weight.requires_grad]
            x_1TD = _Kept.apply(x_1TD)
            try:
                if not (self._needs_graph or any(weight._backward_hooks for weight in weights)):
                    output: torch.Tensor = _Tiles.apply(x_1TD, x_1TD.grad_fn, self, *weights)
                    return output
            except _NeedsGraphError:
                self._needs_graph = True
        tiles = x_1TD.split(self.most, dim=1)
        return torch.cat([checkpoint(self.run, one, use_reentrant=False) for one in tiles], dim=1)


def _number_of(number: int, x_1TD: torch.Tensor) -> int:
    """Returns the number of a tile, which is kept in place of the tile."""
    return number


class _NeedsGraphError(Exception):
    """Gradients flow from a tile to something that is not a trained weight of the MLP."""


class _Kept(torch.autograd.Function):
    """Saves the input of an MLP before the MLP runs."""

    @staticmethod
    def forward(ctx: Any, x_1TD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_1TD)
        return x_1TD.view_as(x_1TD)

    @staticmethod
    def backward(ctx: Any, dx_1TD: torch.Tensor) -> torch.Tensor:
        return dx_1TD


class _Begin(torch.autograd.Function):
    """Begins the graph of a tile, without keeping the tile as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x_1TD: torch.Tensor) -> torch.Tensor:
        return x_1TD.data  # torch multiplies views in another way, and what is recomputed is not a view

    @staticmethod
    def backward(ctx: Any, dx_1TD: torch.Tensor) -> tuple[None, None]:
        return None, None  # not reached: gradients are asked for at the beginning of the tile


class _Tiles(torch.autograd.Function):
    """Runs an MLP in tiles, forward and backward.

    Each tile has a checkpointed graph, which ends recomputation before the last matrix product, and repeats random
    numbers and autocast. What it saves, its input, is taken from the whole input when it is needed.
    """

    @staticmethod
    def forward(ctx: Any, x_1TD: torch.Tensor, kept: Any, mlp: TiledMlp, *weights: torch.Tensor) -> torch.Tensor:
        ctx.kept, ctx.mlp, ctx.weights = kept, mlp, weights
        ctx.versions = mlp.versions()
        ctx.tiles, ctx.graphs = [], []
        outputs = []
        for number, x in enumerate(x_1TD.split(mlp.most, dim=1)):
            with torch.enable_grad(), saved_tensors_hooks(partial(_number_of, number), ctx.tiles.__getitem__):
                begin = _Begin.apply(torch.empty(0, requires_grad=True), x)
                y = checkpoint(mlp.run, begin, use_reentrant=False)
            end, beginning = get_gradient_edge(y), get_gradient_edge(begin)
            if number == 0 and _reaches_others(end.node, beginning.node, weights):
                raise _NeedsGraphError
            ctx.graphs.append((end, beginning))
            outputs.append(y.detach())
        return torch.cat(outputs, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_1TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.mlp.check_versions(ctx.versions)
        (x_1TD,) = ctx.kept.saved_tensors
        dx_1TD = torch.empty_like(x_1TD)
        sums: list[torch.Tensor | None] = [None] * len(ctx.weights)
        tile_tokens = ctx.mlp.most
        ctx.tiles.extend(x_1TD.split(tile_tokens, dim=1))
        of_tiles = zip(ctx.graphs, *(each.split(tile_tokens, dim=1) for each in (dy_1TD, dx_1TD)), strict=True)
        for (end, begin), dy, dx in of_tiles:
            # Graphs of tiles hold no tensors: they go with the graph of the layer.
            asked = begin, *ctx.weights
            of_x, *of_weights = torch.autograd.grad(end, asked, dy, retain_graph=True, allow_unused=True)
            dx.copy_(of_x)
            for place, gradient in enumerate(of_weights):
                if gradient is not None:
                    total = sums[place]
                    sums[place] = (
                        gradient.to(accumulation_dtype(gradient.dtype)) if total is None else total.add_(gradient)
                    )
        ctx.tiles.clear()
        gradients = (
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)
        )
        return dx_1TD, None, None, *gradients


def _reaches_others(end: Any, begin: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Returns whether gradients flow from the end of a tile to anything but its beginning and trained weights."""
    known, seen, waiting = {id(weight) for weight in weights}, {begin}, [end]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if variable is not None and id(variable) not in known:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
