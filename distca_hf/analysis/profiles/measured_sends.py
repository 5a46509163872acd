"""Sends of one size, which `MeasuringRanks` times: exchanges of the product, collectives beside kernels, rings."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from distca_hf.comm.transport import AllToAll, Transport


# Bytes of a row that is exchanged; keys and values of one token of an 8B Llama have four times as many.
ROW_BYTES = 1024
# Numbers of each rank's part of a collective are a multiple of this. Where parts begin at multiples of 16 bytes, as
# FSDP's do if ranks divide all sizes, NCCL copies 16 bytes at once. Other parts took 1.5 to 2.2 times as long.
ALIGNED_NUMBERS = 64


class Sends:
    """Something that is sent beside kernels, again and again."""

    def start(self) -> None:
        """Starts to send."""
        raise NotImplementedError

    def wait(self) -> None:
        """Lets the device wait until it has arrived."""
        raise NotImplementedError

    def run(self) -> None:
        """Sends, and waits."""
        self.start()
        self.wait()


class Exchanges(Sends):
    """Exchanges of one size.

    Args:
        transport: the product's.
        device: of this rank.
        num_bytes: that this rank sends and receives, if it does.
        to, by: ranks that it sends to, and receives from, the same to and from each.
    """

    def __init__(
        self, transport: Transport, device: torch.device, num_bytes: int, to: Sequence[int], by: Sequence[int]
    ) -> None:
        self._transport = transport
        self._sends, self._receives = (_rows_of(num_bytes, peers, transport.world_size) for peers in (to, by))
        rows, into = (
            torch.zeros(sum(counts), ROW_BYTES // 2, device=device, dtype=torch.bfloat16)
            for counts in (self._sends, self._receives)
        )
        self._rows, self._into = rows, into
        self._exchange = self._transport.exchange(self._asked())

    def _asked(self) -> AllToAll:
        return AllToAll(self._rows, self._sends, self._receives, "measuring an exchange", self._into)

    def start(self) -> None:
        self._exchange = self._transport.exchange(self._asked())

    def wait(self) -> None:
        self._exchange.wait()


class OnOwnStream(Sends):
    """A collective on a stream of high priority, as FSDP gathers weights; on CPUs it is not beside anything."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self._run, self._stream = run, torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start(self) -> None:
        if self._stream is None:
            self._run()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run()

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def ring_sends(num_bytes: int, to: int, by: int, device: torch.device) -> Callable[[], object]:
    """Returns a call that sends keys and values of so many bytes to a rank, and receives as many from another.

    They go over the default group, as in published rings. With NCCL such pairs of calls are faster than an all-to-all
    that has bytes for one rank alone.
    """
    own, others = (
        [torch.zeros(part_elements(num_bytes // 2, 2), device=device, dtype=torch.bfloat16) for _ in "kv"]
        for _ in range(2)
    )

    def pass_on() -> None:
        sends = [dist.P2POp(dist.isend, numbers, to) for numbers in own]
        receives = [dist.P2POp(dist.irecv, numbers, by) for numbers in others]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()

    return pass_on


def part_elements(num_bytes: int, ranks: int) -> int:
    """Returns the elements of a rank's part of a bf16 tensor, of which the others' parts have about so many bytes."""
    return ALIGNED_NUMBERS * max(1, round(num_bytes / 2 / max(1, ranks - 1) / ALIGNED_NUMBERS))


def _rows_of(num_bytes: int, peers: Sequence[int], num_ranks: int) -> list[int]:
    """Returns `[ranks]` rows, of so many bytes together, for each peer as many."""
    each = max(1, round(num_bytes / max(1, len(peers)) / ROW_BYTES))
    return [each if rank in peers else 0 for rank in range(num_ranks)]
