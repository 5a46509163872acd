"""Fixed: balance, and bytes of the largest rank against the published planner."""

import statistics
from dataclasses import dataclass

from distca_hf.analysis.first_step import largest_rank_bytes
from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from distca_hf.planning.transfers import bytes_between
from distca_hf.topology import Topology
from lib.planning.mixes import batch
from lib.planning.planners import (
    LLAMA,
    RANKS_PER_NODE,
    K,
    gigabytes,
    plan_fixed,
    print_row,
    table,
)
from lib.planning.published_greedy import plan_published_greedy


TOKENS_PER_RANK = 256 * K


@dataclass(frozen=True)
class Measured:
    """One plan beside the published one for the same documents, at a tolerance of 0.

    Attributes:
        before, imbalance: work of the busiest rank over the mean, in order and as planned.
        largest_rank_bytes, total_bytes: that the busiest rank and all ranks send in a layer.
        to_published: bytes of the busiest rank over those of the published plan.
    """

    before: float
    imbalance: float
    largest_rank_bytes: float
    total_bytes: float
    to_published: float


def measure(documents: IntArray, num_ranks: int) -> Measured:
    """Plans documents of so many tokens, and counts."""
    plan = plan_fixed(documents, Topology(num_ranks, RANKS_PER_NODE))
    sent = bytes_between(plan, LLAMA)
    published = bytes_between(plan_published_greedy(documents, num_ranks, LLAMA, 0.0), LLAMA)
    return Measured(
        before=imbalance(plan.layout.rank_work),
        imbalance=plan.imbalance,
        largest_rank_bytes=largest_rank_bytes(sent),
        total_bytes=int(sent.sum()),
        to_published=largest_rank_bytes(sent) / max(1, largest_rank_bytes(published)),
    )


def print_fixed(ranks: list[int], seeds: int) -> None:
    """Prints every mix; tokens stay where documents in order fill the ranks."""
    table(
        "Fixed, 256K tokens per rank (limits: max/mean 1.025, 1.025, 1.03, 1.03; ÷ published pretrain .50, .40, .33, "
        ".28, ProLong .50, .50, .45, .50)",
        *("mix", "ranks", "in order", "max/mean, worst", "largest rank GB", "total GB"),
        *("largest ÷ published, harmonic mean", "mean"),
    )
    for mix in ("pretrain_256k", "prolong_256k"):
        for num_ranks in ranks:
            cases = [
                measure(batch(mix, num_ranks, TOKENS_PER_RANK, TOKENS_PER_RANK, seed), num_ranks)
                for seed in range(seeds)
            ]
            mean = {name: statistics.mean(getattr(case, name) for case in cases) for name in vars(cases[0])}
            print_row(
                *(mix, num_ranks, f"{mean['before']:.2f}", f"{max(case.imbalance for case in cases):.4f}"),
                *(gigabytes(mean["largest_rank_bytes"]), gigabytes(mean["total_bytes"])),
                # Of the mean over batches of published ÷ ours, and of ours ÷ published.
                f"{statistics.harmonic_mean(case.to_published for case in cases):.2f}",
                f"{mean['to_published']:.2f}",
            )
