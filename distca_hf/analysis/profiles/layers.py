"""Seconds of a decoder layer, separately of core attention and everything else, and rates of the rest of a step.

Attention is measured for tasks as training has them. A rank holds the keys of its own queries, and receives the
prefix. So a task is a causal call over as many keys as queries (the square), and a call without a mask over the
prefix, whose output is merged and whose gradient of queries is added. Short tasks are measured many in one call.

The layer is Transformers' Llama layer, in bf16. Its attention is replaced by a function that computes nothing: it
returns stored random numbers, and passes gradients on. So products, norms, rotary embeddings and sums are as in
training. Weights are local; FSDP's collectives are measured separately.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from distca_hf.analysis.profiles.cluster_profile import DeviceRates, LayerTimes
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


NO_ATTENTION = "distca_profile_without_attention"


@dataclass(frozen=True)
class Clock:
    """Times calls of a device. `enough_seconds`: a call is repeated until it has taken this long in total."""

    device: torch.device
    enough_seconds: float = 0.06
    fewest: int = 2
    most: int = 20

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the median over all calls after the first one."""
        run()
        times: list[float] = []
        while len(times) < self.fewest or (sum(times) < self.enough_seconds and len(times) < self.most):
            times.append(self._once(run))
        return statistics.median(times)

    def busy(self, run: Callable[[], object], seconds: float) -> None:
        """Repeats a call for this long: clocks of a GPU fall while it gets warm."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._once(run)

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return max(1e-9, time.perf_counter() - began)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class TaskSize:
    """One kind of task. `prefix`: keys of its prefix; 0 for a square, whose keys are as many as its queries.
    `window_tokens`: sliding window of a square; 0 for none."""

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
    """The kernel of a device, and how large calls are. `call_queries`, `call_keys`: a call of short tasks has about
    this many queries, and at most this many keys."""

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
        """Chooses the kernel as training does. `heads`: query heads, KV heads, and the dimension of a head."""
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
        """Prepares calls of one size; returns forward, backward, and their number of tasks."""
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


class StoredOutput(torch.autograd.Function):
    """Returns a stored output; gradients of queries, keys and values are the output's, without a copy."""

    @staticmethod
    def forward(
        ctx: Any, q_BNTH: torch.Tensor, k_BGTH: torch.Tensor, v_BGTH: torch.Tensor, out_BTNH: torch.Tensor
    ) -> torch.Tensor:
        ctx.kv_heads = k_BGTH.shape[1]
        return out_BTNH.detach()

    @staticmethod
    def backward(ctx: Any, *douts_BTNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        dout_BNTH = douts_BTNH[0].transpose(1, 2)
        dkv = dout_BNTH[:, : ctx.kv_heads]
        return dout_BNTH, dkv, dkv, None


@dataclass(frozen=True)
class LayerBench:
    """Measures layers and rates of one device."""

    clock: Clock
    dtype: torch.dtype

    def layer(self, sizes: LayerTimes) -> LayerTimes:
        """Returns the layer of these sizes with its times."""
        rows = [self._layer_seconds(sizes, int(tokens)) for tokens in sizes.tokens]
        forward, kept, backward = (tuple(column) for column in zip(*rows, strict=True))
        return replace(sizes, forward=forward, kept=kept, backward=backward)

    def _layer_seconds(self, size: LayerTimes, tokens: int) -> tuple[float, float, float]:
        device = self.clock.device
        stored = torch.randn(1, tokens, size.heads, size.head_dim, device=device, dtype=self.dtype)

        def attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
            return StoredOutput.apply(q, k, v, stored), None

        AttentionInterface.register(NO_ATTENTION, attention)
        config = LlamaConfig(
            hidden_size=size.hidden_size,
            intermediate_size=size.mlp_size,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim,
            num_hidden_layers=1,
            max_position_embeddings=tokens,
            attn_implementation=NO_ATTENTION,
        )
        with device:
            layer = LlamaDecoderLayer(config, 0).to(self.dtype).train()
            rotary = LlamaRotaryEmbedding(config)
            positions = torch.arange(tokens)[None]
            hidden = torch.randn(1, tokens, size.hidden_size, dtype=self.dtype, requires_grad=True)
        if size.liger:
            use_liger(layer)
        embeddings = rotary(hidden, positions)

        def run() -> torch.Tensor:
            output = layer(hidden, position_embeddings=embeddings)
            return output if isinstance(output, torch.Tensor) else output[0]

        def forward() -> None:
            with torch.no_grad():
                run()

        forward_seconds, kept_seconds = self.clock.seconds(forward), self.clock.seconds(run)
        dout = torch.randn_like(hidden)

        def kept_and_backward() -> None:
            torch.autograd.grad(run(), [hidden, *layer.parameters()], dout)

        both = self.clock.seconds(kept_and_backward)
        return forward_seconds, kept_seconds, max(both - kept_seconds, 0.1 * both)

    def matrix_flops(self, size: int) -> float:
        """Returns the rate of a square product."""
        left, right = (torch.randn(size, size, device=self.clock.device).to(self.dtype) for _ in range(2))
        out = torch.empty_like(left)
        return 2 * size**3 / self.clock.seconds(lambda: torch.matmul(left, right, out=out))

    def rates(self, size: int, hidden_size: int, tokens: int, vocabulary: int) -> DeviceRates:
        """Returns rates of everything that is not measured by size. `size`: rows and columns of matrices and
        of copies. `hidden_size`, `tokens`, `vocabulary`: sizes of the head."""
        device = self.clock.device
        source = torch.randn(16 * size * size, device=device).to(self.dtype)
        target = torch.empty_like(source)
        copy_seconds = self.clock.seconds(lambda: target.copy_(source))
        weights = nn.Parameter(torch.randn(size * size, device=device))
        weights.grad = torch.randn_like(weights)
        optimizer = torch.optim.AdamW([weights])
        head = self._head(hidden_size, tokens, vocabulary)
        return DeviceRates(
            matrix_flops=self.matrix_flops(size),
            copy_bytes=2 * source.nbytes / copy_seconds,
            optimizer_seconds=self.clock.seconds(optimizer.step) / weights.numel(),
            head_seconds=self.clock.seconds(head) / tokens / (vocabulary / 1000),
            head_hidden_size=hidden_size,
        )

    def _head(self, hidden_size: int, tokens: int, vocabulary: int) -> Callable[[], object]:
        """Returns a call of the last matrix and the loss, forward and backward, as Transformers computes them."""
        device = self.clock.device
        hidden = torch.randn(tokens, hidden_size, device=device, dtype=self.dtype, requires_grad=True)
        weights = torch.randn(vocabulary, hidden_size, device=device, dtype=self.dtype, requires_grad=True)
        labels = torch.randint(vocabulary, (tokens,), device=device)
        return lambda: torch.autograd.grad(cross_entropy(linear(hidden, weights).float(), labels), [hidden, weights])


def use_liger(layer: LlamaDecoderLayer) -> None:
    """Puts Liger's norms and MLP into a layer, but not its rotary embeddings, which Liger replaces for all models."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    config = layer.self_attn.config
    device, dtype = layer.mlp.down_proj.weight.device, layer.mlp.down_proj.weight.dtype
    with device:
        layer.mlp = LigerSwiGLUMLP(config).to(dtype)
        layer.input_layernorm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps).to(dtype)
        layer.post_attention_layernorm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps).to(dtype)
