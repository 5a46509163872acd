"""Seconds of the attention kernel, for tasks as training has them.

A rank holds the keys beside its queries, and receives the prefix. So a task is a causal call over as many keys as
queries (the square), and a call without a mask over the prefix. Output of the latter is merged, and its gradient of
queries added. Short tasks are measured many in one call, as they come in training, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distca_hf.analysis.profiles.clock import Clock
from distca_hf.config import KernelName
from distca_hf.kernels.interface import (
    AttentionSpec,
    Gradients,
    Inputs,
    Kernel,
    Room,
    Saved,
    Spans,
    accumulation_dtype,
    before_queries,
)
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.kernels.rows import merge_rows


@dataclass(frozen=True)
class TaskSize:
    """One kind of task.

    Attributes:
        queries: queries of a task.
        prefix: keys of its prefix; 0 for a square, whose keys are as many as its queries.
        heads, kv_heads: of the call.
        window_tokens: sliding window of a square; 0 for none.
    """

    queries: int
    prefix: int
    heads: int
    kv_heads: int
    window_tokens: int = 0

    @property
    def keys(self) -> int:
        return self.prefix or self.queries


@dataclass(frozen=True)
class AttentionBench:
    """The kernel of a device, and how large calls are.

    Attributes:
        clock: of the device.
        kernel: computes.
        dtype: of queries, keys and values.
        head_dim: dimension of a head.
        call_queries, call_keys: a call has about so many queries, and no more keys than these, if a task has fewer.
    """

    clock: Clock
    kernel: Kernel
    dtype: torch.dtype
    head_dim: int
    call_queries: int
    call_keys: int

    @classmethod
    def choose(
        cls, clock: Clock, name: KernelName, heads: tuple[int, int, int], call_queries: int, call_keys: int
    ) -> "AttentionBench":
        """Chooses the kernel as training does.

        Args:
            heads: query heads, KV heads, and the dimension of a head.

        Raises:
            UnsupportedAttentionError: none can compute these heads.
        """
        dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
        query, key_value, dim = heads
        q, k = (torch.empty(1, number, dim, device=clock.device, dtype=dtype) for number in (query, key_value))
        kernel = choose_kernel(name, Operands.of(q, k, k), AttentionSpec(scale=1.0))
        return cls(clock, kernel, dtype, dim, call_queries, call_keys)

    def seconds(self, size: TaskSize) -> tuple[float, float]:
        """Returns the seconds of one task, forward and backward."""
        forward, backward, tasks = self.calls(size)
        return self.clock.seconds(forward) / tasks, self.clock.seconds(backward) / tasks

    def calls(self, size: TaskSize) -> tuple[Callable[[], object], Callable[[], object], int]:
        """Prepares calls of one size; returns forward, backward, and how many tasks they have."""
        tasks = max(1, min(self.call_queries // size.queries, self.call_keys // size.keys))
        rows, key_rows = tasks * size.queries, tasks * size.keys
        q, dout, dq, own_dq = (self._random(rows, size.heads) for _ in range(4))
        k, v, dk, dv = (self._random(key_rows, size.kv_heads) for _ in range(4))
        out, lse = (
            self._random(rows, size.heads),
            torch.zeros(rows, size.heads, device=q.device, dtype=accumulation_dtype(self.dtype)),
        )
        offsets = torch.arange(tasks + 1, device=q.device, dtype=torch.int32)
        spans = Spans(offsets * size.queries, offsets * size.keys, size.queries, size.keys)
        spec = AttentionSpec(self.head_dim**-0.5, window_tokens=size.window_tokens)
        saved, gradients = Saved(q, k, v, out, lse.T), Gradients(dq, dk, dv)
        if not size.prefix:
            inputs, room = Inputs(q, k, v), Room(out, lse.T)
            return (
                lambda: self.kernel.forward(inputs, spans, spec, room),
                lambda: self.kernel.backward(dout, saved, gradients, spans, spec),
                tasks,
            )
        spec = before_queries(spec)

        def forward() -> None:
            merge_rows(out, lse, *self.kernel.forward(Inputs(q, k, v), spans, spec))

        def backward() -> None:
            self.kernel.backward(dout, saved, gradients, spans, spec)
            own_dq.add_(dq)

        return forward, backward, tasks

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.head_dim, device=self.clock.device, dtype=self.dtype)
