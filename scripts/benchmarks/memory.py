"""Watches a GPU's memory while documents, and with them all shapes of attention, are others in every step.

    torchrun --nproc-per-node 2 scripts/benchmarks/memory.py --layers 4 --tokens-per-rank 65536 --steps 60

Document lengths are drawn from a mix (`lib/planning/mixes.py`) without end. A step is forward and backward of the
model without its head. Each way to make batches, which is a mode, begins with an empty cache.

One line for every part of the steps, each figure of the rank that has the largest: most bytes given out at once, most
bytes that torch held for that, their ratio (1: nothing is fragmented), and how often it asked the device for memory,
since the part began, and had to give back its cache to get it.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, pairwise, repeat

import datasets
import numpy as np
import torch
import torch.distributed as dist

import distca_hf
from lib.model import Backbone, build_model, prepare, read_config
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import add_tokens_per_rank, count
from lib.planning.mixes import MIXES
from lib.planning.mixes import batch as draw_lengths
from lib.report import facts_of
from lib.tables import head
from lib.wires import largest, synchronize


COUNTERS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_device_alloc", "num_alloc_retries")
WAYS = {
    "constant": "placed documents, the same ones in every step",
    "placed": "the product: batches of plugin.dataloader",
}
COLUMNS = ("batches", "steps", "given out GiB", "held GiB", "held ÷ given out", "asked for", "given back")
GIB = 2**30
Batches = Iterator[dict[str, object]]


def main() -> None:
    parser = shared_options(__doc__, WAYS)
    parser.add_argument("--mix", choices=MIXES, default="prolong_up", help="of lengths (lib/planning/mixes.py)")
    parser.add_argument("--longest", type=count, help="longest document; by default as many tokens as a rank holds")
    add_tokens_per_rank(parser, 65_536)
    parser.add_argument("--steps", type=count, default=60, help="of each way to make batches")
    parser.add_argument("--parts", type=count, default=3, help="to report the steps in")
    on_all_ranks(measure, parse_shared(parser))


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Runs all ways, and reports on rank 0."""
    datasets.disable_progress_bars()
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
    tokens, longest = options.tokens_per_rank, options.longest or options.tokens_per_rank
    config = read_config(options, longest)
    model = Backbone(build_model(config, options, device))
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=tokens, kernel=options.kernel)
    distca_hf.enable(model, plugin, longest)
    prepare(model, options, device)
    options.documents = f"{options.mix}, longest {longest}"
    say("; ".join(facts_of(options, config, tokens, device)))
    say("\n" + head(COLUMNS, text_columns=2))
    for way in options.modes or WAYS:
        batches = _batches(way, options, plugin, config.get_text_config().vocab_size, longest, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for first, last in pairwise(np.linspace(0, options.steps, min(options.parts, options.steps) + 1, dtype=int)):
            figures = _run(model, islice(batches, last - first), device)
            say(f"| {way} | {first + 1} to {last} | {figures} |")


def _run(model: Backbone, batches: Batches, device: torch.device) -> str:
    """Columns for some steps."""
    before = _counters(device)
    for batch in batches:
        model(**batch).backward()
        model.zero_grad(set_to_none=True)
    synchronize(device)
    after = _counters(device)
    numbers = [*after[:2], *(now - then for now, then in zip(after[2:], before[2:], strict=True))]
    given_out, held, asked, given_back = largest(numbers, device)
    ratio = f"{held / given_out:.3f}" if given_out else "-"
    return f"{given_out / GIB:.2f} | {held / GIB:.2f} | {ratio} | {asked:.0f} | {given_back:.0f}"


def _counters(device: torch.device) -> list[int]:
    """Reads `COUNTERS`; peaks are counted anew from here."""
    if device.type != "cuda":
        return [0] * len(COUNTERS)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return [stats[name] for name in COUNTERS]


def _batches(
    way: str,
    options: argparse.Namespace,
    plugin: distca_hf.DistCAPlugin,
    vocabulary: int,
    longest: int,
    device: torch.device,
) -> Batches:
    """Batches without end."""
    steps = options.steps if way == "placed" else 1
    rng = np.random.default_rng(0)
    lengths = chain.from_iterable(
        draw_lengths(options.mix, dist.get_world_size(), options.tokens_per_rank, longest, seed)
        for seed in range(steps + 2)
    )
    documents = [rng.integers(0, vocabulary, tokens, dtype=np.int32) for tokens in lengths]
    loader = plugin.dataloader(datasets.Dataset.from_dict({"input_ids": documents}), device=device)
    names = ("input_ids", "position_ids", "distca_plan")
    made = ({name: batch[name] for name in names} for batch in loader)
    yield from repeat(next(made)) if way == "constant" else made


if __name__ == "__main__":
    main()
