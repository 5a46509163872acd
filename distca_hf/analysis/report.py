"""Report: pictures of a run. Needs the extra `report`."""

from collections.abc import Sequence
from pathlib import Path


WORKING, WAITING, MUTED = "#2f6fb7", "#e3e7eb", "#59636e"


def draw_balance(work_before: Sequence[Sequence[int]], work: Sequence[Sequence[int]], path: Path) -> None:
    """Draws how long attention of every micro-batch takes, before and after placement: the mean work of the ranks, and
    on top of it the waiting for the busiest one; 1.0 is the mean.

    Args:
        work_before, work: `[micro_batches][ranks]` attended pairs.
        path: picture to write; its ending decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, panels = pyplot.subplots(
        2, 1, figsize=(min(16.0, 5.0 + 0.16 * len(work)), 5.2), sharex=True, sharey=True, layout="constrained"
    )
    shares = []
    for panel, title, batches in zip(
        panels, ("Packed in order", "Placed by distca"), (work_before, work), strict=True
    ):
        busiest = [max(batch) * len(batch) / max(1, sum(batch)) for batch in batches]
        shares.append(1 - len(busiest) / sum(busiest))
        places = range(1, 1 + len(busiest))
        panel.bar(places, [1.0] * len(busiest), 0.8, color=WORKING, label="mean work of the ranks")
        waiting = [value - 1.0 for value in busiest]
        style = {"color": WAITING, "hatch": "////", "edgecolor": "#a3aeb9", "linewidth": 0.0}
        panel.bar(places, waiting, 0.8, bottom=1.0, label="waiting for the busiest rank", **style)
        panel.set_title(f"{title}: {100 * shares[-1]:.0f} % waiting", loc="left", fontsize="medium")
        panel.set_ylabel("attention time\n(1 = mean work)", color=MUTED)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("micro-batch", color=MUTED)
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].set_xlim(0.4, len(work) + 0.6)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    before, after = (f"{100 * share:.0f} %" for share in shares)
    title = f"{before} of attention time is waiting; placed by distca: {after}"
    figure.suptitle(title, x=0.01, ha="left", fontsize="large", fontweight="bold", wrap=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
