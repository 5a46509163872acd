"""Ways to save memory where a document is so long that activations of a few layers fill a GPU.

inputs on the host    what checkpointing keeps of a layer, its input, waits for backward in host memory
tiled MLPs            some tokens at a time, each tile checkpointed: no activation of an MLP has all tokens
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


# Torch rounds pinned memory up to a power of two: in pieces of one, hardly any is wasted.
PIECE_BYTES = 2**26


def keep_inputs_on_host(layers: Sequence[nn.Module]) -> None:
    """Lets checkpointed layers keep their inputs on the host; call it when checkpointing is enabled."""
    for layer in layers:
        function: Any = layer._gradient_checkpointing_func
        setattr(layer, "_gradient_checkpointing_func", functools.partial(_with_inputs_on_host, function))  # noqa: B010


def _with_inputs_on_host(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Runs a checkpointed layer. Only its inputs are saved by these hooks: inside, checkpointing has its own."""
    with saved_tensors_hooks(HostCopy, HostCopy.on_device):
        return function(*inputs, **keywords)


class HostCopy:
    """A copy of a tensor in host memory, in pieces.

    Copies run on the stream of kernels, which wait for them. That is below a hundredth of a layer with a document of
    a hundred thousand tokens.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._like, self._shape = x.new_empty(0), x.shape
        pieces = x.contiguous().flatten().split(PIECE_BYTES // x.element_size())
        self._pieces = [self._to_host(piece) for piece in pieces]

    @staticmethod
    def _to_host(piece: torch.Tensor) -> torch.Tensor:
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
        return host.copy_(piece, non_blocking=piece.is_cuda)

    def on_device(self) -> torch.Tensor:
        """Returns the tensor where it was."""
        x = self._like.new_empty(self._shape)
        pieces = x.flatten().split(PIECE_BYTES // x.element_size())
        for piece, host in zip(pieces, self._pieces, strict=True):
            piece.copy_(host, non_blocking=piece.is_cuda)
        return x


def tile_mlps(layers: Sequence[nn.Module], tile_tokens: int) -> None:
    """Lets the MLP of every layer run on so many tokens at a time.

    Raises:
        SystemExit: a layer has no `mlp`.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise SystemExit(f"{type(layer).__name__} has no mlp to run in tiles: --mlp-tokens 0 leaves it whole")
        mlp.forward = functools.partial(_in_tiles, mlp.forward, tile_tokens)


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], tile_tokens: int, x_1TD: torch.Tensor) -> torch.Tensor:
    tiles = x_1TD.split(tile_tokens, dim=1)
    if len(tiles) == 1 or not torch.is_grad_enabled():
        return torch.cat([forward(tile) for tile in tiles], dim=1)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)
