"""Wires of a benchmark step: the product's transport, counted.

Every mode exchanges through one transport, so that all of them use the same process groups and bytes are counted
alike. Further below: numbers of all ranks, and what is asked of their devices.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import distca_hf
from distca_hf import flops
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Transport


class Wires:
    """A transport around the product's, and the collectives of other modes, which have their `group`. `sent_bytes` and
    `received_bytes` are of this rank, to and from others, since `reset`."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self.rank, self.world_size, self.traffic = inner.rank, inner.world_size, inner.traffic
        self.grid = inner.grid
        self.reset()
        self._inner = inner
        # FSDP's collectives have theirs to themselves. On GPUs exchanges of this group overtake kernels, as those of
        # the product do: a ring of keys would overlap with nothing otherwise.
        urgent = None if device.type == "cpu" else dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self.group = dist.new_group(pg_options=urgent)

    def reset(self) -> None:
        """Counts bytes from here."""
        self.sent_bytes = self.received_bytes = 0
        self._before_bytes = self.traffic.bytes_sent

    @property
    def exchanged_bytes(self) -> int:
        """Returns the bytes that this rank sent or received, whichever is more; to attention servers, too."""
        return max(self.sent_bytes, self.received_bytes, self.traffic.bytes_sent - self._before_bytes)

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an uneven all-to-all of rows, as `Transport` has it."""
        sent, received = (sum(counts) - counts[self.rank] for counts in (asked.send_counts, asked.receive_counts))
        self.count(sent * asked.row_bytes, received * asked.row_bytes)
        return self._inner.exchange(asked)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        """Gathers integers of all ranks; they are not counted."""
        return self._inner.gather(values, where, scope)

    def close(self) -> None:
        """Ends the product's groups and the one of the other modes."""
        self._inner.close()
        dist.destroy_process_group(self.group)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[ranks * rows, ...]`: the `[rows, ...]` of all ranks, by rank."""
        others_bytes = (self.world_size - 1) * rows.nbytes
        self.count(others_bytes, others_bytes)
        received = rows.new_empty((self.world_size * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(received, rows, group=self.group)
        return received

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[rows / ranks, ...]`: this rank's part of the sum of `[rows, ...]` over all ranks."""
        others_bytes = rows.nbytes - rows.nbytes // self.world_size
        self.count(others_bytes, others_bytes)
        summed = rows.new_empty((len(rows) // self.world_size, *rows.shape[1:]))
        dist.reduce_scatter_tensor(summed, rows, group=self.group)
        return summed

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Adds bytes to and from others."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes


class WiredPlugin(distca_hf.DistCAPlugin):
    """The product's plugin over given wires: every plugin of the benchmark shares one set of process groups."""

    def __init__(self, wires: Wires, **settings: Any) -> None:
        super().__init__(**settings)
        self._wires = wires

    def transport(self, device: torch.device) -> Transport:
        """Returns the given wires."""
        return self._wires


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


def free_memory(device: torch.device) -> int:
    """Lets go of what a training before has left; returns the bytes that this rank holds all the same."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)
