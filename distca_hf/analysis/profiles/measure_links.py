"""Times of exchanges and collectives between the ranks of a job, for `distca profile`.

Exchanges go through the product's own transport, on its stream of high priority. FSDP's collectives and a ring's sends
go over the default group, as in FSDP and published rings. With several nodes, all are measured among the ranks of one
node, and to ranks of others.

All functions are collective calls: every rank makes the same ones in the same order. Times are of the slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from distca_hf.comm.groups import open_transport
from distca_hf.comm.transport import AllToAll, Transport
from distca_hf.errors import ConfigError


# Bytes of an exchanged row; keys and values of one token of an 8B Llama have four times as many.
ROW_BYTES = 1024
# Each rank's part of a collective has a multiple of this many numbers. If parts begin at multiples of 16 bytes, as
# FSDP's do if ranks divide all sizes, NCCL copies 16 bytes at once. Other parts took 1.5 to 2.2 times as long.
ALIGNED_NUMBERS = 64


# Starts an exchange or a collective, and returns a function that waits for its end.
Start = Callable[[], Callable[[], object]]


def exchanges_of(
    transport: Transport, device: torch.device, num_bytes: int, to: Sequence[int], by: Sequence[int]
) -> Start:
    """Prepares exchanges of this many bytes through the product's transport, to be made any number of times. `to`,
    `by`: ranks that this one sends to, and receives from; equally many bytes to and from each."""
    sends, receives = (_rows_of(num_bytes, peers, transport.world_size) for peers in (to, by))
    rows, into = (
        torch.zeros(sum(counts), ROW_BYTES // 2, device=device, dtype=torch.bfloat16) for counts in (sends, receives)
    )
    asked = AllToAll(rows, sends, receives, "measuring an exchange", into)
    return lambda: transport.exchange(asked).wait


def on_own_stream(run: Callable[[], object], device: torch.device) -> Start:
    """Prepares a collective on a stream of high priority, as FSDP gathers weights; on CPUs nothing runs meanwhile."""
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start() -> Callable[[], object]:
        if stream is None:
            run()
            return lambda: None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    return start


def part_elements(num_bytes: int, ranks: int) -> int:
    """Returns the elements of a rank's part of a bf16 tensor, of which the others' parts have about this many
    bytes."""
    return ALIGNED_NUMBERS * max(1, round(num_bytes / 2 / max(1, ranks - 1) / ALIGNED_NUMBERS))


def _rows_of(num_bytes: int, peers: Sequence[int], num_ranks: int) -> list[int]:
    """Returns `[ranks]` rows, of this many bytes together, for each peer as many."""
    each = max(1, round(num_bytes / max(1, len(peers)) / ROW_BYTES))
    return [each if rank in peers else 0 for rank in range(num_ranks)]


# Time within which all ranks must come to an exchange: one of them may still compile a kernel.
PATIENCE_SECONDS = 600.0
# Approximate bytes of a series of calls, and its least and most calls.
SERIES_BYTES, FEWEST_CALLS, MOST_CALLS = 1 << 29, 3, 40
SERIES = 3
# Unit of times that ranks show each other: only integers go over the wire.
TICKS_PER_SECOND = 10**12
# Newer versions of torch have other names for these two, and warn about the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class MeasuringRanks:
    """The ranks of a job, and the wires between them. `transport`: the product's, over all ranks. `node_group`: for
    collectives among the ranks of this rank's node; None stands for all ranks."""

    transport: Transport
    device: torch.device
    ranks_per_node: int
    node_group: dist.ProcessGroup | None = None

    @classmethod
    def open(cls, local_rank: int, world_size: int, ranks_per_node: int, use_cpu: bool) -> "MeasuringRanks":
        """Opens process groups over all launched ranks; a single rank needs none. Raises ConfigError if nodes have
        unequal numbers of ranks, or a GPU is missing."""
        device = torch.device("cpu") if use_cpu else torch.device("cuda", local_rank)
        if not use_cpu:
            if local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"process {local_rank} of this node has no GPU, because there are {torch.cuda.device_count()}; "
                    "start as many processes as there are GPUs, or give --cpu"
                )
            torch.cuda.set_device(device)
        if world_size > 1:
            dist.init_process_group("gloo" if use_cpu else "nccl", timeout=timedelta(seconds=PATIENCE_SECONDS))
        opened = cls(open_transport(device, PATIENCE_SECONDS), device, ranks_per_node)
        opened._check_nodes(local_rank)
        if not opened.has_several_nodes:
            return opened
        nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node)]
        return replace(opened, node_group=[dist.new_group(ranks) for ranks in nodes][opened.rank // ranks_per_node])

    def _check_nodes(self, local_rank: int) -> None:
        """Checks, the same on all ranks, that nodes have equally many ranks; closes all groups if they have not.
        `local_rank`: number of this rank on its node."""
        every = [number for (number,) in self.transport.gather([local_rank], "counting the ranks of nodes").wait()]
        if every != [rank % self.ranks_per_node for rank in range(self.num_ranks)]:
            self.close()
            firsts = [rank for rank, number in enumerate(every) if number == 0]
            counts = [following - first for first, following in pairwise([*firsts, self.num_ranks])]
            raise ConfigError(
                f"{self.num_ranks} ranks, on each node {', '.join(map(str, counts))}: start equally many on each"
            )

    def close(self) -> None:
        self.transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def num_ranks(self) -> int:
        return self.transport.world_size

    @property
    def has_several_nodes(self) -> bool:
        return self.num_ranks > self.ranks_per_node

    def gathered(self, seconds: Sequence[float], where: str) -> list[list[float]]:
        """Returns the times of every rank; all must give equally many."""
        ticks = [round(value * TICKS_PER_SECOND) for value in seconds]
        every = self.transport.gather(ticks, where).wait()
        return [[value / TICKS_PER_SECOND for value in ranks] for ranks in every]

    def slowest(self, run: Callable[[], object], calls: int, where: str) -> float:
        """Times a call on all ranks at once: the median of some series, each on its slowest rank. A series is timed
        from an idle device until it is idle again."""
        run()
        series = []
        for _ in range(SERIES):
            self.gathered([0.0], where)  # all ranks begin together
            _synchronize(self.device)
            began = time.perf_counter()
            for _ in range(calls):
                run()
            _synchronize(self.device)
            series.append((time.perf_counter() - began) / calls)
        return statistics.median(max(times) for times in zip(*self.gathered(series, where), strict=True))

    def peers(self, between_nodes: bool) -> list[int]:
        """Returns the ranks that this one sends to: the others of its node, or all of other nodes."""
        node = self.rank // self.ranks_per_node
        return [
            rank
            for rank in range(self.num_ranks)
            if rank != self.rank and (rank // self.ranks_per_node != node) == between_nodes
        ]

    def exchange(self, num_bytes: int, between_nodes: bool) -> Start:
        """Prepares exchanges in which every rank sends and receives this many bytes, the same to each peer."""
        peers = self.peers(between_nodes)
        return exchanges_of(self.transport, self.device, num_bytes, peers, peers)

    def to_next(self, num_bytes: int, between_nodes: bool) -> Callable[[], object]:
        """Prepares what a ring does: every rank sends keys and values of this many bytes to the next one, of its node
        or on the next node, and receives as many from the one before. They go over the default group, as in published
        rings: with NCCL these pairs of calls are faster than an all-to-all with bytes for only one rank."""
        place, places = self._place(between_nodes)
        before, after = (self._rank_at((place + step) % places, between_nodes) for step in (-1, 1))
        own, others = (
            [torch.zeros(part_elements(num_bytes // 2, 2), device=self.device, dtype=torch.bfloat16) for _ in "kv"]
            for _ in range(2)
        )

        def pass_on() -> None:
            sends = [dist.P2POp(dist.isend, numbers, after) for numbers in own]
            receives = [dist.P2POp(dist.irecv, numbers, before) for numbers in others]
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()

        return pass_on

    def one_way(self, num_bytes: int, between_nodes: bool) -> Start:
        """Prepares exchanges in which every second rank sends this many bytes, the same to each of the others, which
        receive as many; if ranks are odd in number, the last one does nothing."""
        place, places = self._place(between_nodes)
        halves = [[self._rank_at(at, between_nodes) for at in range(first, places // 2 * 2, 2)] for first in (0, 1)]
        is_odd_one = place >= places // 2 * 2
        to = [] if is_odd_one or place % 2 else halves[1]
        by = halves[0] if place % 2 and not is_odd_one else []
        return exchanges_of(self.transport, self.device, num_bytes, to, by)

    def exchange_seconds(self, exchanges: Start, num_bytes: int) -> float:
        """Times exchanges of this many bytes through the product's transport."""
        calls = max(FEWEST_CALLS, min(MOST_CALLS, SERIES_BYTES // max(1, num_bytes)))  # the same on all ranks
        return self.slowest(lambda: exchanges()(), calls, "measuring an exchange")

    def _place(self, between_nodes: bool) -> tuple[int, int]:
        """Returns the place of this rank in its node and the ranks of a node, or of its node among the nodes and the
        number of these."""
        node, place = divmod(self.rank, self.ranks_per_node)
        return (node, self.num_ranks // self.ranks_per_node) if between_nodes else (place, self.ranks_per_node)

    def _rank_at(self, place: int, between_nodes: bool) -> int:
        """Returns the rank at a place in this rank's node, or at its own place in another node."""
        node, own = divmod(self.rank, self.ranks_per_node)
        return place * self.ranks_per_node + own if between_nodes else node * self.ranks_per_node + place

    def all_gather(self, num_bytes: int, between_nodes: bool) -> Callable[[], object]:
        """Prepares all-gathers in which every rank receives this many bytes from others."""
        part, whole, group = self._collective(num_bytes, between_nodes)
        return lambda: ALL_GATHER(whole, part, group=group)

    def reduce_scatter(self, num_bytes: int, between_nodes: bool) -> Callable[[], object]:
        """Prepares reduce-scatters in which every rank sends this many bytes to others."""
        part, whole, group = self._collective(num_bytes, between_nodes)
        return lambda: REDUCE_SCATTER(part, whole, group=group)

    def _collective(
        self, num_bytes: int, between_nodes: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup | None]:
        """Returns a rank's part, room for the parts of all ranks, and their group, for collectives in which a rank
        receives or sends this many bytes."""
        is_whole = between_nodes or not self.has_several_nodes
        group, ranks = (None, self.num_ranks) if is_whole else (self.node_group, self.ranks_per_node)
        part = torch.zeros(part_elements(num_bytes, ranks), device=self.device, dtype=torch.bfloat16)
        return part, part.new_zeros(part.numel() * ranks), group

    def delay_of(self, kernels: Callable[[], object], send: Start, send_seconds: float) -> float:
        """Returns the seconds by which a second of sending delays kernels that are launched meanwhile. `send_seconds`:
        of sending without kernels."""
        kernel_seconds = self.slowest(kernels, FEWEST_CALLS, "measuring kernels")

        def both() -> None:
            wait = send()
            kernels()
            wait()

        together = self.slowest(both, FEWEST_CALLS, "measuring kernels during an exchange")
        return max(0.0, together - max(kernel_seconds, send_seconds)) / min(kernel_seconds, send_seconds)
