"""Steps: time of a training step in every way to share attention, as bars over the shortest possible step.

    python scripts/pictures/draw_steps.py

Figures come from docs/benchmarks/steps.json, which names their page.
"""

import json
from typing import TypedDict

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from style import BENCHMARKS, Style, bare, headed, save


class Row(TypedDict):
    """One set of documents over one kind of links: milliseconds of a step, by way to share attention."""

    documents: str
    links: str
    ms: dict[str, int]


class Table(TypedDict):
    """The part of a table in steps.json that is drawn."""

    rows: list[Row]


STEPS: dict[str, Table] = json.loads((BENCHMARKS / "steps.json").read_text())
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


def draw_bars(
    axes: Axes, style: Style, ways: dict[str, str], ms: dict[str, int], unit: str, missing: dict[str, str]
) -> None:
    """Draws a bar for each way with its milliseconds, as a multiple of the way `unit`; `missing` says why there is
    none."""
    for place, way in enumerate(ways):
        if way not in ms:
            axes.text(
                0.03,
                place,
                missing.get(way, "not measured"),
                va="center",
                fontsize=9,
                color=style.muted,
                style="italic",
            )
            continue
        ratio = ms[way] / ms[unit]
        colour = {"distca": style.ours, "recomputed": style.ours, "ideal": style.best}.get(way, style.others)
        axes.barh(place, ratio, 0.72, color=colour, alpha=0.55 if way == "recomputed" else 1)
        ours = way == "distca"
        axes.text(ratio + 0.03, place, f"{ratio:.2f}", va="center", weight="bold" if ours else "normal")
        inside = {"distca": style.on_ours, "recomputed": style.text, "ideal": style.text}.get(way, style.on_others)
        axes.text(0.04, place, f"{ms[way]:,} ms", va="center", fontsize=8.5, color=inside)
    axes.axvline(1, color=style.muted, lw=0.8, ls=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(ways)), [*ways.values()], fontsize=9.5)
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xticks([])
    bare(axes)


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
            draw_bars(axes, style, FOUR_GPUS, row_of("four_gpus", mix, links), "ideal", {})
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
        draw_bars(axes, style, TWO_GPUS, ms, "distca", {"plain": "does not fit"})
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
