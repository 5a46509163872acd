"""Tables in Markdown: whole, or row by row as they are measured."""

from collections.abc import Iterable, Sequence


def head(columns: Sequence[str], text_columns: int = 1) -> str:
    """Returns the first two lines of a table whose first columns are text, and the others numbers."""
    marks = ["---"] * text_columns + ["---:"] * (len(columns) - text_columns)
    return f"{row(columns)}\n|{'|'.join(marks)}|"


def row(cells: Iterable[object]) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table whose first column is text, and the others numbers."""
    return "\n".join([head(columns), *map(row, rows)])


def number(value: float | None, unit: float, digits: int) -> str:
    """Returns a value times `unit`, with so many digits after the point; "-" if there is none."""
    return "-" if value is None else f"{value * unit:.{digits}f}"
