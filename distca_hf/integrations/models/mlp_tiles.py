"""Tiles: MLPs of decoder layers run on some tokens at a time, so that what is inside them takes little memory.

    forward     input ──┬─ tile ── MLP ──┬─▶ output              backward    each tile forward again, then backward
                        ├─ tile ── MLP ──┤
                        └─ tile ── MLP ──┘

Only the input is kept. It is saved before the MLP runs. Recomputation of a checkpointed layer ends with the last
tensor that the layer saved, so it does not run the MLP again if nothing after it is saved. Then tiles cost no time.

Gradients of weights are summed over tiles in fp32. Tiles are checkpointed one by one instead where a function of
autograd cannot take the weights' gradients (ZeRO-3 divides weights), or repeat random numbers (dropout), or be traced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
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
    if torch.compiler.is_compiling() or not x_BTD.requires_grad or _needs_graph(mlp):
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)
    kept: torch.Tensor = _Kept.apply(x_BTD)
    output: torch.Tensor = _Tiles.apply(kept, kept.grad_fn, forward, tile_tokens, mlp, *_weights(mlp))
    return output


def _needs_graph(mlp: nn.Module) -> bool:
    """Returns whether tiles need a graph: weights are divided by ZeRO-3, or there is dropout."""
    has_dropout = any(isinstance(part, nn.Dropout) and part.p and part.training for part in mlp.modules())
    return has_dropout or any(hasattr(weight, "ds_id") for weight in mlp.parameters())


def _weights(mlp: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in mlp.parameters() if weight.requires_grad]


class _Kept(torch.autograd.Function):
    """Saves the input of an MLP before the MLP runs."""

    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_BTD)
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, dx_BTD: torch.Tensor) -> torch.Tensor:
        return dx_BTD


class _Tiles(torch.autograd.Function):
    """Runs an MLP in tiles, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: torch.Tensor, kept: Any, forward: Forward, tile_tokens: int, mlp: nn.Module, *weights: Any
    ) -> torch.Tensor:
        ctx.kept, ctx.forward, ctx.tile_tokens, ctx.mlp = kept, forward, tile_tokens, mlp
        device = x_BTD.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return torch.cat([forward(tile) for tile in x_BTD.split(tile_tokens, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, dy_BTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BTD,) = ctx.kept.saved_tensors
        weights = _weights(ctx.mlp)
        sums = [torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) for weight in weights]
        dx_BTD = torch.empty_like(x_BTD)
        device, dtype, enabled = ctx.autocast
        for x, dy, dx in zip(*(each.split(ctx.tile_tokens, dim=1) for each in (x_BTD, dy_BTD, dx_BTD)), strict=True):
            x = x.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                y = ctx.forward(x)
            of_x, *of_weights = torch.autograd.grad(y, (x, *weights), dy, allow_unused=True)
            dx.copy_(of_x)
            _add(sums, of_weights)
        gradients = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return dx_BTD, None, None, None, None, *gradients


def _add(sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total += gradient
