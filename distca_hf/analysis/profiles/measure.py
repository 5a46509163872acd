"""Measures a cluster: every process of `distca profile` runs this, one for each GPU.

Ranks divide the sizes of the attention kernel among them, and are all busy at the same time, as in training. All ranks
measure layers, and the mean is kept. Links are measured last.
"""

import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from distca_hf.analysis.profiles.cluster_profile import (
    AttentionTimes,
    ClusterProfile,
    DeviceRates,
    LinkTimes,
    Made,
)
from distca_hf.analysis.profiles.curves import Curve, Notes
from distca_hf.analysis.profiles.layers import AttentionBench, Clock, LayerBench, LayerSize, TaskSize, has_liger
from distca_hf.analysis.profiles.measure_links import FEWEST_CALLS, MeasuringRanks, OnOwnStream
from distca_hf.config import KernelName
from distca_hf.version import __version__, installed_versions


MIB = 1 << 20
# Layers of models of 4, 8 and 70 billion weights; others are estimated from the nearest.
GPU_LAYERS = (
    LayerSize(4096, 14_336, 32, 8, 128),
    LayerSize(2560, 9728, 32, 8, 128),
    LayerSize(8192, 28_672, 64, 8, 128),
)
CPU_LAYER = LayerSize(64, 128, 4, 2, 16)
# Tokens of a call of a layer. Wider layers have less room.
LAYER_TOKENS, WIDE_LAYER_TOKENS, WIDE = (4096, 16_384, 65_536), (4096, 16_384, 32_768), 6144


@dataclass(frozen=True)
class Grid:
    """Sizes to measure.

    Attributes:
        heads: query heads, KV heads, and the dimension of a head.
        squares, prefix_queries, prefix_keys: of tasks with all heads.
        group_squares, group_queries, group_keys: of tasks with one KV head and its query heads.
        windows, window_squares: sliding windows, and the squares to measure with them.
        call_tokens: queries and keys of a call of short tasks.
        layers: each with tokens of a call.
        rates: rows of a square matrix; hidden size, tokens and vocabulary of the head.
        num_bytes: bytes that ranks send each other.
        beside: task that runs while exchanges are measured.
        products_beside: number of matrix products that run while collectives are measured.
    """

    heads: tuple[int, int, int]
    squares: tuple[int, ...]
    prefix_queries: tuple[int, ...]
    prefix_keys: tuple[int, ...]
    group_squares: tuple[int, ...]
    group_queries: tuple[int, ...]
    group_keys: tuple[int, ...]
    windows: tuple[int, ...]
    window_squares: tuple[int, ...]
    call_tokens: tuple[int, int]
    layers: tuple[tuple[LayerSize, tuple[int, ...]], ...]
    rates: tuple[int, int, int, int]
    num_bytes: tuple[int, ...]
    beside: TaskSize
    products_beside: int

    @classmethod
    def of_gpu(cls, heads: tuple[int, int, int], layer: LayerSize) -> "Grid":
        """Returns the sizes for a GPU, and a model with these heads and this layer."""
        layers = (layer, *(other for other in GPU_LAYERS if other != layer))
        return cls(
            heads=heads,
            squares=(128, 512, 2048, 8192, 32_768, 65_536, 131_072),
            prefix_queries=(128, 512, 2048, 8192, 32_768, 65_536),
            prefix_keys=(512, 2048, 8192, 32_768, 131_072, 262_144),
            group_squares=(2048, 8192, 32_768, 131_072),
            group_queries=(2048, 8192, 32_768),
            group_keys=(8192, 32_768, 131_072),
            windows=(1024, 4096),
            window_squares=(2048, 8192, 32_768, 131_072),
            call_tokens=(65_536, 524_288),
            layers=tuple((size, WIDE_LAYER_TOKENS if size.hidden_size > WIDE else LAYER_TOKENS) for size in layers),
            rates=(8192, 4096, 8192, 32_000),
            num_bytes=(MIB // 16, MIB // 2, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
            beside=TaskSize(32_768, 0, heads[0], heads[1]),
            products_beside=8,
        )

    @classmethod
    def of_cpu(cls, heads: tuple[int, int, int]) -> "Grid":
        """Returns the sizes for a CPU."""
        return cls(
            heads=heads,
            squares=(32, 128),
            prefix_queries=(32, 128),
            prefix_keys=(32, 128),
            group_squares=(32, 128),
            group_queries=(32,),
            group_keys=(32, 128),
            windows=(16,),
            window_squares=(32, 128),
            call_tokens=(128, 256),
            layers=((CPU_LAYER, (32, 128)),),
            rates=(128, 64, 32, 1000),
            num_bytes=(4096, 65_536),
            beside=TaskSize(128, 0, heads[0], heads[1]),
            products_beside=1,
        )

    @cached_property
    def kinds(self) -> tuple[TaskSize, ...]:
        """Heads and windows of the tables: all heads first."""
        heads, kv_heads, _ = self.heads
        full = TaskSize(0, 0, heads, kv_heads)
        group = [TaskSize(0, 0, heads // kv_heads, 1)] if kv_heads > 1 else []
        return full, *group, *(TaskSize(0, 0, heads, kv_heads, window) for window in self.windows)

    @cached_property
    def tasks(self) -> list[TaskSize]:
        """All tasks, most work first: ranks then get about equal work."""

        def most_work(size: TaskSize) -> tuple[int, int]:
            return -size.queries * size.keys * size.heads, size.window_tokens

        tasks = []
        for kind in self.kinds:
            squares, queries, keys = self._sizes(kind)
            of_kind = [(number, 0) for number in squares] + [(number, prefix) for number in queries for prefix in keys]
            tasks += [TaskSize(*size, kind.heads, kind.kv_heads, kind.window_tokens) for size in of_kind]
        return sorted(tasks, key=most_work)

    def _sizes(self, kind: TaskSize) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        if kind.window_tokens:
            return self.window_squares, (), ()
        if kind.heads < self.heads[0]:
            return self.group_squares, self.group_queries, self.group_keys
        return self.squares, self.prefix_queries, self.prefix_keys


T = TypeVar("T")


class MeasuringProgress:
    """Shows on rank 0 what is being measured: a bar of `rich`, or lines without a terminal."""

    def __init__(self, shown: bool, total: int) -> None:
        self._shown, self._total, self._done, self._words = shown, total, 0, ""
        self._advance = self._line

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Shows the bar until the block ends."""
        if not (self._shown and sys.stderr.isatty()):
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=self._total)
            self._advance = lambda words: progress.update(task, completed=self._done, description=words)
            yield

    def over(self, words: str, items: Sequence[T]) -> Iterator[T]:
        """Yields items, and shows how many are done."""
        for item in items:
            if self._shown:
                self._advance(words)
            yield item
            self._done += 1

    def _line(self, words: str) -> None:
        if words != self._words:
            self._words = words
            sys.stderr.write(f"measuring {words} ({self._done} of {self._total} done)\n")


# Seconds of matrix products before anything is timed.
WARM_UP_SECONDS = {"cuda": 3.0, "cpu": 0.0}


@dataclass(frozen=True)
class Measuring:
    """One rank of a measurement."""

    ranks: MeasuringRanks
    grid: Grid
    kernel: KernelName
    command: str
    remarks: str

    def whole(self) -> ClusterProfile:
        """Measures everything. A collective call."""
        clock, dtype = self._clock, self._dtype
        links = self._link_steps
        attention = AttentionBench.choose(clock, self.kernel, self.grid.heads, *self.grid.call_tokens)
        mine = self.grid.tasks[self.ranks.rank :: self.ranks.num_ranks]
        kernels = (False, True) if has_liger() and self.ranks.device.type == "cuda" else (False,)
        layers = [(size, tokens, liger) for size, tokens in self.grid.layers for liger in kernels]
        progress = MeasuringProgress(self.ranks.rank == 0, len(mine) + len(layers) + 1 + len(links))
        with progress.bar():
            bench = LayerBench(clock, dtype)
            clock.busy(partial(bench.matrix_flops, self.grid.rates[0]), WARM_UP_SECONDS[clock.device.type])
            seconds = {size: attention.seconds(size) for size in progress.over("attention", mine)}
            times = [bench.layer(*layer) for layer in progress.over("layers", layers)]
            rates = [bench.rates(*self.grid.rates) for _ in progress.over("rates", [None])]
            within, between = self._links(attention, progress)
        tables = self._tables(seconds)
        return ClusterProfile(
            self._made(type(attention.kernel).__name__),
            tables,
            tuple(
                replace(
                    layer,
                    forward=tuple(self._mean(layer.forward)),
                    kept=tuple(self._mean(layer.kept)),
                    backward=tuple(self._mean(layer.backward)),
                )
                for layer in times
            ),
            self._mean_rates(rates[0]),
            within,
            between,
        )

    def links_of(self, profile: ClusterProfile) -> ClusterProfile:
        """Measures only the network, and returns a profile with links between nodes. A collective call."""
        attention = AttentionBench.choose(self._clock, self.kernel, self.grid.heads, *self.grid.call_tokens)
        progress = MeasuringProgress(self.ranks.rank == 0, len(self._link_steps))
        with progress.bar():
            within, between = self._links(attention, progress)
        return replace(profile, between_nodes=between or within)

    @property
    def _clock(self) -> Clock:
        return Clock(self.ranks.device)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.ranks.device.type == "cuda" else torch.float32

    @property
    def _link_steps(self) -> list[tuple[bool, int]]:
        """Sizes of exchanges within a node, and between nodes, if there are ranks for both."""
        per_node = self.ranks.ranks_per_node
        scopes = [*([False] if per_node > 1 else []), *([True] if self.ranks.has_several_nodes else [])]
        return [(between, num_bytes) for between in scopes for num_bytes in self.grid.num_bytes]

    # Ranks show each other their times.

    def _tables(self, mine: dict[TaskSize, tuple[float, float]]) -> tuple[AttentionTimes, ...]:
        """Returns the tables of all ranks' tasks."""
        rows = -(-len(self.grid.tasks) // self.ranks.num_ranks)
        flat = [value for times in mine.values() for value in times]
        every = self.ranks.gathered([*flat, *[0.0] * (2 * rows - len(flat))], "attention times")
        seconds = {}
        for rank, values in enumerate(every):
            for at, size in enumerate(self.grid.tasks[rank :: self.ranks.num_ranks]):
                seconds[size] = values[2 * at], values[2 * at + 1]
        return tuple(_table(kind, seconds, self.grid.heads[2]) for kind in self.grid.kinds)

    def _mean(self, values: Sequence[float]) -> list[float]:
        every = self.ranks.gathered(values, "times of layers")
        return [statistics.fmean(column) for column in zip(*every, strict=True)]

    def _mean_rates(self, rates: DeviceRates) -> DeviceRates:
        inverse = self._mean([1 / rates.matrix_flops * 1e9, 1 / rates.copy_bytes * 1e6])
        optimizer, head = self._mean([rates.optimizer_seconds * 1e6, rates.head_seconds])
        return replace(
            rates,
            matrix_flops=1e9 / inverse[0],
            copy_bytes=1e6 / inverse[1],
            optimizer_seconds=optimizer / 1e6,
            head_seconds=head,
        )

    # Links.

    def _links(
        self, attention: AttentionBench, progress: MeasuringProgress
    ) -> tuple[LinkTimes | None, LinkTimes | None]:
        """Returns the times of links within a node, and between nodes."""
        rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        for between, num_bytes in progress.over("links", self._link_steps):
            rows[between].append(self._link_seconds(num_bytes, between))
        within, beyond = (self._link_times(attention, scope, rows[scope]) for scope in (False, True))
        return within, beyond

    def _link_seconds(self, num_bytes: int, between: bool) -> tuple[float, ...]:
        """Returns the seconds of every kind of `LinkTimes`, in its order."""
        ranks, calls = self.ranks, max(FEWEST_CALLS, min(20, (1 << 29) // num_bytes))
        return (
            ranks.exchange_seconds(ranks.exchange(num_bytes, between), num_bytes),
            ranks.slowest(ranks.all_gather(num_bytes, between), calls, "measuring an all-gather"),
            ranks.slowest(ranks.reduce_scatter(num_bytes, between), calls, "measuring a reduce-scatter"),
            ranks.exchange_seconds(ranks.one_way(num_bytes, between), num_bytes),
            ranks.slowest(ranks.to_next(num_bytes, between), calls, "measuring sends to the next rank"),
        )

    def _link_times(
        self, attention: AttentionBench, between: bool, rows: Sequence[tuple[float, ...]]
    ) -> LinkTimes | None:
        if not rows:
            return None
        ranks, sizes = self.ranks, tuple(map(float, self.grid.num_bytes))
        exchange, all_gather, reduce_scatter, one_way, to_next = (tuple(column) for column in zip(*rows, strict=True))
        # Sending should take about half as long as the kernels that run meanwhile.
        forward, _, _ = attention.calls(self.grid.beside)
        target = ranks.slowest(forward, FEWEST_CALLS, "measuring kernels") / 2
        num_bytes = _bytes_within(target, sizes, exchange)
        exchanges = ranks.exchange(num_bytes, between)
        attention_beside = ranks.delay_of(forward, exchanges, ranks.exchange_seconds(exchanges, num_bytes))
        matrix = torch.randn(self.grid.rates[0], self.grid.rates[0], device=ranks.device).to(self._dtype)
        out = torch.empty_like(matrix)

        def products() -> None:
            for _ in range(self.grid.products_beside):
                torch.matmul(matrix, matrix, out=out)

        target = ranks.slowest(products, FEWEST_CALLS, "measuring products") / 2
        num_bytes = _bytes_within(target, sizes, all_gather)
        gather = ranks.all_gather(num_bytes, between)
        alone = ranks.slowest(gather, FEWEST_CALLS, "measuring an all-gather")
        products_beside = ranks.delay_of(products, OnOwnStream(gather, ranks.device), alone)
        number = ranks.num_ranks if between else ranks.ranks_per_node
        times = (exchange, all_gather, reduce_scatter, attention_beside, products_beside)
        of_a_node = ranks.ranks_per_node if between or ranks.has_several_nodes else 1
        return LinkTimes(number, sizes, *times, _now(), self.command, of_a_node, one_way, to_next)

    def _made(self, kernel: str) -> Made:
        device, versions = self.ranks.device, {"distca_hf": __version__, "python": platform.python_version()}
        packages = ("torch", "transformers", "flash-attn-4", "flash-attn", "ffpa-attn", "liger-kernel")
        versions |= installed_versions(*packages)
        name = platform.processor() or platform.machine()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        nodes = self.ranks.num_ranks // self.ranks.ranks_per_node
        return Made(_now(), name, kernel, self.ranks.num_ranks, nodes, self.command, versions, self.remarks)


def _table(kind: TaskSize, seconds: dict[TaskSize, tuple[float, float]], head_dim: int) -> AttentionTimes:
    """Returns the table of tasks with the heads and the window of one."""
    like = {
        size: times
        for size, times in seconds.items()
        if (size.heads, size.window_tokens) == (kind.heads, kind.window_tokens)
    }
    squares = sorted(size.queries for size in like if not size.prefix)
    queries = sorted({size.queries for size in like if size.prefix})
    keys = sorted({size.prefix for size in like if size.prefix})

    def row(number: int, of_direction: int) -> tuple[float, ...]:
        return tuple(like[replace(kind, queries=number, prefix=prefix)][of_direction] for prefix in keys)

    return AttentionTimes(
        kind.heads,
        kind.kv_heads,
        head_dim,
        kind.window_tokens,
        tuple(map(float, squares)),
        tuple(like[replace(kind, queries=number)][0] for number in squares),
        tuple(like[replace(kind, queries=number)][1] for number in squares),
        tuple(map(float, queries)),
        tuple(map(float, keys)),
        tuple(row(number, 0) for number in queries),
        tuple(row(number, 1) for number in queries),
    )


def _bytes_within(seconds: float, sizes: Sequence[float], times: Sequence[float]) -> int:
    """Returns the largest size, between measured ones, that takes at most this long; equal times give equal sizes."""
    curve, many = Curve.of("bytes", sizes, times), np.geomspace(sizes[0], sizes[-1], 200)
    fits = many[curve.at(many, Notes()) <= seconds]
    return int(fits[-1]) if len(fits) else int(sizes[0])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
