"""Tiles: MLPs of decoder layers run on some tokens at a time, so that what is inside them takes little memory.

    forward     input ──┬─ tile ── MLP ──┬─▶ output              backward    each tile forward again, then backward
                        ├─ tile ── MLP ──┤
                        └─ tile ── MLP ──┘

Only the input is kept. It is saved before the MLP runs. Recomputation of a checkpointed layer ends with the last
tensor that the layer saved, so it does not run the MLP again if nothing after it is saved. Then tiles cost no time.

Gradients of weights are summed over tiles in fp32. If weights are divided by ZeRO-3, which no function of autograd can
return gradients for, or if a compiler traces the MLP, tiles are checkpointed one by one. Then they run once more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distca_hf.errors import ConfigError
from distca_hf.integrations.models.structure import text_decoder
from distca_hf.kernels.interface import accumulation_dtype


# Names that Transformers gives to the MLP of a decoder layer.
NAMES = ("mlp", "feed_forward")
Forward = Callable[..., torch.Tensor]


class TiledMlps:
    """Lets the MLPs of one model run in tiles, and restores them.

    Args:
        model: a Transformers model.
        tile_tokens: of a tile at most.

    Raises:
        ConfigError: no layer has an MLP that can be divided by tokens.
    """

    def __init__(self, model: PreTrainedModel, tile_tokens: int) -> None:
        self._tile_tokens = tile_tokens
        layers = (part for part in text_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer))
        self._mlps = [mlp for layer in layers if (mlp := _mlp_of(layer)) is not None]
        self._tiled: dict[nn.Module, tuple[Forward, Forward | None]] = {}
        if not self._mlps:
            raise ConfigError(
                f"mlp_tokens={tile_tokens}: no layer of {type(model).__name__} has an MLP that runs on some tokens at "
                f"a time (a module {' or '.join(NAMES)} without experts): leave mlp_tokens out"
            )

    def prepare(self) -> None:
        """Tiles the MLPs before a pass: others may have replaced their functions since the last one (Liger does)."""
        for mlp in self._mlps:
            own = vars(mlp).get("forward")
            tiled = self._tiled.get(mlp)
            if tiled is None or tiled[0] is not own:
                forward = partial(_forward, mlp, own or partial(type(mlp).forward, mlp), self._tile_tokens)
                self._tiled[mlp] = forward, own
                setattr(mlp, "forward", forward)  # noqa: B010

    def leave(self) -> None:
        """Restores the MLPs' functions, unless others have replaced them since."""
        for mlp, (forward, own) in self._tiled.items():
            if vars(mlp).get("forward") is forward:
                if own is None:
                    del mlp.forward
                else:
                    setattr(mlp, "forward", own)  # noqa: B010
        self._tiled.clear()


def _mlp_of(layer: nn.Module) -> nn.Module | None:
    for name in NAMES:
        mlp = getattr(layer, name, None)
        if isinstance(mlp, nn.Module) and not any("expert" in part for part, _ in mlp.named_modules()):
            return mlp
    return None


def _forward(mlp: nn.Module, forward: Forward, tile_tokens: int, x_BTD: torch.Tensor) -> torch.Tensor:
    rows, row_tokens, _ = x_BTD.shape
    tile_tokens = max(1, tile_tokens // rows)
    if row_tokens <= tile_tokens:
        return forward(x_BTD)
    tiles = x_BTD.split(tile_tokens, dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([forward(tile) for tile in tiles], dim=1)
    is_divided = any(hasattr(weight, "ds_id") for weight in mlp.parameters())
    if torch.compiler.is_compiling() or is_divided or not x_BTD.requires_grad:
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)
    kept: torch.Tensor = _Kept.apply(x_BTD)
    output: torch.Tensor = _Tiles.apply(kept, kept.grad_fn, forward, tile_tokens, *_weights(mlp))
    return output


def _weights(mlp: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in mlp.parameters() if weight.requires_grad]


def _number(number: int, x_BTD: torch.Tensor) -> int:
    """Keeps the number of a tile in place of the tile."""
    return number


class _Kept(torch.autograd.Function):
    """Saves the input of an MLP before the MLP runs."""

    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_BTD)
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, dx_BTD: torch.Tensor) -> torch.Tensor:
        return dx_BTD


class _Begin(torch.autograd.Function):
    """Begins the graph of a tile, without keeping the tile as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.data  # torch multiplies views in another way, and what is recomputed is not a view

    @staticmethod
    def backward(ctx: Any, dx_BTD: torch.Tensor) -> tuple[None, None]:
        return None, None  # not reached: gradients are asked for at the beginning of the tile


class _Tiles(torch.autograd.Function):
    """Runs an MLP in tiles, forward and backward.

    Each tile has a checkpointed graph, which ends recomputation before the last matrix product, and repeats random
    numbers and autocast. What it saves, its input, is taken from the whole input when it is needed.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: torch.Tensor, kept: Any, forward: Forward, tile_tokens: int, *weights: Any
    ) -> torch.Tensor:
        ctx.kept, ctx.tile_tokens, ctx.weights = kept, tile_tokens, weights
        ctx.tiles, ctx.graphs = [], []
        outputs = []
        for number, x in enumerate(x_BTD.split(tile_tokens, dim=1)):
            with torch.enable_grad(), saved_tensors_hooks(partial(_number, number), ctx.tiles.__getitem__):
                begin = _Begin.apply(torch.empty(0, requires_grad=True), x)
                y = checkpoint(forward, begin, use_reentrant=False)
            ctx.graphs.append((get_gradient_edge(y), get_gradient_edge(begin)))
            outputs.append(y.detach())
        return torch.cat(outputs, dim=1)

    @staticmethod
    def backward(ctx: Any, dy_BTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BTD,) = ctx.kept.saved_tensors
        weights, dx_BTD = ctx.weights, torch.empty_like(x_BTD)
        sums = [torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) for weight in weights]
        ctx.tiles.extend(x_BTD.split(ctx.tile_tokens, dim=1))
        of_tiles = zip(ctx.graphs, *(each.split(ctx.tile_tokens, dim=1) for each in (dy_BTD, dx_BTD)), strict=True)
        for (end, begin), dy, dx in of_tiles:
            of_x, *of_weights = torch.autograd.grad(end, (begin, *weights), dy, allow_unused=True)
            dx.copy_(of_x)
            for total, gradient in zip(sums, of_weights, strict=True):
                if gradient is not None:
                    total += gradient
        ctx.tiles.clear()
        gradients = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return dx_BTD, None, None, None, *gradients
