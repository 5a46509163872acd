"""Pictures: the answer of `distca plan`, and the balance of a finished run. Needs the extra `report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca_hf.errors import ConfigError
from distca_hf.whole_file import replaced


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distca_hf.analysis.answer import PlanAnswer

# Colours of work, of waiting, and of labels.
WORKING, WAITING, MUTED = "#2f6fb7", "#e3e7eb", "#59636e"


def check_can_draw(path: Path) -> None:
    """Checks that a picture can be drawn into a file, before anything is planned.

    Raises:
        ConfigError: matplotlib is missing, it does not support the format, or the folder does not exist.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'distca_hf[report]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(f'.{name}' for name in sorted(formats))}")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--plot {path} is a folder, or in a folder that does not exist")


def draw_answer(answer: "PlanAnswer", path: Path) -> None:
    """Draws an answer into a file, which appears when it is complete.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = figure_of(answer)
    try:
        with replaced(path, named=True) as unfinished:
            figure.savefig(unfinished, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def figure_of(answer: "PlanAnswer") -> "Figure":
    """Returns a figure of three panels.

    Two show the work of every rank over the mean in the first optimizer step, before and after. The third is a
    histogram of the imbalance of all micro-batches in order.
    """
    from matplotlib.figure import Figure

    report = answer.step
    request, num_ranks = report.request, report.request.num_ranks
    before, after = report.imbalance_before, report.figures.imbalance
    figure = Figure(figsize=(min(16.0, 6.0 + 0.1 * num_ranks), 7.5), layout="constrained")
    in_order, planned, epoch = figure.subplots(3, 1)
    planned.sharex(in_order)
    planned.sharey(in_order)
    for panel, title, work in (
        (in_order, f"documents in order: the busiest rank has {before:.2f} times the mean", report.work_before),
        (planned, f"{request.layout} by distca: {after:.3f} times the mean", report.work),
    ):
        panel.bar(range(num_ranks), work * (num_ranks / max(1, int(work.sum()))), width=0.9)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left", fontsize="medium")
        panel.set_ylabel("work / mean")
        panel.set_xlabel("rank")
        panel.margins(x=0.01)
    epoch.hist(answer.imbalance_before, bins=40)
    spread = answer.epoch.imbalance_before
    epoch.set_title(f"all {answer.epoch.micro_batches:,} micro-batches in order", loc="left", fontsize="medium")
    epoch.set_xlabel(f"busiest rank / mean; {spread.mean:.2f} on average, {spread.worst:.2f} at most")
    epoch.set_ylabel("micro-batches")
    figure.suptitle(
        f"Attention work: {before:.2f} times the mean on the busiest of {num_ranks} ranks, then {after:.2f} times\n"
        f"{request.model.name}, {num_ranks} ranks x {request.tokens_per_rank:,} tokens, first optimizer step",
        x=0.01,
        ha="left",
    )
    return figure


def draw_balance(work_before: Sequence[Sequence[int]], work: Sequence[Sequence[int]], path: Path) -> None:
    """Draws the attention time of every micro-batch of a run, before and after placement.

    A bar is the mean work of the ranks, 1.0, and on top of it the time of waiting for the busiest rank.

    Args:
        work_before, work: `[micro_batches][ranks]` attended pairs.
        path: file to write; its ending decides the format.
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
    with replaced(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
    pyplot.close(figure)
