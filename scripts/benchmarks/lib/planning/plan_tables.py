"""Tables of plans. Placed: balance, bytes against the published planner and the counting bound, bytes between nodes.
Fixed: balance, and bytes of the largest rank against the published planner."""

import statistics
from dataclasses import replace
from itertools import product

import numpy as np

from distca_hf.analysis.epoch import PackedEpoch, largest_rank_bytes, make_report, pack_epoch
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
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
    for mix, num_ranks, tokens_per_rank in product(MIXES, ranks, (16 * K, 32 * K, 128 * K)):
        for longest in sorted({tokens_per_rank, min(512 * K, num_ranks * tokens_per_rank)}):
            batches = [batch(mix, num_ranks, tokens_per_rank, longest, seed) for seed in range(seeds)]
            plans = [plan_placed(lengths, Topology(num_ranks, RANKS_PER_NODE)) for lengths in batches]
            before = statistics.mean(imbalance(work_in_order(lengths, num_ranks)) for lengths in batches)
            print_row(
                *(mix, num_ranks, f"{tokens_per_rank // K}K", f"{longest // K}K"),
                f"{statistics.mean(map(len, batches)):.0f}",
                max(int(np.ptp(plan.layout.rank_tokens)) for plan in plans),
                *(f"{before:.2f}", f"{max(plan.imbalance for plan in plans):.4f}"),
            )


def print_bytes(ranks: list[int], seeds: int) -> None:
    """Compares with the published planner, longest document <= tokens of a rank."""
    table(
        "Placed: total bytes ÷ published planner at 0.05 (limits: 0.6, 0.6, 0.55, 0.5; up-sampled ProLong 0.9, 0.8, "
        "0.6, 0.65), largest rank between nodes (limit for pretrain: 0.05 GB)",
        *("mix", "ranks", "tokens/rank", "placed GB", "published GB", "ratio", "published max/mean", "node GB"),
    )
    for mix, num_ranks, tokens_per_rank in product(FILE_MIXES, ranks, (64 * K, 128 * K)):
        topology = Topology(num_ranks, RANKS_PER_NODE)
        batches = [batch(mix, num_ranks, tokens_per_rank, tokens_per_rank, seed) for seed in range(seeds)]
        sent = [bytes_between(plan_placed(lengths, topology), LLAMA) for lengths in batches]
        published = [plan_published_greedy(lengths, num_ranks, LLAMA, 0.05) for lengths in batches]
        ours = [int(each.sum()) for each in sent]
        theirs = [int(bytes_between(plan, LLAMA).sum()) for plan in published]
        print_row(
            *(mix, num_ranks, f"{tokens_per_rank // K}K"),
            *(gigabytes(statistics.mean(each)) for each in (ours, theirs)),
            mean_over([own / max(1, other) for own, other in zip(ours, theirs, strict=True)]),
            mean_over([plan.imbalance for plan in published]),
            gigabytes(max(between_nodes(each, topology) for each in sent)),
        )


def print_ratio_to_bound(ranks: list[int], seeds: int) -> None:
    """Compares with the counting bound, all ranks on one node and no stripes: the bound is one on whole heads."""
    table(
        "Placed, flat: total bytes ÷ counting bound (limit: 2.0)",
        *("mix", "ranks", "tokens/rank", "placed GB", "bound GB", "ratio, mean over seeds"),
    )
    few = [count for count in ranks if count <= 64]
    for mix, num_ranks, tokens_per_rank in product((*FILE_MIXES, "lognormal"), few, (64 * K, 128 * K)):
        batches = (batch(mix, num_ranks, tokens_per_rank, tokens_per_rank, seed) for seed in range(seeds))
        layouts = [place(lengths, num_ranks) for lengths in batches]
        ours = [int(bytes_between(plan_in_place(layout), LLAMA).sum()) for layout in layouts]
        bounds = [key_value_bytes_bound(layout, LLAMA) for layout in layouts]
        print_row(
            *(mix, num_ranks, f"{tokens_per_rank // K}K"),
            *(gigabytes(statistics.mean(each)) for each in (ours, bounds)),
            mean_over([own / bound for own, bound in zip(ours, bounds, strict=True) if bound]),
        )


def print_grouped_steps(ranks: list[int], seeds: int) -> None:
    """Compares the first optimizer step of an epoch as its documents were packed, and with long ones together."""
    table(
        "Optimizer steps of 4 micro-steps: bytes of all, and sum of the heaviest ranks ÷ ideal (limit: 1.005)",
        *("mix", "ranks", "tokens/rank", "as they come GB", "grouped GB", "grouped, worst imbalance"),
    )
    for mix, num_ranks in product(FILE_MIXES, (count for count in ranks if count <= 64)):
        one_by_one, grouped = [], []
        for seed in range(seeds):
            lengths = batch(mix, num_ranks, EPOCH_MICRO_BATCHES * 128 * K, 128 * K, seed)
            request = PlanRequest(num_ranks, 128 * K, RANKS_PER_NODE, 4, preset("llama3-8b"))
            packed, alone = pack_epoch(lengths, request, seed), replace(request, micro_steps=1)
            of_steps = map(PackedEpoch.of_batches, ([documents] for documents in packed.first_step(4)))
            one_by_one.append(sum(make_report(alone, of_step).figures.bytes_total for of_step in of_steps))
            grouped.append(make_report(request, packed).figures)
        means = statistics.mean(one_by_one), statistics.mean(figures.bytes_total for figures in grouped)
        worst = max(1.0, *(figures.imbalance for figures in grouped))
        print_row(mix, num_ranks, "128K", *map(gigabytes, means), f"{worst:.4f}")


def print_fixed(ranks: list[int], seeds: int) -> None:
    """Prints every mix; tokens stay where documents in order fill the ranks. The published planner has a tolerance of
    0."""
    table(
        "Fixed, 256K tokens per rank (limits: max/mean 1.025, 1.025, 1.03, 1.03; ÷ published pretrain .50, .40, .33, "
        ".28, ProLong .50, .50, .45, .50)",
        *("mix", "ranks", "in order", "max/mean, worst", "largest rank GB", "total GB"),
        *("largest ÷ published, harmonic mean", "mean"),
    )
    for mix, num_ranks in product(("pretrain_256k", "prolong_256k"), ranks):
        batches = [batch(mix, num_ranks, 256 * K, 256 * K, seed) for seed in range(seeds)]
        plans = [plan_fixed(documents, Topology(num_ranks, RANKS_PER_NODE)) for documents in batches]
        published = [plan_published_greedy(documents, num_ranks, LLAMA, 0.0) for documents in batches]
        sent = [bytes_between(plan, LLAMA) for plan in plans]
        largest = [largest_rank_bytes(each) for each in sent]
        theirs = [largest_rank_bytes(bytes_between(plan, LLAMA)) for plan in published]
        to_published = [own / max(1, other) for own, other in zip(largest, theirs, strict=True)]
        before = statistics.mean(imbalance(plan.layout.rank_work) for plan in plans)
        print_row(
            *(mix, num_ranks, f"{before:.2f}", f"{max(plan.imbalance for plan in plans):.4f}"),
            *(gigabytes(statistics.mean(largest)), gigabytes(statistics.mean(int(each.sum()) for each in sent))),
            # Ours ÷ published: harmonic mean over batches, then mean.
            *(f"{statistics.harmonic_mean(to_published):.2f}", f"{statistics.mean(to_published):.2f}"),
        )
