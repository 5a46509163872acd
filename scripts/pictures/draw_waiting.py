"""Waiting: work and waiting of every GPU while attention of one packed batch runs, before and after placement.

    python scripts/pictures/draw_waiting.py

The batch is the first one of a training on examples/lengths/pretrain.json.gz with seed 42, the one that
`distca plan pretrain --gpus 8 --tokens-per-rank 131072 --seed 42` plans.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.models import preset
from distca_hf.batches.placed import PlacedPlanner
from distca_hf.config import DistCAConfig
from distca_hf.data.epochs import EpochPacker
from distca_hf.placement.place import fill_in_order
from distca_hf.planning.plan import Plan, plan_in_place
from distca_hf.recipe import LENGTHS
from style import Style, bare, headed, save


# The training of the command above.
GPUS, TOKENS_PER_GPU, SEED = 8, 131_072, 42


def documents_of_first_batch() -> np.ndarray:
    """Returns `[documents]` lengths of the first batch."""
    lengths = read_lengths(LENGTHS.find("pretrain")).tokens
    return lengths[EpochPacker(lengths, GPUS * TOKENS_PER_GPU, SEED).epoch(0).micro_batch(0)]


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


def draw(style: Style) -> Figure:
    """Draws the batch as packed in order, and as placed."""
    documents = documents_of_first_batch()
    in_order = plan_in_place(fill_in_order(documents, GPUS))
    config = DistCAConfig(tokens_per_rank=TOKENS_PER_GPU, ranks_per_node=GPUS)
    placed = PlacedPlanner(config, GPUS, preset("llama3-8b").heads.groups).plan(documents)
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


def described() -> str:
    """Returns the picture as text."""
    in_order = plan_in_place(fill_in_order(documents_of_first_batch(), GPUS))
    shares = ", ".join(f"{share:.2f}" for share in in_order.work / in_order.work.mean())
    return (
        f"Attention work of {GPUS} GPUs for one packed batch, over its mean. In order: {shares}; seven GPUs wait for "
        "the last one. Placed by distca_hf: 1.00 on every GPU."
    )


if __name__ == "__main__":
    save("waiting", described(), draw)
