"""Measures a cluster: every process of `distca profile` runs this, one for each GPU.

Ranks divide the sizes of the attention kernel among them, and are all busy at the same time, as in training. All ranks
measure layers, and the mean is kept. Links are measured last.
"""

import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch

from distca_hf.analysis.profiles.cluster_profile import (
    AttentionTimes,
    ClusterProfile,
    DeviceRates,
    LayerTimes,
    LinkTimes,
    Made,
)
from distca_hf.analysis.profiles.curves import Curve, Notes
from distca_hf.analysis.profiles.layers import AttentionBench, Clock, LayerBench, TaskSize
from distca_hf.analysis.profiles.measure_links import FEWEST_CALLS, MeasuringRanks, on_own_stream
from distca_hf.config import KernelName
from distca_hf.version import __version__, installed_versions


MIB = 1 << 20
# Hidden size, size of the MLP, heads, KV heads, and dimension of a head.
LayerSizes = tuple[int, int, int, int, int]
# Layers of models of 8, 4 and 70 billion weights; others are estimated from the nearest.
GPU_LAYERS: tuple[LayerSizes, ...] = (
    (4096, 14_336, 32, 8, 128),
    (2560, 9728, 32, 8, 128),
    (8192, 28_672, 64, 8, 128),
)
CPU_LAYER: LayerSizes = (64, 128, 4, 2, 16)
# Tokens of a call of a layer. Wider layers have less room.
LAYER_TOKENS, WIDE_LAYER_TOKENS, WIDE = (4096, 16_384, 65_536), (4096, 16_384, 32_768), 6144


def _floats(sizes: Sequence[int]) -> tuple[float, ...]:
    return tuple(map(float, sizes))


def tasks_of(table: AttentionTimes) -> list[TaskSize]:
    """Returns the tasks of a table: squares, then prefixes, for one number of queries after another."""
    heads = table.heads, table.kv_heads
    squares = [TaskSize(int(queries), 0, *heads, table.window_tokens) for queries in table.square_tokens]
    prefixes = [TaskSize(int(rows), int(keys), *heads) for rows in table.prefix_queries for keys in table.prefix_keys]
    return [*squares, *prefixes]


def filled(table: AttentionTimes, seconds: Mapping[TaskSize, tuple[float, float]]) -> AttentionTimes:
    """Returns a table with the times of its tasks. `seconds`: of forward and of backward, for each task."""
    num_squares, num_keys, tasks = len(table.square_tokens), len(table.prefix_keys), tasks_of(table)
    forward, backward = (tuple(seconds[task][of_pass] for task in tasks) for of_pass in (0, 1))
    rows = [slice(first, first + num_keys) for first in range(num_squares, len(tasks), max(1, num_keys))]
    return replace(
        table,
        square_forward=forward[:num_squares],
        square_backward=backward[:num_squares],
        prefix_forward=tuple(forward[row] for row in rows),
        prefix_backward=tuple(backward[row] for row in rows),
    )


@dataclass(frozen=True)
class Grid:
    """Sizes to measure.

    Attributes:
        tables: for all heads, for one KV head and its query heads, and for sliding windows; not filled yet.
        call_tokens: queries and keys of a call of short tasks.
        layers: sizes of layers and tokens of their calls; not timed yet.
        rates: rows of a square matrix; hidden size, tokens and vocabulary of the head.
        task_meanwhile, products_meanwhile: a task, and a number of products, that run while links are measured.
    """

    tables: tuple[AttentionTimes, ...]
    call_tokens: tuple[int, int]
    layers: tuple[LayerTimes, ...]
    rates: tuple[int, int, int, int]
    num_bytes: tuple[int, ...]
    task_meanwhile: TaskSize
    products_meanwhile: int

    @classmethod
    def of_gpu(cls, heads: tuple[int, int, int], layer: LayerSizes) -> "Grid":
        """Returns the sizes for a GPU, and a model with these heads and this layer."""
        query, key_value, head_dim = heads
        queries, keys = (128, 512, 2048, 8192, 32_768, 65_536), (512, 2048, 8192, 32_768, 131_072, 262_144)
        whole, few = _floats((*queries, 131_072)), _floats((2048, 8192, 32_768, 131_072))
        rows, columns = _floats(queries), _floats(keys)
        group = AttentionTimes(
            query // key_value, 1, head_dim, 0, few, prefix_queries=rows[2:5], prefix_keys=columns[2:5]
        )
        return cls(
            (
                AttentionTimes(query, key_value, head_dim, 0, whole, prefix_queries=rows, prefix_keys=columns),
                *([group] if key_value > 1 else []),
                *(AttentionTimes(query, key_value, head_dim, window, few) for window in (1024, 4096)),
            ),
            call_tokens=(65_536, 524_288),
            layers=tuple(
                LayerTimes(*sizes, False, _floats(WIDE_LAYER_TOKENS if sizes[0] > WIDE else LAYER_TOKENS))
                for sizes in dict.fromkeys((layer, *GPU_LAYERS))
            ),
            rates=(8192, 4096, 8192, 32_000),
            num_bytes=(MIB // 16, MIB // 2, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
            task_meanwhile=TaskSize(32_768, 0, query, key_value),
            products_meanwhile=8,
        )

    @classmethod
    def of_cpu(cls, heads: tuple[int, int, int]) -> "Grid":
        """Returns the sizes for a CPU."""
        query, key_value, head_dim = heads
        sizes = _floats((32, 128))
        group = AttentionTimes(query // key_value, 1, head_dim, 0, sizes, prefix_queries=sizes[:1], prefix_keys=sizes)
        window = AttentionTimes(query, key_value, head_dim, 16, sizes)
        whole = AttentionTimes(query, key_value, head_dim, 0, sizes, prefix_queries=sizes, prefix_keys=sizes)
        return cls(
            (whole, *([group] if key_value > 1 else []), window),
            call_tokens=(128, 256),
            layers=(LayerTimes(*CPU_LAYER, False, sizes),),
            rates=(128, 64, 32, 1000),
            num_bytes=(4096, 65_536),
            task_meanwhile=TaskSize(128, 0, query, key_value),
            products_meanwhile=1,
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and the dimension of a head."""
        return self.tables[0].heads, self.tables[0].kv_heads, self.tables[0].head_dim

    @cached_property
    def tasks(self) -> list[TaskSize]:
        """All tasks, most work first: ranks then get about equal work."""
        tasks = [task for table in self.tables for task in tasks_of(table)]
        return sorted(tasks, key=lambda size: (-size.queries * size.keys * size.heads, size.window_tokens))


T = TypeVar("T")


class MeasuringProgress:
    """Says on rank 0, line after line on stderr, what is being measured."""

    def __init__(self, shown: bool, total: int) -> None:
        self._shown, self._total, self._done = shown, total, 0

    def over(self, label: str, items: Sequence[T]) -> Iterator[T]:
        if self._shown and items:
            sys.stderr.write(f"measuring {label} ({self._done} of {self._total} done)\n")
        self._done += len(items)
        yield from items


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
        clock, dtype = Clock(self.ranks.device), self._dtype
        links = self._link_steps
        attention = AttentionBench.choose(clock, self.kernel, self.grid.heads, *self.grid.call_tokens)
        mine = self.grid.tasks[self.ranks.rank :: self.ranks.num_ranks]
        tries_liger = self.ranks.device.type == "cuda" and find_spec("liger_kernel") is not None
        kernels = (False, True) if tries_liger else (False,)
        layers = [replace(layer, liger=liger) for layer in self.grid.layers for liger in kernels]
        progress = MeasuringProgress(self.ranks.rank == 0, len(mine) + len(layers) + 1 + len(links))
        bench = LayerBench(clock, dtype)
        clock.busy(partial(bench.matrix_flops, self.grid.rates[0]), WARM_UP_SECONDS[clock.device.type])
        seconds = {size: attention.seconds(size) for size in progress.over("attention", mine)}
        times = [bench.layer(layer) for layer in progress.over("layers", layers)]
        rates = [bench.rates(*self.grid.rates) for _ in progress.over("rates", [None])]
        within, between = self._links(attention, progress)
        made, tables = self._made(type(attention.kernel).__name__), self._tables(seconds)
        layers_of_all = tuple(map(self._mean_layer, times))
        return ClusterProfile(made, tables, layers_of_all, self._mean_rates(rates[0]), within, between)

    def links_of(self, profile: ClusterProfile) -> ClusterProfile:
        """Measures only the network, and returns a profile with links between nodes. A collective call."""
        clock = Clock(self.ranks.device)
        attention = AttentionBench.choose(clock, self.kernel, self.grid.heads, *self.grid.call_tokens)
        progress = MeasuringProgress(self.ranks.rank == 0, len(self._link_steps))
        within, between = self._links(attention, progress)
        return replace(profile, between_nodes=between or within)

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
        rows = -(-len(self.grid.tasks) // self.ranks.num_ranks)
        flat = [value for times in mine.values() for value in times]
        every = self.ranks.gathered([*flat, *[0.0] * (2 * rows - len(flat))], "attention times")
        seconds = {}
        for rank, values in enumerate(every):
            for at, size in enumerate(self.grid.tasks[rank :: self.ranks.num_ranks]):
                seconds[size] = values[2 * at], values[2 * at + 1]
        return tuple(filled(table, seconds) for table in self.grid.tables)

    def _mean(self, values: Sequence[float]) -> list[float]:
        every = self.ranks.gathered(values, "times of layers")
        return [statistics.fmean(column) for column in zip(*every, strict=True)]

    def _mean_layer(self, layer: LayerTimes) -> LayerTimes:
        forward, kept, backward = (tuple(self._mean(x)) for x in (layer.forward, layer.kept, layer.backward))
        return replace(layer, forward=forward, kept=kept, backward=backward)

    def _mean_rates(self, rates: DeviceRates) -> DeviceRates:
        inverse = self._mean([1 / rates.matrix_flops * 1e9, 1 / rates.copy_bytes * 1e6])
        optimizer, head = self._mean([rates.optimizer_seconds * 1e6, rates.head_seconds])
        return DeviceRates(1e9 / inverse[0], 1e6 / inverse[1], optimizer / 1e6, head, rates.head_hidden_size)

    # Links.

    def _links(
        self, attention: AttentionBench, progress: MeasuringProgress
    ) -> tuple[LinkTimes | None, LinkTimes | None]:
        ranks = self.ranks
        rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}  # every kind of `LinkTimes`, in its order
        for between, num_bytes in progress.over("links", self._link_steps):
            calls = max(FEWEST_CALLS, min(20, (1 << 29) // num_bytes))
            seconds = (
                ranks.exchange_seconds(ranks.exchange(num_bytes, between), num_bytes),
                ranks.slowest(ranks.all_gather(num_bytes, between), calls, "measuring an all-gather"),
                ranks.slowest(ranks.reduce_scatter(num_bytes, between), calls, "measuring a reduce-scatter"),
                ranks.exchange_seconds(ranks.one_way(num_bytes, between), num_bytes),
                ranks.slowest(ranks.to_next(num_bytes, between), calls, "measuring sends to the next rank"),
            )
            rows[between].append(seconds)
        within, beyond = (self._link_times(attention, scope, rows[scope]) for scope in (False, True))
        return within, beyond

    def _link_times(
        self, attention: AttentionBench, between: bool, rows: Sequence[tuple[float, ...]]
    ) -> LinkTimes | None:
        if not rows:
            return None
        ranks, sizes = self.ranks, tuple(map(float, self.grid.num_bytes))
        exchange, all_gather, reduce_scatter, one_way, to_next = (tuple(column) for column in zip(*rows, strict=True))
        # Sending should take about half as long as the kernels that run meanwhile.
        forward, _, _ = attention.calls(self.grid.task_meanwhile)
        target = ranks.slowest(forward, FEWEST_CALLS, "measuring kernels") / 2
        num_bytes = _bytes_within(target, sizes, exchange)
        exchanges = ranks.exchange(num_bytes, between)
        attention_beside = ranks.delay_of(forward, exchanges, ranks.exchange_seconds(exchanges, num_bytes))
        matrix = torch.randn(self.grid.rates[0], self.grid.rates[0], device=ranks.device).to(self._dtype)
        out = torch.empty_like(matrix)

        def products() -> None:
            for _ in range(self.grid.products_meanwhile):
                torch.matmul(matrix, matrix, out=out)

        target = ranks.slowest(products, FEWEST_CALLS, "measuring products") / 2
        num_bytes = _bytes_within(target, sizes, all_gather)
        gather = ranks.all_gather(num_bytes, between)
        gather_seconds = ranks.slowest(gather, FEWEST_CALLS, "measuring an all-gather")
        products_beside = ranks.delay_of(products, on_own_stream(gather, ranks.device), gather_seconds)
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


def _bytes_within(seconds: float, sizes: Sequence[float], times: Sequence[float]) -> int:
    """Returns the largest size, between measured ones, that takes at most this long; equal times give equal sizes."""
    curve, many = Curve.of("bytes", sizes, times), np.geomspace(sizes[0], sizes[-1], 200)
    fits = many[curve.at(many, Notes()) <= seconds]
    return int(fits[-1]) if len(fits) else int(sizes[0])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
