"""Tables in Markdown: whole, or row by row as they are measured."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any


Figures = Mapping[str, Any]
# Columns by their titles: each makes a cell from the figures of a row.
Columns = Mapping[str, Callable[[Figures], object]]


def head(columns: Iterable[str], text_columns: int = 1) -> str:
    """Returns the first two lines of a table whose first columns are text, and the others numbers."""
    titles = [*columns]
    marks = ["---"] * text_columns + ["---:"] * (len(titles) - text_columns)
    return f"{row(titles)}\n|{'|'.join(marks)}|"


def row(cells: Iterable[object]) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_of(columns: Columns, figures: Mapping[str, Figures], first: str = "mode") -> str:
    """Returns a Markdown table with a row for each name."""
    rows = [row([name, *(cell(of) for cell in columns.values())]) for name, of in figures.items()]
    return "\n".join([head([first, *columns]), *rows])


def figure(name: str, unit: float, digits: int) -> Callable[[Figures], str]:
    """Returns a column with the figure of a name, in a unit and with so many digits after the point."""
    return lambda of: number(of[name], unit, digits)


def peak_gib(of: Figures) -> str:
    """Makes a cell of the most memory that torch had given out at once, which is 0 on CPUs."""
    return number(of["peak_bytes"] or None, 2**-30, 1)


def number(value: float | None, unit: float, digits: int) -> str:
    """Returns a value times `unit`, with so many digits after the point; "-" if there is none."""
    return "-" if value is None else f"{value * unit:.{digits}f}"
