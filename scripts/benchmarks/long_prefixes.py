"""Times attention calls on long prefixes, as FlashAttention 4 makes them by itself and as the product makes them.

    python scripts/benchmarks/long_prefixes.py
    python scripts/benchmarks/long_prefixes.py --tasks '131072x131072' --heads 64/8x64

A task of 65536x262144 has so many queries against so many keys; 2*65536x131072 are two of them in one call. With `c`
behind it tasks are causal, and their queries are the last of their keys. Both ways run in turns on one GPU, forward
and backward apart. Their results are compared first: all but the gradient of the queries must be equal bit by bit, and
that within rounding, because blocks of keys add to it in any order. Else the script exits with 1 at its end.

In the table, TFLOP/s are medians of the rounds, and count what kernels compute: 4 operations for a pair of numbers
forward, 10 backward.
"""

import argparse
import importlib
import importlib.util
import re
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import NamedTuple

import torch

from distca_hf.kernels.flash4 import Flash4Kernel
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Saved, Spans
from lib.parser import count, parser_of
from lib.tables import head, row


TASKS = "32768x262144;65536x65536;65536x131072;65536x262144;131072x262144;2*65536x131072;16384x131072c;8192x65536c"
OPERATIONS = {"forward": 4, "backward": 10}
# Milliseconds of a round, in which a call is repeated: clocks of a GPU follow its power.
ROUND_MS = 500.0
# Gradients of queries in bf16, of their largest number.
ROUNDING = 2**-7


class Tasks(NamedTuple):
    """Equal tasks of one call."""

    words: str
    number: int
    queries: int
    keys: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Pairs that are attended, of one head."""
        hidden = self.queries * (self.queries - 1) // 2 if self.causal else 0
        return self.number * (self.queries * self.keys - hidden)


class Heads(NamedTuple):
    """Query heads, KV heads, and their dimension."""

    query: int
    key_value: int
    dim: int


class Call(NamedTuple):
    """Forward and backward of one kernel on the same tensors, and their results."""

    passes: dict[str, Callable[[], object]]
    results: dict[str, torch.Tensor]


def main() -> None:
    options = parse()
    if not torch.cuda.is_available() or importlib.util.find_spec("flash_attn.cute") is None:
        raise SystemExit("long_prefixes.py needs a GPU and FlashAttention 4 (pip install flash-attn-4)")
    device = torch.device("cuda")
    package = importlib.import_module("flash_attn.cute.interface")
    kernels = {"package": Flash4Kernel(package, lambda device: 0), "product": Flash4Kernel(package)}
    heads: Heads = options.heads
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flash-attn-4"))
    of_heads = f"{heads.query} query heads, {heads.key_value} KV heads of {heads.dim}"
    print("; ".join([versions, torch.cuda.get_device_name(device), of_heads]))
    print(head(["tasks", "pass", "TFLOP/s, package", "product", "product ÷ package"], 2))
    wrong = []
    for tasks in options.tasks:
        calls = {name: make(kernel, tasks, heads, device) for name, kernel in kernels.items()}
        wrong += [f"{tasks.words}: {what}" for what in differing(calls["package"], calls["product"])]
        for name, operations in OPERATIONS.items():
            runs = {way: call.passes[name] for way, call in calls.items()}
            flops = operations * heads.query * heads.dim * tasks.pairs
            package_rate, product_rate = (flops / ms / 1e9 for ms in in_turns(runs, options.rounds).values())
            rates = f"{package_rate:.0f}", f"{product_rate:.0f}", f"{product_rate / package_rate:.3f}"
            print(row([tasks.words, name, *rates]), flush=True)
    if wrong:
        raise SystemExit(f"results differ: {', '.join(wrong)}")


def make(kernel: Kernel, tasks: Tasks, heads: Heads, device: torch.device) -> Call:
    """Returns both passes of a kernel over random tasks, which are the same for all kernels, and their results."""
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, number: int) -> torch.Tensor:
        shape = rows, number, heads.dim
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows, key_rows = tasks.number * tasks.queries, tasks.number * tasks.keys
    q, dout = random(rows, heads.query), random(rows, heads.query)
    k, v = random(key_rows, heads.key_value), random(key_rows, heads.key_value)
    offsets = torch.arange(tasks.number + 1, device=device, dtype=torch.int32)
    spans = Spans(offsets * tasks.queries, offsets * tasks.keys, tasks.queries, tasks.keys)
    spec = AttentionSpec(heads.dim**-0.5, causal=tasks.causal)
    out, lse = kernel.forward(Inputs(q, k, v), spans, spec)
    saved, gradients = Saved(q, k, v, out, lse), Gradients(*(torch.empty_like(x) for x in (q, k, v)))
    kernel.backward(dout, saved, gradients, spans, spec)
    passes: dict[str, Callable[[], object]] = {
        "forward": lambda: kernel.forward(Inputs(q, k, v), spans, spec),
        "backward": lambda: kernel.backward(dout, saved, gradients, spans, spec),
    }
    return Call(passes, {"out": out, "lse": lse, **gradients._asdict()})


def differing(package: Call, product: Call) -> list[str]:
    """Returns names of results that differ."""
    wrong = []
    for name, right in package.results.items():
        result = product.results[name]
        if name == "dq_TNH":
            same = bool((result - right).abs().max() <= ROUNDING * right.abs().max())
        else:
            same = torch.equal(result, right)
        wrong += [] if same else [name]
    return wrong


def in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns milliseconds of a call, for each way: medians of rounds that take turns."""
    repeats = max(1, round(ROUND_MS / min(milliseconds(run, 1) for run in runs.values())))
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            times[way].append(milliseconds(run, repeats))
    return {way: statistics.median(each) for way, each in times.items()}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Returns milliseconds of a call, the mean of several behind each other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=all_tasks, default=TASKS, help=f"calls, by default {TASKS}")
    parser.add_argument("--heads", type=all_heads, default="32/8x128", help="query heads/KV heads x dimension")
    parser.add_argument("--rounds", type=count, default=3, help="rounds in which both ways take turns")
    return parser.parse_args()


def all_tasks(text: str) -> list[Tasks]:
    """Returns the calls of a text, as `type` of an option."""
    calls = []
    for words in text.split(";"):
        found = re.fullmatch(r"(?:(\d{1,4})\*)?(\d{1,7})x(\d{1,7})(c?)", words.strip())
        number, queries, keys = (int(given or 1) for given in found.groups()[:3]) if found else (0, 0, 0)
        causal = bool(found and found[4])
        if min(number, queries, keys) < 1 or (causal and keys < queries):
            raise argparse.ArgumentTypeError(
                f"{words!r} is no tasks like 65536x262144, 2*65536x131072 or 16384x131072c, which has no fewer keys "
                "than queries"
            )
        calls.append(Tasks(words.strip(), number, queries, keys, causal))
    return calls


def all_heads(text: str) -> Heads:
    """Returns the heads of a text, as `type` of an option."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})x(\d{1,3})", text)
    heads = Heads(*map(int, found.groups())) if found else Heads(0, 0, 0)
    if min(heads) < 1 or heads.query % heads.key_value:
        raise argparse.ArgumentTypeError(f"{text!r} is no heads like 32/8x128, query heads a multiple of KV heads")
    return heads


if __name__ == "__main__":
    main()
