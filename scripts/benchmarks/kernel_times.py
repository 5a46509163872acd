"""Measures the attention kernel of this GPU and writes the table that the setting `kernel_times` names.

    python scripts/benchmarks/kernel_times.py --heads 32 --kv-heads 8 --head-dim 128 --out kernel_times.json

Every entry is the seconds of one task, forward and backward: the last query tokens of a document of so many key
tokens. It is computed as in training, where a rank holds the keys beside its queries and receives the prefix: in a
causal call over as many keys as queries (the square), and in a call without a mask over the prefix, whose output is
merged. Short tasks are measured many in one call, as they come in training, too.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from distca_hf.config import DistCAConfig
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Room, Saved, Spans
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.kernels.rows import merge


QUERY_TOKENS = (128, 512, 2048, 8192, 32768, 131072)
KEY_TOKENS = (128, 512, 2048, 8192, 32768, 131072, 262144)
# One call has about so many query tokens, if a task has fewer, but no more than so many key tokens.
CALL_TOKENS = 32768
MOST_KEY_TOKENS = 524288
REPEATS = 5


@dataclass(frozen=True)
class Call:
    """Keys and values of a call, and room for its results.

    Attributes:
        k, v, dk, dv: `[tasks * keys, kv heads, head dim]`.
        spans, spec: the tasks, and how they attend.
        out, dq: `[tasks * queries, heads, head dim]`.
        lse: `[tasks * queries, heads]`.
    """

    k: torch.Tensor
    v: torch.Tensor
    spans: Spans
    spec: AttentionSpec
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @classmethod
    def random(cls, tasks: int, queries: int, keys: int, causal: bool, options: argparse.Namespace) -> "Call":
        k, v, dk, dv = (_random(tasks * keys, options.kv_heads, options) for _ in range(4))
        out, dq = (_random(tasks * queries, options.heads, options) for _ in range(2))
        lse = torch.empty(tasks * queries, options.heads, device=out.device, dtype=torch.float32)
        offsets = torch.arange(tasks + 1, device=out.device, dtype=torch.int32)
        spans = Spans(offsets * queries, offsets * keys, queries, keys)
        spec = AttentionSpec(options.head_dim**-0.5, causal)
        return cls(k, v, spans, spec, out, lse, dq, dk, dv)


def seconds_of_a_task(kernel: Kernel, queries: int, keys: int, options: argparse.Namespace) -> float:
    """Returns the median over some calls, forward and backward together."""
    tasks = max(1, min(CALL_TOKENS // queries, MOST_KEY_TOKENS // keys))
    q, dout = (_random(tasks * queries, options.heads, options) for _ in range(2))
    square = Call.random(tasks, queries, queries, True, options)
    prefix = [Call.random(tasks, queries, keys - queries, False, options)] if keys > queries else []

    def task() -> None:
        kernel.forward(Inputs(q, square.k, square.v), square.spans, square.spec, Room(square.out, square.lse.T))
        for call in prefix:
            merge(square.out, square.lse, *kernel.forward(Inputs(q, call.k, call.v), call.spans, call.spec))
        for call in (square, *prefix):
            saved, gradients = Saved(q, call.k, call.v, square.out, square.lse.T), Gradients(call.dq, call.dk, call.dv)
            kernel.backward(dout, saved, gradients, call.spans, call.spec)
        for call in prefix:
            square.dq.add_(call.dq)

    times = []
    for repeat in range(REPEATS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        task()
        end.record()
        end.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / tasks


def _random(rows: int, heads: int, options: argparse.Namespace) -> torch.Tensor:
    return torch.randn(rows, heads, options.head_dim, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--head-dim", type=int, default=128, help="dimension of a head")
    parser.add_argument("--kernel", default=DistCAConfig().kernel, help="attention kernel, as in settings")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write the table to, for the setting kernel_times"
    )
    options = parser.parse_args()
    shapes = ((1, options.heads), (1, options.kv_heads), (1, options.kv_heads))
    q, k, v = (torch.empty(t, h, options.head_dim, device="cuda", dtype=torch.bfloat16) for t, h in shapes)
    kernel = choose_kernel(options.kernel, Operands.of(q, k, v), AttentionSpec(scale=1.0))
    table: list[list[float | None]] = []
    for queries in QUERY_TOKENS:
        row = [seconds_of_a_task(kernel, queries, keys, options) if keys >= queries else None for keys in KEY_TOKENS]
        table.append(row)
        rates = [
            f"{(queries * (2 * keys - queries + 1) / 2) / seconds / 1e9:8.1f}" if seconds else " " * 8
            for keys, seconds in zip(KEY_TOKENS, row, strict=True)
        ]
        print(f"{queries:>7} queries, billions of pairs per second by keys: {' '.join(rates)}")
    content = {
        "device": torch.cuda.get_device_name(),
        "kernel": type(kernel).__name__,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "query_tokens": QUERY_TOKENS,
        "key_tokens": KEY_TOKENS,
        "seconds": table,
    }
    options.out.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
