"""Grid: the sizes that `distca profile` measures. On CPUs they are tiny: that is for tests, and for a first look."""

from dataclasses import dataclass
from functools import cached_property

from distca_hf.analysis.profiles.layers import LayerSize, TaskSize


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
        windows, window_squares: sliding windows, and the squares that are measured with them.
        call_tokens: queries and keys that a call of short tasks has.
        layers: each with tokens of a call.
        rates: rows of a square matrix; hidden size, tokens and words of the head.
        num_bytes: bytes that ranks send each other.
        beside: task beside which exchanges are measured.
        products_beside: number of matrix products beside which collectives are measured.
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
        """Returns the sizes for a GPU, and a model with these heads and such a layer."""
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
        """All tasks, the most work first, so that ranks get about equally much."""

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
