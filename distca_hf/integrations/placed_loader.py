"""Placed loader of a model: what the loader has to know of the model is read from it."""

from typing import Any

import torch

from distca_hf.batches.loader import PlacedLoader
from distca_hf.comm.groups import default_device
from distca_hf.integrations.models.attention_shape import head_groups_of
from distca_hf.parallel_context import ParallelContext


def placed_loader(
    context: ParallelContext,
    dataset: Any,
    seed: int = 0,
    shuffle: bool = True,
    device: torch.device | str | None = None,
    prefetch: int | None = None,
    model: torch.nn.Module | None = None,
    micro_steps: int = 1,
    unlearnt_token: int | None = None,
) -> PlacedLoader:
    """Returns a loader as `DistCAPlugin.dataloader` describes it. A collective call: every rank makes it."""
    target = default_device() if device is None else torch.device(device)
    head_groups = 1 if model is None else head_groups_of(model)
    transport = context.transport(target)
    return PlacedLoader(
        dataset, context, transport, target, seed, shuffle, prefetch, head_groups, micro_steps, unlearnt_token
    )
