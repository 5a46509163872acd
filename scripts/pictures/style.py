"""Style: colours, and files in docs/pictures. Every picture is drawn twice, for light and for dark pages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure


ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
BENCHMARKS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True)
class Style:
    """Colours for light or for dark pages."""

    name: str  # name of the page, part of the name of the file
    text: str
    muted: str  # labels
    grid: str  # lines between bars
    ours: str  # the subject of the picture
    on_ours: str  # text on its bars
    long: str  # the decisive part of the subject
    others: str  # other ways to train
    on_others: str
    best: str  # the ideal
    waiting: str
    hatch: str  # lines across waiting


# On light pages, and on dark ones.
COLOURS = {
    "text": ("#1f2328", "#f0f6fc"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#d1d9e0", "#3d444d"),
    "ours": ("#2f6fb7", "#5aa2f0"),
    "on_ours": ("#ffffff", "#0d1117"),
    "long": ("#e07b00", "#f0932b"),
    "others": ("#9aa6b2", "#8593a3"),
    "on_others": ("#1f2328", "#0d1117"),
    "best": ("#d1d9e0", "#3d444d"),
    "waiting": ("#eceff2", "#1e2630"),
    "hatch": ("#a3aeb9", "#56616e"),
}
LIGHT = Style("light", **{part: light for part, (light, _) in COLOURS.items()})
DARK = Style("dark", **{part: dark for part, (_, dark) in COLOURS.items()})


def save(name: str, description: str, draw: Callable[[Style], Figure]) -> None:
    """Writes `NAME-light.svg` and `NAME-dark.svg`, with a description for readers who cannot see them. Text becomes
    outlines, so that it looks alike everywhere. Equal figures give equal bytes."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for style in (LIGHT, DARK):
        settings = {
            "svg.hashsalt": name,
            "svg.fonttype": "path",
            "font.family": "DejaVu Sans",
            "font.size": 10.5,
            "hatch.linewidth": 0.7,
            "hatch.color": style.hatch,
            "text.color": style.text,
            "axes.labelcolor": style.muted,
            "axes.edgecolor": style.grid,
            "axes.titlecolor": style.text,
            "xtick.color": style.muted,
            "ytick.color": style.muted,
        }
        with matplotlib.rc_context(settings):
            figure = draw(style)
            path = PICTURES / f"{name}-{style.name}.svg"
            metadata = {"Date": None, "Creator": None, "Title": description}
            figure.savefig(path, format="svg", transparent=True, metadata=metadata)
        print(path.relative_to(ROOT))


def headed(style: Style, height_inches: float, finding: str, details: str) -> Figure:
    """Returns a figure with the finding on top, and below it, in smaller letters, the details."""
    figure = Figure(figsize=(8.4, height_inches))
    left, below = 0.012, 0.40 / height_inches
    figure.suptitle(finding, x=left, y=0.985, ha="left", va="top", fontsize=15, fontweight="bold")
    figure.text(left, 1 - below, details, ha="left", va="top", fontsize=10, color=style.muted, linespacing=1.35)
    return figure


def bare(axes: Axes) -> None:
    """Removes frame and marks from axes of bars."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def ruled(axes: Axes, style: Style) -> None:
    """Leaves lines across, and a frame only at the left and the bottom."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="y", color=style.grid, lw=0.6)


@dataclass(frozen=True)
class Bar:
    """A bar with its length as a number after it, and text on it; without a length, text in its place."""

    text: str
    length: float | None = None
    mark: str = ""  # after the number
    colour: str = ""
    on_colour: str = ""  # of the text on it
    is_ours: bool = False
    alpha: float = 1.0


def draw_grid(
    figure: Figure, style: Style, rows: Mapping[str, Mapping[str, Mapping[str, Bar]]], most: float, inset: float
) -> None:
    """Draws bars by their names, for each column of each row by their titles; all axes end at `most`."""
    panels = figure.subplots(len(rows), max(map(len, rows.values())), sharex=True, sharey=True)
    for row, (title, columns) in enumerate(rows.items()):
        for axes, (name, bars) in zip(panels[row], columns.items(), strict=True):
            draw_bars(axes, style, bars, inset)
            axes.set_xlim(0, most)
            if row == 0:
                axes.set_title(name, fontsize=10.5, loc="left", pad=22)
        panels[row, 0].text(0, 1.02, title, transform=panels[row, 0].transAxes, color=style.muted, fontsize=10)
    figure.subplots_adjust(left=0.185, right=0.99, top=0.775, bottom=0.02, hspace=0.16, wspace=0.06)


def draw_bars(axes: Axes, style: Style, bars: Mapping[str, Bar], inset: float) -> None:
    """Draws bars by their names, from top to bottom, over a line at 1. Numbers begin so far after the ends of bars."""
    for place, bar in enumerate(bars.values()):
        if bar.length is None:
            axes.text(0.03, place, bar.text, va="center", fontsize=8.5, color=style.muted, style="italic")
            continue
        axes.barh(place, bar.length, 0.72, color=bar.colour, alpha=bar.alpha)
        weight = "bold" if bar.is_ours else "normal"
        axes.text(bar.length + inset, place, f"{bar.length:.2f}{bar.mark}", va="center", weight=weight)
        axes.text(inset + 0.01, place, bar.text, va="center", fontsize=8.5, color=bar.on_colour)
    axes.axvline(1, color=style.muted, lw=0.8, ls=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(bars)), [*bars], fontsize=9.5)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xticks([])
    bare(axes)
