"""Searches for the longest document that a model trains on, over all GPUs of this host.

    python scripts/benchmarks/longest_context.py --liger --out longest.json
    python scripts/benchmarks/longest_context.py --liger --gpu-gib 80 --checkpointing full --offload
    python scripts/benchmarks/longest_context.py --device cpu --ranks 2 --preset tiny --head none \\
        --first-tokens 256 --resolution 128 --gpu-gib 0.001

One document fills all ranks. Every length is an attempt in new processes, started by torchrun, of --steps steps of
forward, backward and AdamW (with a learning rate of 0). Lengths double, or follow a line through the last two peaks,
until memory is out, of a GPU or of the host; then the gap is halved down to --resolution (`lib/longest.py`). Exit
status 1: nothing trained, or an attempt failed for another reason.

Memory is saved as docs/sizes.md says: by --checkpointing offloaded, FSDP2 and Liger's loss (--head liger), by
--mlp-tokens and --attention-kv-heads, and with --offload weights, gradients and AdamW are on the host. Shapes change:
set PYTORCH_ALLOC_CONF=expandable_segments:True, or torch runs out of memory earlier. An attempt that leaves less of
the host's memory than --host-margin-gib is stopped; --gpu-gib makes GPUs as small as that for torch.

Steps of a million tokens take minutes. With --attended-tokens N kernels attend in a sliding window of N keys: memory
is as with whole attention, times and losses mean nothing, and the length found is unconfirmed. Search with whole
attention from there, as `all_gpus.sh OUT longest` does.

In the table, "attended" is that window, the step is the last one, "host" the memory that all ranks together took, and
"took" the whole attempt with the start of its processes. Other columns: README.md.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from distca_hf.config import KernelName
from distca_hf.kernels.interface import NEW, AttentionSpec, Gradients, Inputs, Kernel, Outputs, Room, Saved, Spans
from distca_hf.kernels.registry import Operands, choose_kernel
from distca_hf.runtime import alike_layers
from lib.documents import random_tokens
from lib.longest import (
    OUT_OF_MEMORY,
    RESULT,
    Attempt,
    free_host_bytes,
    is_out_of_memory,
    longest_of,
    next_tokens,
    run_attempt,
)
from lib.model import read_config
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import above_zero, count, not_negative, whole, write_figures
from lib.place import Place
from lib.report import facts_of, load_of, rates_of
from lib.tables import head, number, row
from lib.whole_model import HEADS, TrainingRunner, build_planned, use_head
from lib.wires import WiredPlugin


GIB = 2**30
MODES = {"placed": "the product: batches of plugin.dataloader"}
COLUMNS = (
    *("outcome", "tokens per rank", "document", "attended", "step s", "tokens/s/GPU", "MFU %"),
    *("peak GiB", "host GiB", "took s"),
)
PUBLISHED = (
    "ALST (arXiv 2506.13996) publishes for Llama-8B on H100s of 80 GB: 500,000 tokens on one GPU; 3,700,000 on 8, "
    "which is 462,500 per GPU; 15,000,000 on 32, which is 468,750 per GPU"
)


def main() -> None:
    options = parse()
    if options.attempt:
        on_all_ranks(attempt, options)
    else:
        search(options)


class Search:
    """Attempts so far by the tokens of each rank, and the time that they share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ranks = options.ranks or torch.cuda.device_count()
        self.attempts: dict[int, Attempt] = {}
        self._began = time.monotonic()

    def run(self, folder: Path) -> str:
        """Tries lengths, and prints a row for each; returns why it ended."""
        options, tokens, limit = self.options, self.options.first_tokens, None
        if options.device == "cuda":  # what torch can give out, without what others take of a GPU
            total = torch.cuda.get_device_properties(0).total_memory
            limit = int(min(0.95 * total, options.gpu_gib * GIB if options.gpu_gib else total))
        while tokens:
            if options.most_tokens and tokens > options.most_tokens:
                return f"--most-tokens {options.most_tokens} ended the search"
            left = 60 * options.minutes - (time.monotonic() - self._began)
            # An attempt takes at least as long as any that trained on no more tokens.
            took = [one.seconds for fewer, one in self.attempts.items() if one.figures and fewer <= tokens]
            if left < max(took, default=0):
                return f"--minutes {options.minutes} leave no time for {tokens} tokens per rank"
            if self._attempt(tokens, folder / str(tokens), left).outcome == "time":
                return f"--minutes {options.minutes} ended while {tokens} tokens per rank trained"
            tokens = next_tokens(self.attempts, options.first_tokens, options.resolution, limit)
        return "memory ended the search"

    def _attempt(self, tokens: int, folder: Path, seconds_left: float) -> Attempt:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        given = ["--attempt", str(folder), "--tokens-per-rank", str(tokens)]
        margin = int(self.options.host_margin_gib * GIB)
        one = run_attempt([*launcher, *sys.argv, *given], folder, free_host_bytes, margin, seconds_left)
        self.attempts[tokens] = one
        print(self._row(tokens, one), flush=True)
        self.write("")  # the next attempt may be the last one that there is time for
        return one

    def _row(self, tokens: int, one: Attempt) -> str:
        figures = one.figures or dict.fromkeys(("step_seconds", "tokens_per_second", "utilisation", "peak_bytes"))
        attended = self.options.attended_tokens  # rates are of another model if there are some
        cells = [
            f"{one.outcome}: {one.reason}" if one.reason else one.outcome,
            tokens,
            tokens * self.ranks,
            attended or "all",
            number(figures["step_seconds"], 1, 2),
            number(None if attended else figures["tokens_per_second"], 1, 0),
            number(None if attended else figures["utilisation"], 100, 1),
            number(figures["peak_bytes"] or None, 1 / GIB, 1),
            number(one.host_bytes, 1 / GIB, 1),
            number(one.seconds, 1, 0),
        ]
        return row(cells)

    def write(self, ended: str) -> None:
        """Writes all attempts so far, and why the search ended; "" while it goes on."""
        attempts = [{"tokens_per_rank": tokens, **vars(one)} for tokens, one in self.attempts.items()]
        facts = {"ranks": self.ranks, "ended": ended, "longest_tokens_per_rank": longest_of(self.attempts)}
        write_figures(self.options, **facts, attempts=attempts)


def search(options: argparse.Namespace) -> None:
    """Searches, and reports the longest, with what others have published if it trained with whole attention. Exits
    with a message if no length trained."""
    searching = Search(options)
    print(head(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="longest_context.") as folder:
        ended = searching.run(Path(folder))
    searching.write(ended)
    tokens, ranks, attended = longest_of(searching.attempts), searching.ranks, options.attended_tokens
    figures = searching.attempts[tokens].figures if tokens else None
    if tokens is None or figures is None:
        raise SystemExit(f"nothing trained: {ended}")
    found = f"{tokens * ranks:,} tokens on {ranks} ranks, {tokens:,} on each"
    if attended:
        told = f"longest, unconfirmed: {found}, with attention to {attended} tokens; {ended}"
    else:
        told = f"longest: {found}; {ended}\n{PUBLISHED}"
    print(f"\n{figures['header']}\n{told}")


def attempt(options: argparse.Namespace, device: torch.device) -> None:
    """Trains on one document; writes figures, or that this rank is out of memory, to the folder of the attempt. A
    collective call."""
    try:
        figures = _train(options, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first_line = f"rank {dist.get_rank()}: {type(error).__name__}: {error}".partition("\n")[0]
        (options.attempt / OUT_OF_MEMORY.format(rank=dist.get_rank())).write_text(first_line)
        os._exit(1)  # other ranks wait for this one: nothing can be torn down in order
    if dist.get_rank() == 0:
        (options.attempt / RESULT).write_text(json.dumps(figures))


def _train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    length = num_ranks * options.tokens_per_rank
    options.lengths, options.documents = [length], str(length)
    config = read_config(options, length)
    _limit_memory(options, config, device)
    tiles = {"mlp_tokens": options.mlp_tokens, "attention_kv_heads": options.attention_kv_heads}
    place = Place.build(config, options, device, plugins=partial(WiredPlugin, **tiles))
    use_head(place.model, options.head)
    place.enable(options.tokens_per_rank, length, options)
    documents = random_tokens([length], config.get_text_config().vocab_size)
    mode, _ = build_planned("placed", place, documents, options.steps)
    runner = TrainingRunner(place)
    with short_attention(options.attended_tokens):
        measured = runner.run([mode], warmup=options.steps - 1, rounds=1)["placed"]
    if not math.isfinite(measured.loss):
        raise SystemExit(f"the loss is {measured.loss}")
    load = load_of(options, place.shape, num_ranks, device)
    facts = [
        *facts_of(options, config, load.tokens, device),
        f"head {options.head}, fused AdamW" + " on the host" * options.offload,
        f"MLPs on {options.mlp_tokens or 'all'} tokens at a time",
        f"attention on {options.attention_kv_heads or 'all'} KV heads at a time",
        *[f"at most {options.gpu_gib} GiB of a GPU"] * bool(options.gpu_gib),
    ]
    return {**rates_of(measured, load), "tokens_per_rank": options.tokens_per_rank, "header": "; ".join(facts)}


def _limit_memory(options: argparse.Namespace, config: PreTrainedConfig, device: torch.device) -> None:
    """Makes the GPU as small as was asked; a CPU fails as if its layers' inputs did not fit."""
    if options.gpu_gib is None:
        return
    limit = options.gpu_gib * GIB
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info(device)[1], device)
        return
    needed = options.tokens_per_rank * config.num_hidden_layers * config.hidden_size * options.dtype.itemsize
    if needed > limit:
        raise torch.OutOfMemoryError(f"inputs of layers need {needed} bytes, {limit:.0f} are allowed")


class ShortKernel:
    """A kernel with a sliding window, whatever it is asked for."""

    def __init__(self, kernel: Kernel, window_tokens: int) -> None:
        self._kernel, self._window_tokens = kernel, window_tokens

    def forward(self, inputs: Inputs, spans: Spans, spec: AttentionSpec, room: Room = NEW) -> Outputs:
        return self._kernel.forward(inputs, spans, spec._replace(window_tokens=self._window_tokens), room)

    def backward(
        self, dout_TNV: torch.Tensor, saved: Saved, gradients: Gradients, spans: Spans, spec: AttentionSpec
    ) -> None:
        self._kernel.backward(dout_TNV, saved, gradients, spans, spec._replace(window_tokens=self._window_tokens))


@contextmanager
def short_attention(window_tokens: int) -> Iterator[None]:
    """Lets the product choose kernels with a window of so many keys meanwhile; 0: nothing changes."""

    def choose(name: KernelName, operands: Operands, spec: AttentionSpec) -> Kernel:
        asked = spec._replace(window_tokens=window_tokens)
        return ShortKernel(choose_kernel(name, operands, asked), window_tokens)

    if not window_tokens:
        yield
        return
    with mock.patch.object(alike_layers, "choose_kernel", choose):
        yield


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    add = parser.add_argument
    add("--head", choices=HEADS, default="liger", help="none is Transformers' own")
    add("--ranks", type=count, help="processes; by default as many as there are GPUs")
    add("--first-tokens", type=count, default=65_536, help="of each rank, tried first")
    add("--most-tokens", type=count, help="of each rank; more are not tried")
    add("--resolution", type=count, default=16_384, help="tokens of a rank to which the limit is found")
    add("--steps", type=count, default=2, help="of each attempt")
    add("--minutes", type=above_zero, default=60.0, help="after which the search ends")
    add("--mlp-tokens", type=whole, default=16_384, help="see the setting mlp_tokens")
    add("--attention-kv-heads", type=whole, default=0, help="see the setting attention_kv_heads")
    add("--attended-tokens", type=whole, default=0, help="window of short attention; 0: whole attention")
    add("--offload", action="store_true", help="weights and optimizer on the host")
    add("--gpu-gib", type=above_zero, help="memory that torch may give out; on CPUs made up")
    add("--host-margin-gib", type=not_negative, default=16.0, help="of the host, that stay free")
    add("--attempt", type=Path, help=argparse.SUPPRESS)
    add("--tokens-per-rank", type=count, help=argparse.SUPPRESS)
    parser.set_defaults(checkpointing="offloaded", modes="placed")
    options = parse_shared(parser)
    if options.checkpointing == "none":
        parser.error("--checkpointing none keeps everything: inputs of layers are put on the host by checkpointing")
    if options.first_tokens % options.resolution:
        parser.error(f"--first-tokens {options.first_tokens} is not a multiple of --resolution {options.resolution}")
    return options


if __name__ == "__main__":
    main()
