"""Searches for the longest document that a model trains on, over all GPUs of this host.

    python scripts/benchmarks/longest_context.py --liger --out longest.json
    python scripts/benchmarks/longest_context.py --liger --gpu-gib 80 --checkpointing full --offload
    python scripts/benchmarks/longest_context.py --device cpu --ranks 2 --preset tiny --head none \\
        --first-tokens 256 --resolution 128 --gpu-gib 0.001

One document fills all ranks. Every length is an attempt in new processes, started by torchrun. It makes
--steps steps of forward, backward and AdamW (with a learning rate of 0, as in model_step.py). Lengths double, or
follow a line through the last two peaks, until memory is out, of a GPU or of the host. Then the gap is halved down to
--resolution (`lib/longest/launch.py`). Anything else that fails ends the search with status 1.

Memory is saved as docs/sizes.md says: layers are checkpointed, and what they keep waits on the host (--checkpointing
offloaded), FSDP2 divides weights, the loss is Liger's (--head liger). Beyond that

    --mlp-tokens N     MLPs run on N tokens at a time; 0: on all
    --attention-kv-heads N   attention modules run on N KV heads at a time; 0: on all
    --offload          weights, gradients and AdamW are on the host (FSDP2's CPUOffloadPolicy)

Steps of a million tokens take minutes, and the search with them. With --attended-tokens N kernels attend in a sliding
window of N keys: memory is as with whole attention, and times and losses mean nothing. Such a length is unconfirmed.
Search with whole attention from there, as `all_gpus.sh OUT longest` does: its tokens per rank are --first-tokens and
--most-tokens then.

Exit status 1: nothing trained, or an attempt failed for another reason.

Shapes change: set PYTORCH_ALLOC_CONF=expandable_segments:True, or torch runs out of memory earlier.

Host memory that attempts take is watched, and an attempt that leaves less than --host-margin-gib is stopped. --gpu-gib
makes GPUs as small as that for torch.

In the table, each figure of the slowest or largest rank:

    document       tokens of it, over all ranks
    attended       window of short attention; "all": whole attention. Otherwise times do not count
    step           the last one
    MFU            flops of the model, nothing twice, of the device's bf16 peak
    peak           memory that torch had given out at once
    host           memory of the host that the attempt took, all ranks together
    outcome        trained, or what ended the attempt
    took           the whole attempt, with the start of its processes
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib.heads import add_head
from lib.longest.attempt import attempt
from lib.longest.launch import Attempt, Tried, free_host_bytes, longest_of, next_tokens, run_attempt
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import above_zero, count, not_negative, whole, write_figures
from lib.tables import head, number, row


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
    """Attempts so far, and the time that they share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ranks = options.ranks or torch.cuda.device_count()
        self.attempts: dict[int, Attempt] = {}  # by the tokens of each rank
        self._began = time.monotonic()

    def run(self, folder: Path) -> str:
        """Tries lengths, and prints a row for each; returns why it ended."""
        options, limit = self.options, _limit_bytes(self.options)
        tokens: int | None = options.first_tokens
        while tokens:
            if options.most_tokens and tokens > options.most_tokens:
                return f"--most-tokens {options.most_tokens} ended the search"
            if self._seconds_left() < self._least_seconds(tokens):
                return f"--minutes {options.minutes} leave no time for {tokens} tokens per rank"
            if self._attempt(tokens, folder / str(tokens)).outcome == "time":
                return f"--minutes {options.minutes} ended while {tokens} tokens per rank trained"
            tokens = next_tokens(self._tried(), options.first_tokens, options.resolution, limit)
        return "memory ended the search"

    def longest(self) -> int | None:
        """Returns the most tokens of a rank that trained; None if none did."""
        longest = longest_of(self._tried())
        return longest.tokens if longest else None

    def _attempt(self, tokens: int, folder: Path) -> Attempt:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        given = ["--attempt", str(folder), "--tokens-per-rank", str(tokens)]
        margin = int(self.options.host_margin_gib * GIB)
        one = run_attempt([*launcher, *sys.argv, *given], folder, free_host_bytes, margin, self._seconds_left())
        self.attempts[tokens] = one
        print(self._row(tokens, one), flush=True)
        self.write("")  # the next attempt may be the last one that there is time for
        return one

    def _row(self, tokens: int, one: Attempt) -> str:
        figures = one.figures or dict.fromkeys(("step_seconds", "tokens_per_second", "utilisation", "peak_bytes"))
        attended = self.options.attended_tokens
        counts = not attended  # else the times are of another model
        return row(
            (
                f"{one.outcome}: {one.reason}" if one.reason else one.outcome,
                tokens,
                tokens * self.ranks,
                attended or "all",
                number(figures["step_seconds"], 1, 2),
                number(figures["tokens_per_second"] if counts else None, 1, 0),
                number(figures["utilisation"] if counts else None, 100, 1),
                number(figures["peak_bytes"] or None, 1 / GIB, 1),
                number(one.host_bytes, 1 / GIB, 1),
                number(one.seconds, 1, 0),
            )
        )

    def write(self, ended: str) -> None:
        """Writes all attempts so far, and why the search ended; "" while it goes on."""
        attempts = [{"tokens_per_rank": tokens, **vars(one)} for tokens, one in self.attempts.items()]
        facts = {"ranks": self.ranks, "ended": ended, "longest_tokens_per_rank": self.longest()}
        write_figures(self.options, **facts, attempts=attempts)

    def _tried(self) -> list[Tried]:
        """Returns the lengths tried, but for one that time ended."""
        return [
            Tried(tokens, one.outcome == "trained", one.figures["peak_bytes"] if one.figures else None)
            for tokens, one in self.attempts.items()
            if one.outcome != "time"
        ]

    def _seconds_left(self) -> float:
        return 60 * self.options.minutes - (time.monotonic() - self._began)

    def _least_seconds(self, tokens: int) -> float:
        """Returns the time that an attempt takes at least: that of any that trained on no more tokens."""
        return max((one.seconds for fewer, one in self.attempts.items() if one.figures and fewer <= tokens), default=0)


def search(options: argparse.Namespace) -> None:
    """Searches, and reports the longest, with what others have published if it trained with whole attention. Exits
    with a message if no length trained."""
    searching = Search(options)
    print(head(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="longest_context.") as folder:
        ended = searching.run(Path(folder))
    searching.write(ended)
    tokens, ranks, attended = searching.longest(), searching.ranks, options.attended_tokens
    if tokens is None:
        raise SystemExit(f"nothing trained: {ended}")
    figures = searching.attempts[tokens].figures
    assert figures is not None
    print(f"\n{figures['header']}")
    found = f"{tokens * ranks:,} tokens on {ranks} ranks, {tokens:,} on each"
    if attended:
        print(f"longest, unconfirmed: {found}, with attention to {attended} tokens; {ended}")
    else:
        print(f"longest: {found}; {ended}\n{PUBLISHED}")


def _limit_bytes(options: argparse.Namespace) -> int | None:
    """Returns the memory that torch can give out, without what others take of a GPU."""
    if options.device == "cpu":
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return int(min(0.95 * total, options.gpu_gib * GIB if options.gpu_gib else total))


def parse() -> argparse.Namespace:
    parser = shared_options(__doc__, MODES)
    add_head(parser, "liger")
    add = parser.add_argument
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
    options = parse_shared(parser, MODES)
    if options.checkpointing == "none":
        parser.error("--checkpointing none keeps everything: inputs of layers are put on the host by checkpointing")
    if options.first_tokens % options.resolution:
        parser.error(f"--first-tokens {options.first_tokens} is not a multiple of --resolution {options.resolution}")
    return options


if __name__ == "__main__":
    main()
