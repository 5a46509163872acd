"""Length texts: document lengths from files of text. Lines are read one after the other: there may be millions."""

import csv
import gzip
import json
from array import array
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from distca_hf.analysis.length_columns import TOKENS_COLUMN, choose_column
from distca_hf.cost import IntArray
from distca_hf.errors import PackingError


class Numbers:
    """Whole numbers in the order in which they are read.

    Args:
        source: where they come from.
        each: what one of them is called there.
    """

    def __init__(self, source: str, each: str) -> None:
        self.source = source
        self._each = each
        self._numbers = array("q")

    def add(self, value: Any) -> None:
        """Takes what JSON calls an integer; refuses all others: 3.0, true."""
        if type(value) is not int:
            raise PackingError(f"{self._next} is {_kind(value)}, not a whole number")
        if abs(value) >= 2**63:
            raise PackingError(f"{self._next} is {_short(value)}, far more tokens than a document can have")
        self._numbers.append(value)

    def add_length(self, value: Any) -> None:
        """Takes the length of a list."""
        if not isinstance(value, list):
            raise PackingError(f"{self._next} is {_kind(value)}, not a list of tokens")
        self._numbers.append(len(value))

    def add_text(self, text: str) -> None:
        """Takes digits."""
        digits = text.strip()
        if not digits.removeprefix("-").isdecimal() or not digits.isascii():
            raise PackingError(f"{self._next} is {_short(digits)}, not a whole number")
        self.add(int(digits) if len(digits) < 32 else 10**32)

    def array(self) -> IntArray:
        """Returns `[documents]` numbers."""
        return np.array(self._numbers, dtype=np.int64)

    @property
    def _next(self) -> str:
        return f"{self.source}: {self._each} {len(self._numbers)}"


def read_json(path: Path) -> Numbers:
    """Reads a flat list."""
    with _open(path) as file:
        text = file.read()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise PackingError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, list):
        raise PackingError(f"{path} must hold a flat list of whole numbers, not {_kind(values)}")
    numbers = Numbers(str(path), "entry")
    for value in values:
        numbers.add(value)
    return numbers


def read_jsonl(path: Path) -> Numbers:
    """Reads objects, one a line; all have the column that the first has."""
    column, numbers = "", Numbers(str(path), "row")
    with _open(path) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _object(line, f"{path}, line {line_number}")
            if not column:
                column = choose_column(list(row), path)
                numbers = Numbers(f"{path}, column {column}", "row")
            if column == TOKENS_COLUMN:
                numbers.add_length(row.get(column))
            else:
                numbers.add(row.get(column))
    return numbers


def read_csv(path: Path) -> Numbers:
    """Reads a column of a table whose first line has names, or one column of numbers without a name."""
    with _open(path) as file:
        rows = (row for row in csv.reader(file) if row)
        first = next(rows, [])
        if len(first) <= 1 and "".join(first).strip().isdecimal():
            at, numbers = 0, Numbers(str(path), "row")
            numbers.add_text(first[0])
        elif first:
            names = [name.strip() for name in first]
            column = choose_column([name for name in names if name != TOKENS_COLUMN], path)
            at, numbers = names.index(column), Numbers(f"{path}, column {column}", "row")
        else:
            return Numbers(str(path), "row")
        for row in rows:
            numbers.add_text(row[at] if at < len(row) else "")
    return numbers


def read_txt(path: Path) -> Numbers:
    """Reads one number a line."""
    numbers = Numbers(str(path), "number")
    with _open(path) as file:
        for line in file:
            if line.strip():
                numbers.add_text(line)
    return numbers


def _open(path: Path) -> TextIO:
    """Opens text that may be compressed, with or without a byte order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PackingError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PackingError(f"{where} must be an object with a length, not {_kind(row)}")
    return row


def _kind(value: Any) -> str:
    """Returns the name that JSON has for a value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"a text of {len(value)} characters" if isinstance(value, str) else _short(value)


def _short(value: Any) -> str:
    """Returns a value as JSON writes it, in a few characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
