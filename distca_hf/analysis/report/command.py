"""Command: `distca report`, from a run or the output of another command to a page, JSON, and a few lines."""

import json
import sys
import textwrap
from pathlib import Path

from distca_hf.analysis.report.figures import Report
from distca_hf.analysis.report.page import write_page
from distca_hf.analysis.report.small_enough import fitted
from distca_hf.analysis.report.sources import read_source
from distca_hf.analysis.terminal import COLUMNS
from distca_hf.errors import printable


# Name of the page, unless another is given.
PAGE = Path("report.html")


def run_report(source: Path, output: Path | None, as_json: bool, cluster: str | None = None) -> None:
    """Runs `distca report`. Output is printed at the very end, so that an error leaves nothing behind.

    Args:
        source: a folder of traces, a file of JSON, or "-" for standard input.
        output: the page to write; by default `report.html`, and with `as_json` none.
        as_json: prints all figures as one JSON object.
        cluster: name or file of the profile that seconds of a run are predicted from; None: that of its GPUs.

    Raises:
        ReportError: nothing there can be read, or the page cannot be written.
        ConfigError: there is no such profile.
    """
    report = read_source(source, cluster)
    page = output or (None if as_json else PAGE)
    size = 0 if page is None else write_page(fitted(report), page, named=output is not None)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        sys.stdout.write(_in_words(report, page, size))


def _in_words(report: Report, page: Path | None, size: int) -> str:
    """Returns the lines that are printed."""
    sentences = [f"{report.title}:", *report.summary]
    if report.steps:
        step = report.steps[report.begin_with]
        sentences += [f"{step.label}:", *step.findings]
    sentences += report.notes
    lines = [textwrap.fill(sentence, COLUMNS, break_on_hyphens=False) for sentence in sentences]
    return printable("\n".join([*lines, "", f"{page}: {size / 1000:,.0f} KB, open it in a browser", ""]))
