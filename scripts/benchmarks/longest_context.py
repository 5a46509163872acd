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
window of N keys: memory is as with whole attention, and times and losses mean nothing. Then the longest document is
tried with whole attention, and shorter ones if memory is out, for as long as --minutes allow. Only a length that
trained so is compared with published ones. If --minutes ended before one did, the length is printed as unconfirmed.

Exit status: 0 if a length was found, confirmed or not. 1 if nothing trained; if memory was out for every length that
whole attention tried, so that the found one is wrong; or if an attempt failed for another reason.

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
from collections.abc import Sequence
from pathlib import Path

import torch

from lib.longest.attempt import attempt
from lib.longest.launch import Attempt, Tried, free_host_bytes, longest_of, next_tokens, run_attempt
from lib.options import on_all_ranks, parse_shared, shared_options
from lib.parser import above_zero, count, not_negative, whole, write_figures
from lib.tables import head, number, row
from lib.whole_model import add_head


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
        # By the tokens that a query attends to (0: all) and the tokens of each rank.
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self._began = time.monotonic()

    def run(self, folder: Path) -> str:
        """Tries lengths, and prints a row for each; returns why it ended.

        With short attention the longest is tried with whole attention, too, and shorter ones if memory is out then.
        """
        attended_tokens = self.options.attended_tokens
        ended = self._try_lengths(attended_tokens, self.options.first_tokens, [], folder / "search")
        longest = self.longest(attended_tokens)
        if not attended_tokens or longest is None:
            return ended
        too_long = self.too_long(attended_tokens)
        return f"{ended}; with whole attention {self._try_lengths(0, longest, too_long, folder / 'whole')}"

    def longest(self, attended_tokens: int) -> int | None:
        """Returns the most tokens of a rank that trained with this attention; None if none did."""
        longest = longest_of(self._tried(attended_tokens))
        return longest.tokens if longest else None

    def too_long(self, attended_tokens: int) -> list[Tried]:
        """Returns the lengths for which memory was out with this attention."""
        return [one for one in self._tried(attended_tokens) if not one.trained]

    def _try_lengths(self, attended_tokens: int, first_tokens: int, too_long: Sequence[Tried], folder: Path) -> str:
        """Tries lengths with one kind of attention; returns why it ended. For lengths that are `too_long` memory is
        known to be out."""
        options, limit = self.options, _limit_bytes(self.options)
        tokens: int | None = first_tokens
        while tokens:
            if self._seconds_left() < self._least_seconds(tokens):
                return f"--minutes {options.minutes} leave no time for {tokens} tokens per rank"
            one = self._attempt(tokens, attended_tokens, folder / str(tokens))
            if one.outcome == "time":
                return f"--minutes {options.minutes} ended while {tokens} tokens per rank trained"
            tried = [*too_long, *self._tried(attended_tokens)]
            tokens = next_tokens(tried, first_tokens, options.resolution, limit)
        return "memory ended the search"

    def _attempt(self, tokens: int, attended_tokens: int, folder: Path) -> Attempt:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        given = ["--attempt", str(folder), "--tokens-per-rank", str(tokens), "--attended-tokens", str(attended_tokens)]
        margin = int(self.options.host_margin_gib * GIB)
        one = run_attempt([*launcher, *sys.argv, *given], folder, free_host_bytes, margin, self._seconds_left())
        self.attempts[attended_tokens, tokens] = one
        print(_row(tokens, self.ranks, one, attended_tokens), flush=True)
        self.write("")  # the next attempt may be the last one that there is time for
        return one

    def write(self, ended: str) -> None:
        """Writes all attempts so far, and why the search ended; "" while it goes on."""
        attempts = [
            {"attended_tokens": attended, "tokens_per_rank": tokens, **vars(one)}
            for (attended, tokens), one in self.attempts.items()
        ]
        facts = {"ranks": self.ranks, "ended": ended, "confirmed_tokens_per_rank": self.longest(0)}
        write_figures(self.options, **facts, attempts=attempts)

    def _tried(self, attended_tokens: int) -> list[Tried]:
        """Returns the lengths tried with this attention, but for those that time ended."""
        return [
            Tried(tokens, one.outcome == "trained", one.figures["peak_bytes"] if one.figures else None)
            for (attended, tokens), one in self.attempts.items()
            if attended == attended_tokens and one.outcome != "time"
        ]

    def _seconds_left(self) -> float:
        return 60 * self.options.minutes - (time.monotonic() - self._began)

    def _least_seconds(self, tokens: int) -> float:
        """Returns the time that an attempt takes at least: that of any that trained on no more tokens. Whole attention
        takes no less than short attention."""
        return max(
            (one.seconds for (_, fewer), one in self.attempts.items() if one.figures and fewer <= tokens), default=0.0
        )


def search(options: argparse.Namespace) -> None:
    """Searches, and reports the longest, with what others have published if it trained with whole attention. Exits
    with a message if no length trained, or memory was out for all that whole attention tried."""
    searching = Search(options)
    print(head(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="longest_context.") as folder:
        ended = searching.run(Path(folder))
    confirmed, shortened = searching.longest(0), searching.longest(options.attended_tokens)
    searching.write(ended)
    if confirmed is not None:
        print(f"\n{_header(searching, 0, confirmed)}")
        print(f"longest: {_words(searching, confirmed)}; {ended}")
        print(PUBLISHED)
    elif shortened is None:
        raise SystemExit(f"nothing trained: {ended}")
    elif searching.too_long(0):
        raise SystemExit(
            f"with attention to {options.attended_tokens} tokens {_words(searching, shortened)} trained, but with "
            f"whole attention memory was out for every length that was tried: {ended}"
        )
    else:
        print(f"\n{_header(searching, options.attended_tokens, shortened)}")
        print(
            f"longest, unconfirmed: {_words(searching, shortened)}, with attention to {options.attended_tokens} "
            f"tokens; {ended}\nNo length trained with whole attention: give more --minutes, and do not compare this "
            "one with published lengths"
        )


def _header(searching: Search, attended_tokens: int, tokens: int) -> str:
    figures = searching.attempts[attended_tokens, tokens].figures
    assert figures is not None
    return str(figures["header"])


def _words(searching: Search, tokens: int) -> str:
    return f"{tokens * searching.ranks:,} tokens on {searching.ranks} ranks, {tokens:,} on each"


def _limit_bytes(options: argparse.Namespace) -> int | None:
    """Returns the memory that torch can give out, without what others take of a GPU."""
    if options.device == "cpu":
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    return int(min(0.95 * total, options.gpu_gib * GIB if options.gpu_gib else total))


def _row(tokens: int, ranks: int, one: Attempt, attended_tokens: int) -> str:
    figures = one.figures or dict.fromkeys(("step_seconds", "tokens_per_second", "utilisation", "peak_bytes"))
    counts = not attended_tokens  # else the times are of another model
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
    parser = shared_options(__doc__, MODES)
    add_head(parser, "liger")
    add = parser.add_argument
    add("--ranks", type=count, help="processes; by default as many as there are GPUs")
    add("--first-tokens", type=count, default=65_536, help="of each rank, tried first")
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
