"""Measured: time of a training step in every way to share attention, as bars over the shortest possible step; and
losses of the same training with distca_hf on two ranks, and with sdpa on each document by itself.

    scripts/quickstart.sh --steps 64
    cp quickstart_output/steps.json docs/benchmarks/quickstart-steps.json
    python scripts/pictures/draw_measured.py

Figures of steps come from docs/benchmarks/steps.json, which names their page.
"""

import json
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from style import BENCHMARKS, Bar, Style, draw_bars, draw_grid, headed, ruled, save


# Tables with rows: documents, links, and milliseconds of a step, `ms`, by way to share attention.
STEPS: dict[str, Any] = json.loads((BENCHMARKS / "steps.json").read_text())
# Steps of the training, losses with either, and differences of these.
TRAINED = json.loads((BENCHMARKS / "quickstart-steps.json").read_text())
DISTCA, SDPA = zip(*(step["losses"] for step in TRAINED), strict=True)
DIFFERENCES = [ours - theirs for ours, theirs in zip(DISTCA, SDPA, strict=True)]
LARGEST = f"{max(map(abs, DIFFERENCES)):.7f}"
# Ways to share attention and their names in each picture, from top to bottom.
FOUR_GPUS = {
    "plain": "plain packing",
    "context": "context parallel\n(as in ring attention)",
    "ulysses": "Ulysses\n(as in ALST)",
    "distca": "distca_hf",
    "ideal": "ideal, no transfer",
}
TWO_GPUS = {
    "plain": "plain packing (TRL)",
    "ring": "ring-flash-attention\nllama3",
    "zigzag": "ring-flash-attention\nzigzag",
    "ulysses": "DeepSpeed Ulysses\n(ALST)",
    "recomputed": "distca_hf, attention\nrecomputed as above",
    "distca": "distca_hf, its default",
}


def row_of(table: str, documents: str, links: str) -> dict[str, int]:
    """Returns milliseconds by way to share attention, for one set of documents and kind of links."""
    (row,) = (row for row in STEPS[table]["rows"] if (row["documents"], row["links"]) == (documents, links))
    return row["ms"]


def bars(style: Style, ways: dict[str, str], ms: dict[str, int], unit: str, missing: str = "") -> dict[str, Bar]:
    """Returns a bar for each way with its milliseconds, as a multiple of the way `unit`; `missing` says why plain
    packing has none."""
    colours = {"distca": style.ours, "recomputed": style.ours, "ideal": style.best}
    inside = {"distca": style.on_ours, "recomputed": style.text, "ideal": style.text}
    return {
        name: Bar(
            f"{ms[way]:,} ms",
            ms[way] / ms[unit],
            colour=colours.get(way, style.others),
            on_colour=inside.get(way, style.on_others),
            is_ours=way == "distca",
            alpha=0.55 if way == "recomputed" else 1,
        )
        if way in ms
        else Bar(missing if way == "plain" else "not measured")
        for way, name in ways.items()
    }


def draw_four_gpus(style: Style) -> Figure:
    """Draws steps on four GPUs: a row for each kind of links, a column for each set of documents."""
    details = (
        "A training step (4 layers of an 8B Llama, FSDP2, four H200) as a multiple of ideal: the same work, spread "
        "evenly\nwithout any transfer. One program and one attention kernel for all. Shorter is better."
    )
    figure = headed(style, 5.9, "distca_hf stays within 3 % of ideal, over fast and slow links", details)
    documents = ["one of 128K among 96 of 4K", "all lengths from 64K to 2K", "all of 4K"]
    rows = {
        title: {mix: bars(style, FOUR_GPUS, row_of("four_gpus", mix, links), "ideal") for mix in documents}
        for links, title in (("NVLink", "NVLink"), ("30 GB/s", "30 GB/s, as between nodes"))
    }
    draw_grid(figure, style, rows, 2.3, 0.03)
    return figure


def draw_two_gpus(style: Style) -> Figure:
    """Draws steps on two GPUs, a column for each set of documents."""
    details = (
        "A training step (4 layers of an 8B Llama with head and AdamW, FSDP2, two H200, NVLink), over that of "
        "distca_hf.\nAll call FlashAttention 4. Shorter is better."
    )
    figure = headed(style, 3.9, "The fastest on each mix, compared with other people's own code", details)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, documents in zip(panels, ("one of 64K among 16 of 4K", "one of 128K", "all of 4K"), strict=True):
        ms = row_of("two_gpus", documents, "NVLink")
        draw_bars(axes, style, bars(style, TWO_GPUS, ms, "distca", "does not fit"), 0.03)
        axes.set_title(documents, fontsize=10.5, loc="left")
        axes.set_xlim(0, 1.85)
    figure.subplots_adjust(left=0.195, right=0.99, top=0.72, bottom=0.02, wspace=0.06)
    return figure


def described(table: str, ways: dict[str, str]) -> str:
    """Returns all figures of a picture as text."""
    rows = [
        f"{row['documents']}, {row['links']}: "
        + ", ".join(f"{ways[way]} {row['ms'][way]}".replace("\n", " ") for way in ways if way in row["ms"])
        for row in STEPS[table]["rows"]
    ]
    return f"Milliseconds of a training step. {'. '.join(rows)}."


def draw_losses(style: Style) -> Figure:
    """Draws both losses, and below them their difference."""
    details = (
        f"A small Llama on Python's sources, {len(TRAINED)} steps (quickstart): distca_hf with documents over two "
        f"ranks, and sdpa\nwith each document alone. Losses differ by {LARGEST} at most; single "
        "precision."
    )
    figure = headed(style, 4.6, "The losses are those of ordinary training", details)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
    steps = range(1, 1 + len(TRAINED))
    panels[0].plot(steps, SDPA, color=style.others, lw=7, alpha=0.55, solid_capstyle="round", label="sdpa")
    panels[0].plot(steps, DISTCA, color=style.ours, lw=1.8, label="distca_hf")
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False, loc="upper right")
    panels[1].plot(steps, DIFFERENCES, color=style.ours, lw=1.2)
    panels[1].axhline(0, color=style.muted, lw=0.6)
    panels[1].set_ylabel("difference,\nmillionths")
    panels[1].set_xlabel("step")
    panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e6:+.0f}" if value else "0"))
    panels[1].set_xlim(0.5, len(TRAINED) + 0.5)
    for axes in panels:
        ruled(axes, style)
    figure.align_ylabels(panels)
    figure.subplots_adjust(left=0.105, right=0.985, top=0.80, bottom=0.105, hspace=0.14)
    return figure


def losses_in_words() -> str:
    """Returns the picture of losses as text."""
    return (
        f"Losses of {len(TRAINED)} steps with distca_hf and with sdpa, from {DISTCA[0]:.3f} to {DISTCA[-1]:.3f}. They "
        f"lie on each other and differ by {LARGEST} at most."
    )


if __name__ == "__main__":
    save("losses", losses_in_words(), draw_losses)
    save("steps-four-gpus", described("four_gpus", FOUR_GPUS), draw_four_gpus)
    save("steps-two-gpus", described("two_gpus", TWO_GPUS), draw_two_gpus)
