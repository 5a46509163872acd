"""Searches for the longest document that a model trains on, over all GPUs of this host.

    python scripts/benchmarks/longest_context.py --liger --out longest.json
    python scripts/benchmarks/longest_context.py --liger --gpu-gib 80 --checkpointing full --offload
    python scripts/benchmarks/longest_context.py --device cpu --ranks 2 --config c.json --head none \\
        --first-tokens 256 --resolution 128 --gpu-gib 0.001

One document fills all ranks. Every length is an attempt in processes of its own, started by torchrun. It makes
--steps steps of forward, backward and AdamW (with a learning rate of 0, as in model_step.py). Lengths double, or
follow a line through the last two peaks, until memory is out, of a GPU or of the host. Then the gap is halved down to
--resolution (`lib/longest_search.py`). Anything else that fails ends the search with status 1.

Memory is saved as docs/sizes.md says: layers are checkpointed and attention outputs wait on the host
(--checkpointing offloaded), FSDP2 divides weights, the loss is Liger's (--head liger). Beyond that

    --host-layers N    inputs of the first N layers, which checkpointing keeps, wait on the host, too; all by default
    --mlp-tokens N     MLPs run on N tokens at a time
    --offload          weights, gradients and AdamW are on the host (FSDP2's CPUOffloadPolicy)

Steps of a million tokens take minutes, and the search with them. With --attended-tokens N kernels attend to the last N
keys of a query alone: memory and exchanges stay, a step takes a fraction of the time, and its losses mean nothing. At
its end the longest document is tried with whole attention, for as long as --minutes allow.

Shapes change: set PYTORCH_ALLOC_CONF=expandable_segments:True, or torch runs out of memory earlier.

Host memory that attempts take is watched, and an attempt that leaves less than --host-margin-gib is stopped. --gpu-gib
makes GPUs as small as that for torch.

In the table, each figure of the slowest or largest rank:

    document       tokens of it, over all ranks
    attended       keys that a query attends to; "all", or times do not count
    step           the last one
    MFU            flops of the model, nothing twice, of the device's bf16 peak
    peak           memory that torch had given out at once
    host           memory of the host that the attempt took, all ranks together
    outcome        trained, or what ended the attempt
    took           the whole attempt, with the start of its processes
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib.attempts import Attempt, run_attempt
from lib.head import HEADS
from lib.host_memory import free_host_bytes
from lib.longest_attempt import attempt
from lib.longest_search import Tried, longest_of, next_tokens
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.tables import head, number, row
from lib.training_rounds import OPTIMIZERS


GIB = 2**30
COLUMNS = (
    "outcome",
    "tokens per rank",
    "document",
    "attended",
    "step s",
    "tokens/s/GPU",
    "MFU %",
    "peak GiB",
    "host GiB",
    "took s",
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
    """Attempts so far, and the time that they share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ranks = options.ranks or torch.cuda.device_count()
        self.tried: list[Tried] = []
        self.attempts: list[Attempt] = []
        self._began = time.monotonic()

    def run(self, folder: Path) -> str:
        """Tries lengths, and prints a row for each; returns why it ended."""
        options, limit = self.options, _limit_bytes(self.options)
        while tokens := next_tokens(self.tried, options.first_tokens, options.resolution, limit):
            if self._seconds_left() < self._least_seconds(tokens):
                return f"--minutes {options.minutes} leave no time for {tokens} tokens per rank"
            one = self._attempt(tokens, options.attended_tokens, folder / str(tokens))
            if one.outcome == "time":
                return f"--minutes {options.minutes} ended while {tokens} tokens per rank trained"
            peak = one.figures["peak_bytes"] if one.figures else None
            self.tried.append(Tried(tokens, one.outcome == "trained", peak))
        longest = longest_of(self.tried)
        if options.attended_tokens and longest is not None:
            whole = self._attempt(longest.tokens, 0, folder / "whole")
            return f"memory is out beyond it; with whole attention at this length: {whole.outcome}"
        return "memory is out beyond it"

    def _attempt(self, tokens: int, attended_tokens: int, folder: Path) -> Attempt:
        options = self.options
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        given = ["--attempt", str(folder), "--tokens-per-rank", str(tokens), "--attended-tokens", str(attended_tokens)]
        margin = int(options.host_margin_gib * GIB)
        command = [*launcher, *sys.argv, *given]
        one = run_attempt(command, folder, free_host_bytes, margin, self._seconds_left())
        self.attempts.append(one)
        print(_row(tokens, self.ranks, one, attended_tokens), flush=True)
        return one

    def _seconds_left(self) -> float:
        return 60 * self.options.minutes - (time.monotonic() - self._began)

    def _least_seconds(self, tokens: int) -> float:
        """Returns the time that an attempt takes at least: that of the longest so far, which was shorter."""
        longest = longest_of(self.tried)
        return self.attempts[self.tried.index(longest)].seconds if longest and tokens > longest.tokens else 0.0


def search(options: argparse.Namespace) -> None:
    """Searches, and reports the longest that trained beside what others have published.

    Raises:
        SystemExit: no length trained.
    """
    searching = Search(options)
    print(head(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="longest_context.") as folder:
        ended = searching.run(Path(folder))
    ranks, longest = searching.ranks, longest_of(searching.tried)
    if options.out:
        given = {name: str(value) for name, value in vars(options).items()}
        attempts = [vars(one) for one in searching.attempts]
        options.out.write_text(json.dumps({"options": given, "ranks": ranks, "ended": ended, "attempts": attempts}))
    if longest is None:
        raise SystemExit(f"nothing trained: {ended}")
    figures = searching.attempts[searching.tried.index(longest)].figures
    assert figures is not None
    print(f"\n{figures['header']}")
    print(f"longest: {longest.tokens * ranks:,} tokens on {ranks} ranks, {longest.tokens:,} on each; {ended}")
    print(PUBLISHED)


def _limit_bytes(options: argparse.Namespace) -> int | None:
    """Returns the memory that torch can give out, without what others take of a GPU."""
    if options.device == "cpu":
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return int(min(0.95 * total, options.gpu_gib * GIB if options.gpu_gib else total))


def _row(tokens: int, ranks: int, one: Attempt, attended_tokens: int) -> str:
    figures = one.figures or dict.fromkeys(("step_seconds", "tokens_per_second", "utilisation", "peak_bytes"))
    counts = not attended_tokens  # else times are those of another model
    return row(
        (
            f"{one.outcome}: {one.reason}" if one.reason else one.outcome,
            tokens,
            tokens * ranks,
            attended_tokens or "all",
            number(figures["step_seconds"], 1, 2),
            number(figures["tokens_per_second"] if counts else None, 1, 0),
            number(figures["utilisation"] if counts else None, 100, 1),
            number(figures["peak_bytes"] or None, 1 / GIB, 1),
            number(one.host_bytes, 1 / GIB, 1),
            number(one.seconds, 1, 0),
        )
    )


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__)
    parser.add_argument("--ranks", type=int, help="processes; by default as many as there are GPUs")
    parser.add_argument("--first-tokens", type=int, default=65_536, help="of each rank, tried first")
    parser.add_argument("--resolution", type=int, default=16_384, help="tokens of a rank to which the limit is found")
    parser.add_argument("--steps", type=int, default=2, help="of each attempt")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which the search ends")
    parser.add_argument("--head", choices=[*HEADS], default="liger", help="none is Transformers' own")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adamw_torch_fused", help="as Trainer names it")
    parser.add_argument("--host-layers", type=int, help="layers whose inputs wait on the host; by default all")
    parser.add_argument("--mlp-tokens", type=int, default=16_384, help="that an MLP takes at once; 0: all")
    parser.add_argument("--attended-tokens", type=int, default=0, help="that a query attends to; 0: all")
    parser.add_argument("--offload", action="store_true", help="weights and optimizer on the host")
    parser.add_argument("--gpu-gib", type=float, help="memory that torch may give out; on CPUs made up")
    parser.add_argument("--host-margin-gib", type=float, default=16.0, help="of the host, that stay free")
    parser.add_argument("--attempt", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens-per-rank", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(checkpointing="offloaded", modes="placed")
    options = parse_shared(parser, ("placed",))
    if options.checkpointing == "none":
        parser.error("--checkpointing none keeps everything: inputs of layers are put on the host by checkpointing")
    if options.first_tokens % options.resolution:
        parser.error(f"--first-tokens {options.first_tokens} is no multiple of --resolution {options.resolution}")
    return options


if __name__ == "__main__":
    main()
