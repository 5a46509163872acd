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

from distca_hf.integrations.checkpointing import HostCopy


def keep_inputs_on_host(layers: Sequence[nn.Module]) -> None:
    """Lets checkpointed layers keep their inputs on the host; call it when checkpointing is enabled."""
    for layer in layers:
        function: Any = layer._gradient_checkpointing_func
        # Its keywords stay in sight: an enabled model lets those alone that have a `context_fn`, and replaces others.
        keywords = getattr(function, "keywords", {})
        on_host = functools.partial(_with_inputs_on_host, function, **keywords)
        setattr(layer, "_gradient_checkpointing_func", on_host)  # noqa: B010


def _with_inputs_on_host(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Runs a checkpointed layer. Only its inputs are saved by these hooks: inside, checkpointing has its own.

    Copies run on the stream of kernels, which wait for them: below a hundredth of a layer with a document of a hundred
    thousand tokens.
    """
    with saved_tensors_hooks(HostCopy, HostCopy.on_device):
        return function(*inputs, **keywords)


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
