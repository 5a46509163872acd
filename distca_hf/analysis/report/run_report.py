"""Run report: runs `distca report`. Reads a run (a folder of traces) or the JSON of another command, and writes a page
or JSON, and a few lines.

The page is one HTML file that needs no network and no library. Its templates are in `page/`: the frame, a stylesheet,
and scripts that draw. They are copied into the file unchanged.
"""

import html
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.report.estimates import (
    GIVEN_FIELDS,
    PLAN_FIELDS,
    SIMULATION,
    Predictor,
    read_given,
    read_plan,
    read_simulation,
)
from distca_hf.analysis.report.figures import KIND, Report, fitted
from distca_hf.analysis.report.run_folder import read_folder
from distca_hf.analysis.tables import COLUMNS
from distca_hf.errors import ReportError, first_line, printable
from distca_hf.trace_file import read_json
from distca_hf.version import __version__
from distca_hf.whole_file import read_at_most, replaced


# A path that stands for standard input.
STANDARD_INPUT = "-"
# Most JSON to read: a thousand times the size of a plan for 1,000 ranks.
MOST_BYTES = 2**30


# Readers of JSON, by the command that prints it.
READERS: dict[str, Callable[[Mapping[str, Any], str], Report]] = {
    "distca plan": read_plan,
    "distca plan --batch-size": read_given,
    "distca simulate": read_simulation,
}


def _command_of(content: Mapping[str, Any]) -> str | None:
    """Returns the command that printed an object; None if it is not one of `READERS`."""
    if all(name in content for name in PLAN_FIELDS):
        return "distca plan"
    if all(name in content for name in GIVEN_FIELDS):
        return "distca plan --batch-size"
    return "distca simulate" if content.get("kind") == SIMULATION else None


def read_source(path: Path, cluster: str | None = None) -> Report:
    """Returns the report of a run, or of another command's output. `cluster`: name or file of the profile that seconds
    of a run are predicted from; None for the one of its GPUs."""
    if path.is_dir():
        return read_folder(path, Predictor(None if cluster is None else find_profile(cluster), path))
    if cluster is not None:
        raise ReportError(
            f"--cluster {cluster}: seconds of a run are predicted from it, and {path} is not the folder of one"
        )
    content = _object_of(path)
    if (command := _command_of(content)) is not None:
        try:
            return READERS[command](content, str(path))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ReportError(
                f"{path} is not what {command} --json of this version prints ({type(error).__name__}: "
                f"{first_line(error)}); run it again"
            ) from error
    if content.get("kind") == KIND:
        raise ReportError(f"{path} is printed by distca report itself; give what that was made of")
    raise ReportError(
        f"{path} is JSON of no command that is known here: give a folder of traces, or the output of "
        f"{' or '.join(f'{command} --json' for command in READERS)}"
    )


def _object_of(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object in a file, or on standard input."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == STANDARD_INPUT else path.open("rb") as file:
            text = read_at_most(file, MOST_BYTES).decode()
    except FileNotFoundError:
        raise ReportError(f"{path} does not exist: give a folder of traces, or a file of JSON") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path} is not text: give a folder of traces, or a file of JSON") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        content = read_json(text)
    except ReportError as error:
        raise ReportError(f"{path} has {error}") from None
    except (ValueError, RecursionError):
        raise ReportError(f"{path} is not JSON, or cut off; for a run give the folder of its traces") from None
    if not isinstance(content, Mapping):
        raise ReportError(f"{path} holds a {type(content).__name__}, and not an object of JSON")
    return content


TEMPLATES = files("distca_hf.analysis.report") / "page"
# Scripts, in the order in which they need each other.
SCRIPTS = (
    *("numbers.js", "drawing.js", "picture.js", "columns.js", "work.js", "matrix.js"),
    *("timeline.js", "seconds.js", "memory.js", "bars.js", "main.js"),
)


def page_of(report: Report) -> str:
    """Returns the page."""
    script = "\n".join(_template(name) for name in SCRIPTS)
    parts = {
        "title": html.escape(report.title),
        "summary": "\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in report.summary),
        "notes": "\n".join(f"<li>{html.escape(note)}</li>" for note in report.notes),
        "version": html.escape(__version__),
        "style": _template("report.css"),
        "script": f'"use strict";\n(() => {{\n{script}\n}})();',
        "figures": json.dumps(report.as_json(), separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = _template("report.html")
    # Parts are put in at once, so that none is looked for in another.
    pieces = text.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def write_page(report: Report, path: Path, named: bool) -> int:
    """Writes the page into a file, which appears when it is complete; returns its bytes. `named`: see `replaced`."""
    content = page_of(report).encode()
    try:
        with replaced(path, named=named) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise ReportError(f"--output {path} cannot be written: {error.strerror or error}") from error
    return len(content)


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


# Name of the page, unless another is given.
PAGE = Path("report.html")


def run_report(source: Path, output: Path | None, as_json: bool, cluster: str | None = None) -> None:
    """Runs `distca report` on a folder of traces, a file of JSON, or "-" for standard input. Prints output at the very
    end: nothing is printed before an error. `output`: the page; by default `report.html`, and with `as_json` none.
    `cluster`: see `read_source`."""
    report = read_source(source, cluster)
    page = output or (None if as_json else PAGE)
    size = 0 if page is None else write_page(fitted(report), page, named=output is not None)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
        return
    sentences = [f"{report.title}:", *report.summary]
    if report.steps:
        step = report.steps[report.begin_with]
        sentences += [f"{step.label}:", *step.findings]
    sentences += report.notes
    lines = [textwrap.fill(sentence, COLUMNS, break_on_hyphens=False) for sentence in sentences]
    sys.stdout.write(printable("\n".join([*lines, "", f"{page}: {size / 1000:,.0f} KB, open it in a browser", ""])))
