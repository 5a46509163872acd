"""Wires of a benchmark step: the product's transport, counted, and silent when asked.

Every mode exchanges through one transport, so that all of them use the same process groups and bytes are counted
alike. A silent transport sends nothing: it answers with a local copy of random numbers of the size that would have
arrived. A step's time minus that of the same step on silent wires is what its exchanges add: waiting, copies that
only they make, and how much they slow down kernels that run meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import distca_hf
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import AllToAll, Exchange, Gather, Transport


class Wires:
    """A transport around the product's, and the collectives of other modes, which have their `group`. `sent_bytes` and
    `received_bytes` are of this rank, to and from others, since `reset`."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self.rank, self.world_size, self.traffic = inner.rank, inner.world_size, inner.traffic
        self.grid = inner.grid
        self.reset()
        self._inner, self._device = inner, device
        self.group = _group(device)  # FSDP's collectives have theirs to themselves
        self._largest_bytes = 0
        self._noise: torch.Tensor | None = None

    def reset(self) -> None:
        """Counts bytes from here."""
        self.sent_bytes = self.received_bytes = 0

    def silence(self, silent: bool) -> None:
        """Stops sending from now on, or sends again. All ranks do the same, after steps that were not silent."""
        # Normal numbers in bf16 are also normal numbers when two of them are read as one of fp32.
        numbers = self._largest_bytes // 2 + 1
        self._noise = torch.randn(numbers, device=self._device, dtype=torch.bfloat16) if silent else None

    def exchange(self, asked: AllToAll) -> Exchange:
        """Starts an uneven all-to-all of rows, as `Transport` has it."""
        sent, received = (sum(counts) - counts[self.rank] for counts in (asked.send_counts, asked.receive_counts))
        arriving = (sum(asked.receive_counts), *asked.rows.shape[1:])
        row_bytes = asked.row_bytes
        if self.is_silent(sent * row_bytes, received * row_bytes, arriving[0] * row_bytes):
            return asked.arrived(self.made_up(arriving, asked.rows.dtype))
        return self._inner.exchange(asked)

    def gather(self, values: Sequence[int], where: str, scope: Scope = Scope.ROWS) -> Gather:
        """Gathers integers of all ranks, also when silent: ranks agree as ever."""
        return self._inner.gather(values, where, scope)

    def close(self) -> None:
        """Ends the product's groups and the one of the other modes."""
        self._inner.close()
        dist.destroy_process_group(self.group)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[ranks * rows, ...]`: the `[rows, ...]` of all ranks, by rank."""
        others = self.world_size - 1
        gathered = (self.world_size * len(rows), *rows.shape[1:])
        if self.is_silent(others * rows.nbytes, others * rows.nbytes, self.world_size * rows.nbytes):
            return self.made_up(gathered, rows.dtype)
        received = rows.new_empty(gathered)
        dist.all_gather_into_tensor(received, rows, group=self.group)
        return received

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[rows / ranks, ...]`: this rank's part of the sum of `[rows, ...]` over all ranks."""
        others, part_bytes = self.world_size - 1, rows.nbytes // self.world_size
        part = (len(rows) // self.world_size, *rows.shape[1:])
        if self.is_silent(others * part_bytes, others * part_bytes, part_bytes):
            return self.made_up(part, rows.dtype)
        summed = rows.new_empty(part)
        dist.reduce_scatter_tensor(summed, rows, group=self.group)
        return summed

    def is_silent(self, sent_bytes: int, received_bytes: int, arriving_bytes: int) -> bool:
        """Counts bytes to and from others, and says whether rows are made up; own ones may be among those arriving."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self._largest_bytes = max(self._largest_bytes, arriving_bytes)
        return self._noise is not None

    def made_up(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a copy of random numbers of this shape: operators may not hand out the same memory twice. Integers
        are 0: they may be tokens and positions."""
        assert self._noise is not None
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._noise.view(torch.uint8)[:num_bytes].view(dtype).view(shape).clone()


def _group(device: torch.device) -> dist.ProcessGroup:
    """Opens a group of all ranks. On GPUs its exchanges overtake kernels, as those of the product do: a ring of keys
    would overlap with nothing otherwise."""
    if device.type == "cpu":
        return dist.new_group()
    return dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))


class WiredPlugin(distca_hf.DistCAPlugin):
    """The product's plugin over given wires: every plugin of the benchmark shares one set of process groups."""

    def __init__(self, wires: Wires, **settings: Any) -> None:
        super().__init__(**settings)
        self._wires = wires

    def transport(self, device: torch.device) -> Transport:
        """Returns the given wires."""
        return self._wires
