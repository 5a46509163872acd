"""Plan picture: a plan report as a drawing. Needs the extra `report`."""

import os
import tempfile
from pathlib import Path

from distca_hf.errors import ConfigError
from distca_hf.insight.plan_report import PlanReport


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


def draw_report(report: PlanReport, path: Path) -> None:
    """Draws the work of every rank over the mean, before and after; the file appears when it is complete.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    num_ranks = report.request.num_ranks
    figure = Figure(figsize=(min(16.0, 5.0 + 0.1 * num_ranks), 5.0), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for panel, title, work, imbalance in (
        (panels[0], "documents in order", report.work_before, report.imbalance_before),
        (panels[1], f"{report.request.layout} by distca", report.work, report.planned.figures.imbalance),
    ):
        panel.bar(range(num_ranks), work * (num_ranks / max(1, int(work.sum()))), width=0.9)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{title}: max / mean work {imbalance:.3f}", loc="left", fontsize="medium")
        panel.set_ylabel("work / mean")
    panels[1].set_xlabel("rank")
    panels[1].margins(x=0.01)
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
