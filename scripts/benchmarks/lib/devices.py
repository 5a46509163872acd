"""Numbers of all ranks, and what is asked of their devices."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distca_hf import flops


def largest(numbers: Sequence[float], device: torch.device) -> list[float]:
    """Returns each number of the rank where it is the largest. A collective call."""
    of_all = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    return of_all.tolist()


def of_all_ranks(own: torch.Tensor) -> list[Any]:
    """Returns the values of every rank's tensor. A collective call."""
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [each.tolist() for each in ranks]


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak of bf16 matrix products per second, by the name of the device; None if it is not known."""
    return flops.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Waits until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
