"""Plans: attention work of GPUs for packed batches of examples/lengths, as documents come and placed.

    python scripts/pictures/draw_plans.py

Waiting: work and waiting of every GPU for the first batch of a training, the one that
`distca plan pretrain --gpus 8 --tokens-per-rank 131072 --seed 42` plans. Ranks: waiting for the busiest GPU grows with
the number of GPUs, unless documents are placed; first micro-batches of trainings.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distca_hf.analysis.epoch import pack_epoch
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.analysis.request import PlanRequest
from distca_hf.cost import imbalance
from distca_hf.placement.place import fill_in_order, work_in_order
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.recipe import LENGTHS
from style import Style, bare, headed, ruled, save


# The training of the command above.
GPUS, TOKENS_PER_GPU, SEED = 8, 131_072, 42
# Trainings on numbers of ranks, and how many of their first micro-batches are counted.
MIXES = {"pretrain": "a pretraining mix", "prolong": "ProLong"}
RANKS = (2, 4, 8, 16, 32, 64, 128)
TOKENS_PER_RANK, MICRO_BATCHES = 65_536, 12


def training(num_ranks: int, tokens_per_rank: int) -> PlanRequest:
    """Returns a training of an 8B Llama, as `distca plan` takes it."""
    sizes = (num_ranks, tokens_per_rank, min(num_ranks, 8))
    return PlanRequest(*sizes, micro_steps=1, model=preset("llama3-8b"), overlong="split")


def first_batches(mix: str, request: PlanRequest, number: int) -> list[np.ndarray]:
    """Returns `[documents]` lengths of the first micro-batches of a training."""
    packed = pack_epoch(read_lengths(LENGTHS.find(mix)).tokens, request, SEED)
    return packed.first_step(min(number, packed.epoch.num_micro_batches))


def documents_of_first_batch() -> np.ndarray:
    """Returns `[documents]` lengths of the batch of the command."""
    return first_batches("pretrain", training(GPUS, TOKENS_PER_GPU), 1)[0]


def shares_of(plan: Plan, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[gpus]` attention work of one document and of all others, over the mean of the GPUs."""
    of_document = plan.tasks.document == document
    work = np.zeros((2, GPUS))
    np.add.at(work, (np.where(of_document, 0, 1), plan.tasks.rank), plan.tasks.work)
    shares = work / plan.work.mean()
    return shares[0], shares[1]


def draw_panel(axes: Axes, style: Style, title: str, plan: Plan, longest: int) -> None:
    """Draws a bar for each GPU: its work, and its waiting for the busiest GPU."""
    of_longest, of_others = shares_of(plan, longest)
    work, places = of_longest + of_others, np.arange(GPUS)
    axes.barh(places, of_longest, 0.74, color=style.long)
    axes.barh(places, of_others, 0.74, left=of_longest, color=style.ours)
    axes.barh(
        places, work.max() - work, 0.74, left=work, color=style.waiting, edgecolor=style.hatch, hatch="////", lw=0
    )
    axes.set_title(title, loc="left", fontsize=11, pad=4)
    axes.set_yticks(places, [f"GPU {gpu}" for gpu in places])
    axes.set_ylim(GPUS - 0.45, -0.55)
    bare(axes)


def draw_waiting(style: Style) -> Figure:
    """Draws the batch as packed in order, and as placed."""
    documents = documents_of_first_batch()
    in_order = plan_in_place(fill_in_order(documents, GPUS))
    placed = training(GPUS, TOKENS_PER_GPU).planner.plan(documents)
    longest, before = int(documents.argmax()), in_order.imbalance
    wasted = f"{100 * (1 - 1 / before):.0f} % of the GPUs' attention time is waiting. distca_hf removes it."
    details = (
        f"One packed batch of real documents on {GPUS} GPUs, {TOKENS_PER_GPU:,} tokens on each. A bar is a GPU's "
        "attention in a layer,\nuntil all GPUs are done and may go on. Counted in attended pairs; 1 is the mean "
        "of the GPUs."
    )
    figure = headed(style, 5.6, wasted, details)
    panels = figure.subplots(2, 1, sharex=True)
    draw_panel(panels[0], style, "Packed in order: all wait for the GPU with the longest document", in_order, longest)
    draw_panel(panels[1], style, "Placed by distca_hf: the same documents, equal tokens, equal work", placed, longest)
    panels[0].tick_params(labelbottom=False)
    panels[1].set_xlim(0, before * 1.005)
    panels[1].set_xticks([0, 1, 2, before], ["0", "1", "2", f"{before:.2f}"])
    after = placed.imbalance
    arrow = {"arrowstyle": "-|>", "color": style.text, "lw": 1.4}
    panels[1].annotate("", (after + 0.02, 3.5), (before, 3.5), arrowprops=arrow)
    faster = f"attention {before / after:.1f} times as fast"
    panels[1].text((after + before) / 2, 3.2, faster, ha="center", fontsize=12, weight="bold")
    box = {"facecolor": style.waiting, "edgecolor": "none", "pad": 1.5}
    panels[0].text(before * 0.72, 1, "waiting", ha="center", va="center", bbox=box)
    figure.legend(
        handles=[
            Patch(color=style.long, label=f"longest document ({documents.max():,} tokens)"),
            Patch(color=style.ours, label=f"the other {len(documents) - 1} documents"),
            Patch(facecolor=style.waiting, edgecolor=style.hatch, hatch="////", lw=0, label="waiting"),
        ],
        loc="lower left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=3,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.6,
    )
    figure.subplots_adjust(left=0.085, right=0.975, top=0.80, bottom=0.115, hspace=0.22)
    return figure


def waiting_in_words() -> str:
    """Returns the picture of the batch as text."""
    in_order = plan_in_place(fill_in_order(documents_of_first_batch(), GPUS))
    shares = ", ".join(f"{share:.2f}" for share in in_order.work / in_order.work.mean())
    return (
        f"Attention work of {GPUS} GPUs for one packed batch, over its mean. In order: {shares}; seven GPUs wait for "
        "the last one. Placed by distca_hf: 1.00 on every GPU."
    )


# Busiest rank over the mean in several micro-batches: in order, and placed.
Spread = tuple[list[float], list[float]]


def measure(mix: str, num_ranks: int) -> Spread:
    """Packs and places the first micro-batches of a training, and returns the spread of their imbalance."""
    request = training(num_ranks, TOKENS_PER_RANK)
    batches = first_batches(mix, request, MICRO_BATCHES)
    in_order = [imbalance(work_in_order(batch, num_ranks)) for batch in batches]
    return in_order, [request.planner.plan(batch).imbalance for batch in batches]


def draw_ranks(style: Style, spreads: dict[str, list[Spread]]) -> Figure:
    """Draws the busiest rank over the mean against the number of ranks, for every mix of lengths."""
    details = (
        f"Attention work of the busiest GPU over the mean, documents packed in order, "
        f"{TOKENS_PER_RANK // 1024}K tokens per GPU.\n"
        "Lines: mean of an epoch's first batches. Areas: from the best to the worst of them."
    )
    figure = headed(style, 4.3, "The more GPUs, the longer all wait for the busiest one", details)
    axes = figure.subplots()
    for (mix, by_ranks), colour in zip(spreads.items(), (style.long, style.others), strict=True):
        lows, highs = ([of(in_order) for in_order, _ in by_ranks] for of in (min, max))
        means = [float(np.mean(in_order)) for in_order, _ in by_ranks]
        axes.fill_between(RANKS, lows, highs, color=colour, alpha=0.18, lw=0)
        axes.plot(RANKS, means, color=colour, lw=2.2, marker="o", ms=4)
        axes.annotate(
            f"{MIXES[mix]}, {means[-1]:.1f}", (RANKS[-1], means[-1]), (8, 0), textcoords="offset points", va="center"
        )
    placed = max(max(of_ranks) for by_ranks in spreads.values() for _, of_ranks in by_ranks)
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


def ranks_in_words(spreads: dict[str, list[Spread]]) -> str:
    """Returns the picture of numbers of ranks as text."""
    means_of_mixes = [
        ", ".join(f"{np.mean(in_order):.1f} on {ranks}" for ranks, (in_order, _) in zip(RANKS, by_ranks, strict=True))
        for by_ranks in spreads.values()
    ]
    mixes = "; ".join(f"{name}: {means}" for name, means in zip(MIXES.values(), means_of_mixes, strict=True))
    return f"Attention work of the busiest GPU over the mean, documents in order. {mixes}. Placed: 1.01 at most."


if __name__ == "__main__":
    save("waiting", waiting_in_words(), draw_waiting)
    measured = {mix: [measure(mix, num_ranks) for num_ranks in RANKS] for mix in MIXES}
    save("ranks", ranks_in_words(measured), lambda style: draw_ranks(style, measured))
