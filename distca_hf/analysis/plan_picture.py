"""Plan picture: an answer as a drawing. Needs the extra `report`."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from distca_hf.analysis.plan_answer import PlanAnswer
from distca_hf.errors import ConfigError


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_can_draw(path: Path) -> None:
    """Checks what can be known before anything is planned.

    Raises:
        ConfigError: matplotlib is missing, it knows no such format, or there is no such folder.
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


def draw_answer(answer: PlanAnswer, path: Path) -> None:
    """Draws an answer; the file appears when it is complete.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = figure_of(answer)
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        try:
            figure.savefig(unfinished, dpi=120)
            os.chmod(unfinished, 0o644)
            os.replace(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def figure_of(answer: PlanAnswer) -> "Figure":
    """Returns the work of every rank over the mean in the first optimizer step, before and after, and how imbalanced
    the micro-batches of the epoch are in order."""
    from matplotlib.figure import Figure

    report = answer.step
    request, num_ranks = report.request, report.request.num_ranks
    before, after = report.imbalance_before, report.planned.figures.imbalance
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
