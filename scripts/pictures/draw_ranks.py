"""Ranks: waiting for the busiest GPU grows with the number of GPUs, unless documents are placed.

    python scripts/pictures/draw_ranks.py

Work is counted in attended pairs, as `distca plan` does, on the first micro-batches of a training on examples/lengths.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.cost import imbalance
from distca_hf.data.documents import fit_documents
from distca_hf.data.epochs import EpochPacker
from distca_hf.placement.place import work_in_order
from distca_hf.recipe import LENGTHS
from style import Style, headed, ruled, save


MIXES = {"pretrain": "a pretraining mix", "prolong": "ProLong"}
# Numbers of ranks on the axis.
RANKS = (2, 4, 8, 16, 32, 64, 128)
# The training of the pages of docs/, and the number of its first micro-batches that are counted.
TOKENS_PER_RANK, RANKS_PER_NODE, SEED, MICRO_BATCHES = 65_536, 8, 42, 12


@dataclass(frozen=True)
class Spread:
    """Busiest rank over the mean on several micro-batches: mean, smallest and largest; and the largest when placed."""

    mean: float
    lowest: float
    highest: float
    placed_highest: float


def measure(mix: str, num_ranks: int) -> Spread:
    """Packs and places the first micro-batches of a training, and returns the spread of their imbalance."""
    capacity_tokens = num_ranks * TOKENS_PER_RANK
    _, _, lengths = fit_documents(read_lengths(LENGTHS.find(mix)).tokens, capacity_tokens, "split")
    packer = EpochPacker(lengths, capacity_tokens, SEED)
    epoch = packer.epoch(0)
    batches = [lengths[epoch.micro_batch(index)] for index in range(min(MICRO_BATCHES, packer.num_micro_batches))]
    in_order = [imbalance(work_in_order(batch, num_ranks)) for batch in batches]
    config = DistCAConfig(tokens_per_rank=TOKENS_PER_RANK, ranks_per_node=min(num_ranks, RANKS_PER_NODE))
    planner = PlacedPlanner(config, num_ranks, preset("llama3-8b").heads.groups)
    placed = [planner.plan(batch).imbalance for batch in batches]
    return Spread(float(np.mean(in_order)), min(in_order), max(in_order), max(placed))


def draw(style: Style, spreads: dict[str, list[Spread]]) -> Figure:
    """Draws the busiest rank over the mean against the number of ranks, for every mix of lengths."""
    details = (
        f"Attention work of the busiest GPU over the mean, documents packed in order, "
        f"{TOKENS_PER_RANK // 1024}K tokens per GPU.\n"
        "Lines: mean of an epoch's first batches. Areas: from the best to the worst of them."
    )
    figure = headed(style, 4.3, "The more GPUs, the longer all wait for the busiest one", details)
    axes = figure.subplots()
    for (mix, by_ranks), colour in zip(spreads.items(), (style.long, style.others), strict=True):
        lows, highs = [spread.lowest for spread in by_ranks], [spread.highest for spread in by_ranks]
        means = [spread.mean for spread in by_ranks]
        axes.fill_between(RANKS, lows, highs, color=colour, alpha=0.18, lw=0)
        axes.plot(RANKS, means, color=colour, lw=2.2, marker="o", ms=4)
        axes.annotate(
            f"{MIXES[mix]}, {means[-1]:.1f}", (RANKS[-1], means[-1]), (8, 0), textcoords="offset points", va="center"
        )
    placed = max(spread.placed_highest for by_ranks in spreads.values() for spread in by_ranks)
    axes.plot(RANKS, [1] * len(RANKS), color=style.ours, lw=2.6, marker="o", ms=4)
    axes.annotate(
        f"both, placed by\ndistca_hf: {placed:.2f} at most",
        (RANKS[-1], 1),
        (8, -2),
        textcoords="offset points",
        va="center",
        color=style.ours,
        weight="bold",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [f"{ranks}" for ranks in RANKS])
    axes.set_xlabel("GPUs")
    axes.set_ylim(0, None)
    ruled(axes, style)
    axes.spines["left"].set_visible(False)
    axes.set_axisbelow(True)
    figure.subplots_adjust(left=0.045, right=0.765, top=0.78, bottom=0.115)
    return figure


def described(spreads: dict[str, list[Spread]]) -> str:
    """Returns the picture as text."""
    means_of_mixes = [
        ", ".join(f"{spread.mean:.1f} on {ranks}" for ranks, spread in zip(RANKS, by_ranks, strict=True))
        for by_ranks in spreads.values()
    ]
    mixes = "; ".join(f"{name}: {means}" for name, means in zip(MIXES.values(), means_of_mixes, strict=True))
    return f"Attention work of the busiest GPU over the mean, documents in order. {mixes}. Placed: 1.01 at most."


if __name__ == "__main__":
    measured = {mix: [measure(mix, num_ranks) for num_ranks in RANKS] for mix in MIXES}
    save("ranks", described(measured), lambda style: draw(style, measured))
