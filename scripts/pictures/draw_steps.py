"""Steps: time of a training step in every way to share attention, as bars over the shortest possible step.

    python scripts/pictures/draw_steps.py

Figures come from docs/benchmarks/steps.json, which names their page.
"""

import json
from typing import Any

from matplotlib.figure import Figure

from style import BENCHMARKS, Bar, Style, draw_bars, headed, save


# Tables with rows: documents, links, and milliseconds of a step, `ms`, by way to share attention.
STEPS: dict[str, Any] = json.loads((BENCHMARKS / "steps.json").read_text())
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
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for row, (links, title) in enumerate([("NVLink", "NVLink"), ("30 GB/s", "30 GB/s, as between nodes")]):
        for column, mix in enumerate(documents):
            axes = panels[row, column]
            draw_bars(axes, style, bars(style, FOUR_GPUS, row_of("four_gpus", mix, links), "ideal"), 0.03)
            axes.set_xlim(0, 2.3)
            if row == 0:
                axes.set_title(mix, fontsize=10.5, loc="left", pad=22)
            if column == 0:
                axes.text(0, 1.02, title, transform=axes.transAxes, color=style.muted, fontsize=10)
    figure.subplots_adjust(left=0.185, right=0.99, top=0.775, bottom=0.02, hspace=0.16, wspace=0.06)
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


if __name__ == "__main__":
    save("steps-four-gpus", described("four_gpus", FOUR_GPUS), draw_four_gpus)
    save("steps-two-gpus", described("two_gpus", TWO_GPUS), draw_two_gpus)
