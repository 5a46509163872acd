"""Weak scaling: documents for more and more GPUs with as many tokens for each, and the table of their steps."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.planning.mixes import batch
from lib.tables import markdown


SHORTEST_TOKENS = 128
COLUMNS = (
    "documents",
    "GPUs",
    "longest",
    "tokens/GPU",
    "billion pairs/GPU, all layers",
    "one GPU ms",
    "placed ms",
    "tokens/s/GPU, one",
    "placed",
    "÷ one GPU",
    "from, to",
    "ideal ÷ one GPU",
    "exchanged GB",
)


@dataclass(frozen=True)
class Documents:
    """Documents of a step.

    Attributes:
        kind: "mix" or "copies".
        gpus: that share them.
        lengths: of the documents, in tokens.
    """

    kind: str
    gpus: int
    lengths: tuple[int, ...]

    @property
    def text(self) -> str:
        """Returns the lengths as options take them."""
        return ",".join(map(str, self.lengths))


@dataclass(frozen=True)
class Round:
    """Documents measured once in each way.

    Attributes:
        alone: figures of one GPU with the part of one of them in an even spread, by `lib.report.figures_of`.
        alone_load, shared_load: tokens and pairs of that GPU, and of each of all GPUs on average.
        shared: figures of all modes on all GPUs.

    Raises:
        SystemExit: tokens or pairs of a GPU are not those of the one alone.
    """

    alone: Mapping[str, Any]
    alone_load: Mapping[str, Any]
    shared_load: Mapping[str, Any]
    shared: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("tokens", "pairs"):
            if self.alone_load[name] != self.shared_load[name]:
                numbers = f"{self.alone_load[name]} {name}, and each of all {self.shared_load[name]}"
                raise SystemExit(f"work is not equal: one GPU has {numbers}")

    def ratio(self, mode: str) -> float:
        """Returns tokens per second and GPU over those of one GPU at equal work: tokens and pairs are the same."""
        seconds: float = self.alone["step_seconds"] / self.shared[mode]["step_seconds"]
        return seconds


def documents_of(mix: str, sizes: Sequence[int], tokens_per_gpu: int, seed: int) -> list[Documents]:
    """Returns a mix for one GPU; one for every number of GPUs, with documents as long as all of them may hold; and as
    many copies of the first, whose documents all fit on one GPU.

    Args:
        mix: its name in `lib/planning/mixes.py`.
        sizes: numbers of GPUs.
        tokens_per_gpu: a multiple of 128.
        seed: of what is drawn.
    """
    one, *mixed = [
        Documents("mix", gpus, _stepped(batch(mix, gpus, tokens_per_gpu, gpus * tokens_per_gpu, seed).tolist()))
        for gpus in (1, *sizes)
    ]
    return [one, *mixed, *(Documents("copies", gpus, one.lengths * gpus) for gpus in sizes)]


def _stepped(drawn: Sequence[int]) -> tuple[int, ...]:
    """Returns documents of as many tokens, with few lengths: powers of two, one and a half of them, and 128 at least.

    In an even spread each GPU then has nearly all documents whole, and all can be cut in equal chunks. All tokens
    together are a multiple of 128.
    """
    left, lengths = sum(drawn), []
    assert left % SHORTEST_TOKENS == 0, f"{left} tokens are no multiple of {SHORTEST_TOKENS}"
    for tokens in drawn:
        lengths.append(_step(min(tokens, left)))
        left -= lengths[-1]
        if not left:
            break
    while left:
        lengths.append(_step(min(left, 4096)))
        left -= lengths[-1]
    return tuple(lengths)


def _step(tokens: int) -> int:
    """Returns the longest such length up to so many tokens."""
    power = 1 << (max(tokens, SHORTEST_TOKENS).bit_length() - 1)
    return power + power // 2 if power > SHORTEST_TOKENS and tokens >= power + power // 2 else power


def row_of(documents: Documents, rounds: Sequence[Round]) -> tuple[str, ...]:
    """Returns the cells of a row: medians over rounds, and the smallest and largest ratio."""
    load, ratios = rounds[0].shared_load, [each.ratio("placed") for each in rounds]
    alone = statistics.median(each.alone["step_seconds"] for each in rounds)
    placed = statistics.median(each.shared["placed"]["step_seconds"] for each in rounds)
    return (
        documents.kind,
        str(documents.gpus),
        str(max(documents.lengths)),
        str(load["tokens"]),
        f"{load['pairs'] / 1e9:.3f}",
        f"{1e3 * alone:.1f}",
        f"{1e3 * placed:.1f}",
        f"{load['tokens'] / alone:.0f}",
        f"{load['tokens'] / placed:.0f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f}, {max(ratios):.3f}",
        f"{statistics.median(each.ratio('ideal') for each in rounds):.3f}",
        f"{1e-9 * rounds[0].shared['placed']['exchanged_bytes']:.3f}",
    )


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows of `row_of` as a Markdown table."""
    return markdown(COLUMNS, rows)
