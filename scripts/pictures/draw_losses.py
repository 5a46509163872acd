"""Losses: the same training with distca_hf on two ranks, and with sdpa on each document by itself.

scripts/quickstart.sh --steps 64
cp quickstart_output/steps.json docs/benchmarks/quickstart-steps.json
python scripts/pictures/draw_losses.py
"""

import json

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from style import BENCHMARKS, Style, headed, ruled, save


STEPS = json.loads((BENCHMARKS / "quickstart-steps.json").read_text())
DISTCA, SDPA = zip(*(step["losses"] for step in STEPS), strict=True)
DIFFERENCES = [ours - theirs for ours, theirs in zip(DISTCA, SDPA, strict=True)]


def largest() -> str:
    """Returns the largest difference of two losses, such as 0.0000019."""
    return f"{max(map(abs, DIFFERENCES)):.7f}"


def draw(style: Style) -> Figure:
    """Draws both losses, and below them their difference."""
    details = (
        f"A small Llama on Python's sources, {len(STEPS)} steps (quickstart): distca_hf with documents over two "
        f"ranks, and sdpa\nwith each document alone. Losses differ by {largest()} at most; single precision."
    )
    figure = headed(style, 4.6, "The losses are those of ordinary training", details)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
    steps = range(1, 1 + len(STEPS))
    panels[0].plot(steps, SDPA, color=style.others, lw=7, alpha=0.55, solid_capstyle="round", label="sdpa")
    panels[0].plot(steps, DISTCA, color=style.ours, lw=1.8, label="distca_hf")
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False, loc="upper right")
    panels[1].plot(steps, DIFFERENCES, color=style.ours, lw=1.2)
    panels[1].axhline(0, color=style.muted, lw=0.6)
    panels[1].set_ylabel("difference,\nmillionths")
    panels[1].set_xlabel("step")
    panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e6:+.0f}" if value else "0"))
    panels[1].set_xlim(0.5, len(STEPS) + 0.5)
    for axes in panels:
        ruled(axes, style)
    figure.align_ylabels(panels)
    figure.subplots_adjust(left=0.105, right=0.985, top=0.80, bottom=0.105, hspace=0.14)
    return figure


def described() -> str:
    """Returns the picture as text."""
    return (
        f"Losses of {len(STEPS)} steps with distca_hf and with sdpa, from {DISTCA[0]:.3f} to {DISTCA[-1]:.3f}. They "
        f"lie on each other and differ by {largest()} at most."
    )


if __name__ == "__main__":
    save("losses", described(), draw)
