"""Page: writes a report as one HTML file, which needs no network and no library.

Its templates are in `page/`: the frame, one stylesheet, and scripts that draw. They are put into the file as they are.
"""

import html
import json
from importlib.resources import files
from pathlib import Path

from distca_hf.analysis.report.figures import Report
from distca_hf.errors import ReportError
from distca_hf.version import __version__
from distca_hf.whole_file import replaced


TEMPLATES = files("distca_hf.analysis.report") / "page"
# Scripts, in the order in which they need each other.
SCRIPTS = (
    "numbers.js",
    "drawing.js",
    "picture.js",
    "columns.js",
    "work.js",
    "matrix.js",
    "timeline.js",
    "seconds.js",
    "memory.js",
    "bars.js",
    "main.js",
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
    """Writes the page into a file, which appears when it is complete; returns its bytes.

    Args:
        named: see `replaced`.

    Raises:
        ReportError: it cannot be written.
    """
    content = page_of(report).encode()
    try:
        with replaced(path, named=named) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise ReportError(f"--output {path} cannot be written: {error.strerror or error}") from error
    return len(content)


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
