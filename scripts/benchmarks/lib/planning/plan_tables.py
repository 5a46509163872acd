"""Tables of plans. Placed: balance, bytes against the published planner and the counting bound, bytes between nodes.
Fixed: balance, and bytes of the largest rank against the published planner."""

import statistics
from dataclasses import dataclass, replace

import numpy as np

from distca_hf.analysis.epoch import PackedEpoch, largest_rank_bytes, make_report, pack_epoch
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from distca_hf.arrays import IntArray
from distca_hf.cost import imbalance
from distca_hf.layout import Topology
from distca_hf.placement.place import place, work_in_order
from distca_hf.planning.plan import plan_in_place
from distca_hf.planning.transfers import bytes_between
from lib.planning.bounds import key_value_bytes_bound
from lib.planning.mixes import batch
from lib.planning.planners import (
    LLAMA,
    RANKS_PER_NODE,
    K,
    between_nodes,
    gigabytes,
    mean_over,
    plan_fixed,
    plan_placed,
    print_row,
    table,
)
from lib.planning.published_greedy import plan_published_greedy


MIXES = ("pretrain", "pretrain_up", "prolong", "prolong_up", "lognormal", "one", "equal", "equal_3001")
FILE_MIXES = ("pretrain", "pretrain_up", "prolong", "prolong_up")
# Micro-batches whose tokens an epoch has, of which the first optimizer step takes four.
EPOCH_MICRO_BATCHES = 16


def print_balance(ranks: list[int], seeds: int) -> None:
    """Prints every mix, documents up to the tokens of one rank and up to those of all (512K at most). Batches of 16K
    tokens per rank fill ranks of 32K by half."""
    table(
        "Placed: balance (limits: tokens +-1; max/mean 1.005 up to 8 ranks, 1.01 beyond)",
        *("mix", "ranks", "tokens/rank", "longest", "documents", "token spread", "in order", "placed, worst seed"),
    )
    for mix in MIXES:
        for num_ranks in ranks:
            for tokens_per_rank in (16 * K, 32 * K, 128 * K):
                for longest in sorted({tokens_per_rank, min(512 * K, num_ranks * tokens_per_rank)}):
                    spread, before, after, documents = 0, [], [], []
                    for seed in range(seeds):
                        lengths = batch(mix, num_ranks, tokens_per_rank, longest, seed)
                        plan = plan_placed(lengths, Topology(num_ranks, RANKS_PER_NODE))
                        spread = max(spread, int(np.ptp(plan.layout.rank_tokens)))
                        before.append(imbalance(work_in_order(lengths, num_ranks)))
                        after.append(plan.imbalance)
                        documents.append(len(lengths))
                    cells = (mix, num_ranks, f"{tokens_per_rank // K}K", f"{longest // K}K")
                    mean_documents = f"{statistics.mean(documents):.0f}"
                    print_row(*cells, mean_documents, spread, f"{statistics.mean(before):.2f}", f"{max(after):.4f}")


def print_bytes(ranks: list[int], seeds: int) -> None:
    """Compares with the published planner, longest document <= tokens of a rank."""
    table(
        "Placed: total bytes ÷ published planner at 0.05 (limits: 0.6, 0.6, 0.55, 0.5; up-sampled ProLong 0.9, 0.8, "
        "0.6, 0.65), largest rank between nodes (limit for pretrain: 0.05 GB)",
        *("mix", "ranks", "tokens/rank", "placed GB", "published GB", "ratio", "published max/mean", "node GB"),
    )
    for mix in FILE_MIXES:
        for num_ranks in ranks:
            topology = Topology(num_ranks, RANKS_PER_NODE)
            for tokens_per_rank in (64 * K, 128 * K):
                ours, theirs, ratios, left, node = [], [], [], [], []
                for seed in range(seeds):
                    lengths = batch(mix, num_ranks, tokens_per_rank, tokens_per_rank, seed)
                    sent = bytes_between(plan_placed(lengths, topology), LLAMA)
                    published = plan_published_greedy(lengths, num_ranks, LLAMA, 0.05)
                    ours.append(int(sent.sum()))
                    theirs.append(int(bytes_between(published, LLAMA).sum()))
                    ratios.append(ours[-1] / max(1, theirs[-1]))
                    left.append(published.imbalance)
                    node.append(between_nodes(sent, topology))
                print_row(
                    *(mix, num_ranks, f"{tokens_per_rank // K}K", gigabytes(statistics.mean(ours))),
                    *(gigabytes(statistics.mean(theirs)), mean_over(ratios), mean_over(left), gigabytes(max(node))),
                )


def print_ratio_to_bound(ranks: list[int], seeds: int) -> None:
    """Compares with the counting bound, all ranks on one node and no stripes: the bound is one on whole heads."""
    table(
        "Placed, flat: total bytes ÷ counting bound (limit: 2.0)",
        *("mix", "ranks", "tokens/rank", "placed GB", "bound GB", "ratio, mean over seeds"),
    )
    for mix in (*FILE_MIXES, "lognormal"):
        for num_ranks in (count for count in ranks if count <= 64):
            for tokens_per_rank in (64 * K, 128 * K):
                ours, bounds, ratios = [], [], []
                for seed in range(seeds):
                    layout = place(batch(mix, num_ranks, tokens_per_rank, tokens_per_rank, seed), num_ranks)
                    ours.append(int(bytes_between(plan_in_place(layout), LLAMA).sum()))
                    bounds.append(key_value_bytes_bound(layout, LLAMA))
                    if bounds[-1]:
                        ratios.append(ours[-1] / bounds[-1])
                print_row(
                    *(mix, num_ranks, f"{tokens_per_rank // K}K"),
                    *(gigabytes(statistics.mean(ours)), gigabytes(statistics.mean(bounds)), mean_over(ratios)),
                )


def print_grouped_steps(ranks: list[int], seeds: int) -> None:
    """Compares the first optimizer step of an epoch as its documents were packed, and with long ones together."""
    table(
        "Optimizer steps of 4 micro-steps: bytes of all, and sum of the heaviest ranks ÷ ideal (limit: 1.005)",
        *("mix", "ranks", "tokens/rank", "as they come GB", "grouped GB", "grouped, worst imbalance"),
    )
    for mix in FILE_MIXES:
        for num_ranks in (count for count in ranks if count <= 64):
            one_by_one, grouped, worst = [], [], 1.0
            for seed in range(seeds):
                lengths = batch(mix, num_ranks, EPOCH_MICRO_BATCHES * 128 * K, 128 * K, seed)
                request = PlanRequest(num_ranks, 128 * K, RANKS_PER_NODE, 4, preset("llama3-8b"))
                packed, alone = pack_epoch(lengths, request, seed), replace(request, micro_steps=1)
                reports = [
                    make_report(alone, PackedEpoch.of_batches([documents]))
                    for documents in packed.first_step(request.micro_steps)
                ]
                one_by_one.append(sum(report.figures.bytes_total for report in reports))
                figures = make_report(request, packed).figures
                grouped.append(figures.bytes_total)
                worst = max(worst, figures.imbalance)
            means = (gigabytes(statistics.mean(one_by_one)), gigabytes(statistics.mean(grouped)))
            print_row(mix, num_ranks, "128K", *means, f"{worst:.4f}")


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
