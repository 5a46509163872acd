"""Times attention calls on long prefixes, as FlashAttention 4 makes them by itself and as distca_hf makes them.

    python scripts/benchmarks/long_prefixes.py
    python scripts/benchmarks/long_prefixes.py --tasks '131072x131072' --heads 64/8x64

A task of 65536x262144 has so many queries against so many keys; 2*65536x131072 are two of them in one call. With `c`
behind it tasks are causal, and their queries are the last of their keys. Both ways run in turns on one GPU, forward
and backward apart. Their results are compared first: all but the gradient of the queries must be equal bit by bit, and
that within rounding, because blocks of keys add to it in any order. Else the script exits with 1 before it times them.

In the table, TFLOP/s are medians of the rounds, and count what kernels compute for an attended pair and query head: 4
operations forward and 10 backward, times the head dimension. A ratio with `=` is of equal calls: it shows how far
figures can be trusted.
"""

import argparse
import importlib
import re
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from distca_hf.kernels.flash4 import Flash4Kernel, hopper_cache_bytes
from distca_hf.kernels.interface import AttentionSpec, Gradients, Inputs, Kernel, Saved, Spans
from distca_hf.kernels.registry import KERNELS
from lib.parser import count, parser_of
from lib.tables import head, row


TASKS = "32768x262144;65536x65536;65536x131072;65536x262144;131072x262144;2*65536x131072;16384x131072c;8192x65536c"
OPERATIONS = {"forward": 4, "backward": 10}
# Milliseconds of a round, in which a call is repeated: clocks of a GPU fall while its power comes to the limit.
ROUND_MS = 500.0
# Largest difference of gradients of queries in bf16, as a part of their largest number.
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
    device = torch.device("cuda", 0)
    missing = KERNELS["flash4"].missing()
    if not torch.cuda.is_available() or not hopper_cache_bytes(device) or missing:
        raise SystemExit(f"long_prefixes.py needs a Hopper GPU, and FlashAttention 4, which {missing or 'is there'}")
    calls_made = list[object]()
    package = noting(importlib.import_module("flash_attn.cute.interface"), calls_made)
    kernels = {"package": Flash4Kernel(package, lambda device: 0), "distca_hf": Flash4Kernel(package)}
    heads: Heads = options.heads
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flash-attn-4"))
    of_heads = f"{heads.query} query heads, {heads.key_value} KV heads of {heads.dim}"
    print("; ".join([versions, torch.cuda.get_device_name(device), of_heads]))
    print(head(["tasks", "pass", "TFLOP/s, package", "distca_hf", "distca_hf ÷ package"], 2))
    for tasks in options.tasks:
        calls = {name: make(kernel, tasks, heads, device) for name, kernel in kernels.items()}
        check_equal(tasks, calls["package"], calls["distca_hf"])
        for name, operations in OPERATIONS.items():
            runs = {way: call.passes[name] for way, call in calls.items()}
            equal = "" if made_by(runs["package"], calls_made) != made_by(runs["distca_hf"], calls_made) else " ="
            flops = operations * heads.query * heads.dim * tasks.pairs
            package_rate, our_rate = (flops / ms / 1e9 for ms in in_turns(runs, options.rounds).values())
            rates = f"{package_rate:.0f}", f"{our_rate:.0f}", f"{our_rate / package_rate:.3f}{equal}"
            print(row([tasks.words, name, *rates]), flush=True)


def noting(package: ModuleType, calls: list[object]) -> ModuleType:
    """Returns the package's two functions; each call leaves its rows, heads and packing in a list."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: torch.Tensor, *given: Any, **named: Any) -> Any:
            calls.append((q.shape, named.get("pack_gqa")))
            return function(q, *given, **named)

        return call

    names = "_flash_attn_fwd", "_flash_attn_bwd"
    return cast(ModuleType, SimpleNamespace(**{name: noted(getattr(package, name)) for name in names}))


def made_by(run: Callable[[], object], calls: list[object]) -> list[object]:
    """Returns the calls of the package that a pass makes."""
    calls.clear()
    run()
    return calls.copy()


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


def check_equal(tasks: Tasks, package: Call, ours: Call) -> None:
    """Ends the program if results differ, before a time limit may end it."""
    if wrong := differing(package, ours):
        raise SystemExit(f"{tasks.words}: results differ: {', '.join(wrong)}")


def differing(package: Call, ours: Call) -> list[str]:
    """Returns names of results that differ."""
    wrong = []
    for name, right in package.results.items():
        result = ours.results[name]
        if name == "dq_TNH":
            same = bool((result - right).abs().max() <= ROUNDING * right.abs().max())
        else:
            same = torch.equal(result, right)
        wrong += [] if same else [name]
    return wrong


def in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns milliseconds of a call, for each way: medians of rounds that take turns, behind one that warms up."""
    repeats = max(1, round(ROUND_MS / min(milliseconds(run, 1) for run in runs.values())))
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(1 + rounds):
        for way, run in runs.items():
            times[way].append(milliseconds(run, repeats))
    return {way: statistics.median(each[1:]) for way, each in times.items()}


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
                f"{words!r} does not say tasks: write 65536x262144, 2*65536x131072, or 16384x131072c with no fewer "
                "keys than queries"
            )
        calls.append(Tasks(words.strip(), number, queries, keys, causal))
    return calls


def all_heads(text: str) -> Heads:
    """Returns the heads of a text, as `type` of an option."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})x(\d{1,3})", text)
    heads = Heads(*map(int, found.groups())) if found else Heads(0, 0, 0)
    if min(heads) < 1 or heads.query % heads.key_value:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not say heads: write 32/8x128, query heads a multiple of KV heads"
        )
    return heads


if __name__ == "__main__":
    main()
