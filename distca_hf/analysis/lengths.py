"""Lengths: document lengths from files and datasets, see docs/will-it-help.md. `READERS` has a reader for
each ending.

Text files may be compressed (`.gz`). A column of lengths has one of the names in `NUMBER_COLUMNS` and whole numbers,
or is called `input_ids` and has lists, whose lengths count. If there are several, they must agree in every row.

A saved dataset with `input_ids` must be one that the loader accepts, and is read as the loader reads it
(`data.documents`). It may have any other columns. With a column `seq_lengths`, a row has several documents.

Two more columns may say which documents begin alike (`groups`).
"""

import csv
import gzip
import json
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from distca_hf.analysis.groups import GROUP_COLUMNS, PREFIX_COLUMN, Groups
from distca_hf.arrays import IntArray, as_int_array
from distca_hf.data.documents import DocumentSource
from distca_hf.data.rows import FOR_LENGTHS
from distca_hf.errors import PackingError, and_more, first_line
from distca_hf.layout import check_document_tokens
from distca_hf.recipe import LENGTHS


if TYPE_CHECKING:
    from pyarrow import ChunkedArray


# Columns that may hold lengths, in order of preference, and the column of tokens, whose rows are counted.
NUMBER_COLUMNS = ("length", "lengths", "num_tokens", "token_count", "n_tokens")
TOKENS_COLUMN = "input_ids"
# Column of the lengths of the documents of each row, which TRL's packing adds.
SEQUENCES_COLUMN = "seq_lengths"
COLUMNS = (*NUMBER_COLUMNS, TOKENS_COLUMN)
# Columns of texts.
TEXT_COLUMNS = frozenset({"text", "content", "messages", "conversations", "prompt"})
# Most that is read at once, or a small compressed file could fill memory: lengths of 100 million documents, and tokens
# of a document of 40 million.
MOST_CHARACTERS, MOST_LINE_CHARACTERS = 2**30, 2**28


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """`[documents]` lengths in tokens, and their file and column. `grouping`: values of the `GROUP_COLUMNS` that the
    file has; empty without prefixes. `groups`: which documents begin alike; None if that is not known."""

    tokens: IntArray
    source: str
    grouping: Mapping[str, list[object]] = field(default_factory=dict)
    groups: Groups | None = None


def read_lengths(path: Path) -> DocumentLengths:
    """Reads document lengths from a file or folder, or from a shipped sample of this name. Raises PackingError if the
    file cannot be read, has no column of lengths or several, or a length is out of range."""
    sample = None if path.exists() else LENGTHS.files().get(str(path))
    try:
        lengths = _read(path) if sample is None else replace(_read(sample), source=str(path))
    except PackingError:
        raise
    except Exception as error:  # libraries that read files may raise anything
        raise PackingError(f"{path} cannot be read: {first_line(error)}") from error
    if len(lengths.tokens) == 0:
        raise PackingError(f"{lengths.source} has no documents")
    tokens = check_document_tokens(lengths.tokens, lengths.source)
    return replace(lengths, tokens=tokens, groups=Groups.of_columns(lengths.grouping, tokens, str(path)))


def _read(path: Path) -> DocumentLengths:
    if path.is_dir():
        files = _files_of(path)
        return _read_files(files, path) if files else _read_dataset(path)
    if "*" in str(path) and not path.exists() and (files := sorted(path.parent.glob(path.name))):
        return _read_files(files, path)
    if reader := READERS.get(_ending(path)):
        return reader(path)
    endings = ", ".join(f".{ending}" for ending in READERS)
    raise PackingError(f"{path} must end in {endings}, or be a folder of such files or of a saved dataset")


def _ending(path: Path) -> str:
    """Returns the ending of a file's name, for text without the ending of its compression."""
    text = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    return text if text in TEXT_READERS else path.suffix.lower().removeprefix(".")


def _files_of(folder: Path) -> list[Path]:
    """Returns the files of lengths in a folder, in the order of their names; none if it is a saved dataset."""
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        return []
    endings = READERS.keys() - {"json"}  # the ending of metadata files
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _ending(file) in endings)
    names = sorted({re.sub(r"\d+", "*", str(file.relative_to(folder))) for file in files})
    if len(names) > 1:
        way = f"give a pattern of those to read, in quotes: '{folder / names[0]}'"
        raise PackingError(f"{folder} holds files of several datasets or kinds: {', '.join(names)}; {way}")
    return files


def _read_files(files: Sequence[Path], source: Path) -> DocumentLengths:
    read = [_read(file) for file in files]
    columns = sorted({one.source.removeprefix(str(file)) for one, file in zip(read, files, strict=True)})
    if len(columns) > 1:
        raise PackingError(f"{source}: files have lengths in other columns than others{' and'.join(columns)}")
    grouping = {name: [each for one in read for each in one.grouping.get(name, ())] for name in read[0].grouping}
    if any(one.grouping.keys() != grouping.keys() for one in read):
        raise PackingError(f"{source}: only some of the files have a column {PREFIX_COLUMN}")
    tokens = np.concatenate([one.tokens for one in read])
    return DocumentLengths(tokens, f"{source}, {len(files)} files{columns[0]}", grouping)


def _read_parquet(path: Path) -> DocumentLengths:
    """Reads the columns of lengths of a Parquet file, a part of its rows at a time: tokens may be many."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    columns = choose_columns(file.schema_arrow.names, path)
    parts: dict[str, list[IntArray]] = {column: [np.zeros(0, dtype=np.int64)] for column in columns}
    grouping = _empty_grouping(file.schema_arrow.names)
    for rows in file.iter_batches(columns=[*columns, *grouping]):
        for name, known in grouping.items():
            known += rows.column(name).to_pylist()
        for column in columns:
            values = pa.chunked_array([rows.column(column)])
            rows_before = sum(map(len, parts[column]))
            parts[column].append(_from_arrow(values, f"{path}, column {column}", rows_before))
    return _same({column: np.concatenate(part) for column, part in parts.items()}, path, grouping)


def _read_dataset(path: Path) -> DocumentLengths:
    """Reads the columns of lengths of a saved `datasets.Dataset`, or of one of its files."""
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))
    if not isinstance(dataset, Dataset):
        raise PackingError(f"{path} holds several datasets: {', '.join(dataset)}; give the folder of one of them")
    grouping = _empty_grouping(dataset.column_names)
    if grouping:
        in_groups = dataset.select_columns(list(grouping)).with_format("arrow")[:]
        grouping = {name: in_groups[name].to_pylist() for name in grouping}
    if TOKENS_COLUMN in dataset.column_names:  # as the loader reads it
        try:
            tokens = DocumentSource(dataset, sys.maxsize, reading=FOR_LENGTHS).document_tokens
        except PackingError as error:
            raise PackingError(f"{path}: {error}") from error
        column = SEQUENCES_COLUMN if SEQUENCES_COLUMN in dataset.column_names else TOKENS_COLUMN
        if grouping and column == SEQUENCES_COLUMN:
            reason = "rows hold several documents, and one could have the prefix; remove one of the columns"
            raise PackingError(f"{path} has columns {PREFIX_COLUMN} and {SEQUENCES_COLUMN}: {reason}")
        return DocumentLengths(tokens, f"{path}, column {column}", grouping)
    table = dataset.select_columns(choose_columns(dataset.column_names, path)).with_format("arrow")[:]
    columns = {column: _from_arrow(table[column], f"{path}, column {column}") for column in table.column_names}
    return _same(columns, path, grouping)


def _empty_grouping(names: Sequence[str]) -> dict[str, list[object]]:
    """Returns an empty list, to be filled, for each of `GROUP_COLUMNS`; none without a column of prefixes: then one
    called `group` may be anything."""
    return {name: [] for name in GROUP_COLUMNS if name in names and PREFIX_COLUMN in names}


def _same(columns: Mapping[str, IntArray], path: Path, grouping: Mapping[str, list[object]]) -> DocumentLengths:
    """Returns the lengths that all columns have."""
    if not columns:  # nor rows
        return DocumentLengths(np.zeros(0, dtype=np.int64), str(path))
    (name, tokens), *others = columns.items()
    for other, lengths in others:
        if (rows := np.flatnonzero(tokens != lengths)).size:
            row = int(rows[0])
            raise PackingError(
                f"{path} has several columns of lengths, and in row {row} {name} is {tokens[row]} and {other} "
                f"{lengths[row]}{and_more(len(rows) - 1)}; keep one of the columns"
            )
    return DocumentLengths(tokens, f"{path}, column {name}", grouping)


def _from_arrow(values: "ChunkedArray", source: str, rows_before: int = 0) -> IntArray:
    """Returns lengths from an arrow column, or from some of its rows: its numbers, or the lengths of its lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if values.null_count:
        row = rows_before + pc.index(values.is_null(), True).as_py()
        raise PackingError(f"{source}: row {row} is empty{and_more(values.null_count - 1)}")
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not source.endswith(TOKENS_COLUMN):
            raise PackingError(f"{source} has lists, not whole numbers")
        values = pc.list_value_length(values)
    elif not pa.types.is_integer(kind) or source.endswith(TOKENS_COLUMN):
        wanted = "lists of tokens" if source.endswith(TOKENS_COLUMN) else "whole numbers"
        raise PackingError(f"{source} has {kind}, not {wanted}")
    return as_int_array(values.to_numpy(), source)


def choose_columns(names: Sequence[str], path: Path) -> list[str]:
    """Returns the columns of lengths."""
    if SEQUENCES_COLUMN in names:
        raise PackingError(
            f"{path} has a column {SEQUENCES_COLUMN}: its rows hold several documents; give the folder of a dataset "
            "saved with save_to_disk, which has input_ids, too"
        )
    found = [name for name in COLUMNS if name in names]
    if found:
        return found
    there = ", ".join(names) if names else "none"
    way = OF_TEXTS if TEXT_COLUMNS & set(names) else ""
    raise PackingError(f"{path} has no column of lengths ({', '.join(COLUMNS)}); its columns: {there}{way}")


def read_json(path: Path) -> DocumentLengths:
    """Reads a flat JSON list, or objects, one per line, as `datasets` writes them under this ending."""
    with _open(path) as file:
        text = file.read(MOST_CHARACTERS + 1)
    if text.startswith("{"):
        return read_jsonl(path)
    if len(text) > MOST_CHARACTERS:
        reason = f"holds more than {MOST_CHARACTERS:,} characters; give the lengths as .txt or .parquet"
        raise PackingError(f"{path} {reason}")
    values = _parsed(text, str(path))
    if not isinstance(values, list):
        raise PackingError(f"{path} must hold a flat list of whole numbers, not {kind_of(values)}")
    numbers = Numbers(str(path), "entry")
    for value in values:
        numbers.add(value)
    return DocumentLengths(numbers.array(), str(path))


def read_jsonl(path: Path) -> DocumentLengths:
    """Reads JSON objects, one per line; all must have the columns of the first."""
    columns: dict[str, Numbers] = {}
    grouping = _empty_grouping(GROUP_COLUMNS)
    with _open(path) as file:
        for line_number, line in enumerate(_lines(file, path), start=1):
            if not line.strip():
                continue
            row = _parsed(line, f"{path}, line {line_number}")
            if not isinstance(row, dict):
                raise PackingError(f"{path}, line {line_number} must be an object with a length, not {kind_of(row)}")
            if not columns:
                columns = {name: Numbers(f"{path}, column {name}", "row") for name in choose_columns(list(row), path)}
            for column, numbers in columns.items():
                if column == TOKENS_COLUMN:
                    numbers.add_length(row.get(column))
                else:
                    numbers.add(row.get(column))
            for name, known in grouping.items():
                known.append(row.get(name))
    return _same({column: numbers.array() for column, numbers in columns.items()}, path, grouping)


def read_csv(path: Path) -> DocumentLengths:
    """Reads a column of a table whose first line has names, or a single column of numbers without a name."""
    with _open(path) as file:
        separator = "\t" if _ending(path) == "tsv" else ","
        rows = (row for row in csv.reader(_lines(file, path), delimiter=separator) if row)
        names = [name.strip() for name in next(rows, [])]
        if len(names) == 1 and (names[0].isdecimal() or SAVETXT.fullmatch(names[0])):
            unnamed = Numbers(str(path), "row")
            unnamed.add_text(names[0])
            for row in rows:
                unnamed.add_text(row[0])
            return DocumentLengths(unnamed.array(), str(path))
        chosen = choose_columns([name for name in names if name != TOKENS_COLUMN], path) if names else []
        if twice := [name for name in chosen if names.count(name) > 1]:
            raise PackingError(f"{path} has {names.count(twice[0])} columns {twice[0]}; keep one of them")
        columns = {name: (names.index(name), Numbers(f"{path}, column {name}", "row")) for name in chosen}
        grouping = _empty_grouping(names)
        for row in rows:
            for at, numbers in columns.values():
                numbers.add_text(row[at] if at < len(row) else "")
            for name, known in grouping.items():
                known.append(row[names.index(name)] if names.index(name) < len(row) else "")
    return _same({name: numbers.array() for name, (_, numbers) in columns.items()}, path, grouping)


def read_txt(path: Path) -> DocumentLengths:
    """Reads one number per line; a line that begins with # is a comment, as `numpy.savetxt` writes headers."""
    numbers = Numbers(str(path), "number")
    with _open(path) as file:
        for line in _lines(file, path):
            if line.strip() and not line.startswith("#"):
                numbers.add_text(line)
    return DocumentLengths(numbers.array(), str(path))


def read_npy(path: Path) -> DocumentLengths:
    """Reads an array of one dimension."""
    return DocumentLengths(as_int_array(np.load(path, allow_pickle=False), str(path)), str(path))


# Formats by the ending of a file: of text, compressed or not, and all.
TEXT_READERS = {"json": read_json, "jsonl": read_jsonl, "csv": read_csv, "tsv": read_csv, "txt": read_txt}
READERS = {**TEXT_READERS, "parquet": _read_parquet, "arrow": _read_dataset, "npy": read_npy}


def _open(path: Path) -> TextIO:
    """Opens text that may be compressed, with or without a byte order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    while line := file.readline(MOST_LINE_CHARACTERS + 1):
        if len(line) > MOST_LINE_CHARACTERS:
            raise PackingError(f"{path} has a line of more than {MOST_LINE_CHARACTERS:,} characters")
        yield line


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PackingError(f"{where} is not JSON: {error}") from error


# A word of a text, and what to do with a file of texts.
WORD = re.compile(r"[^\W\d_]{2}")
OF_TEXTS = (
    '. Tokenise texts first: python "$(distca examples tokenise_texts)" MODEL FILE FOLDER reads a column text '
    "(of chats, make one with their template); then give FOLDER"
)
# A number as `numpy.savetxt` writes it.
SAVETXT = re.compile(r"-?\d\.\d+e[+-]\d+")


class Numbers:
    """Whole numbers in the order in which they are read. Errors name their source, and one of them as `each`, such as
    "row"."""

    def __init__(self, source: str, each: str) -> None:
        self._source = source
        self._each = each
        self._numbers = array("q")

    def add(self, value: object) -> None:
        """Adds an integer; refuses all other JSON values, such as 3.0 and true."""
        if type(value) is not int:
            raise self._refusal(kind_of(value), isinstance(value, str | dict))
        if abs(value) >= 2**63:
            raise PackingError(f"{self._next} is {_short(value)}, far more tokens than a document can have")
        self._numbers.append(value)

    def add_length(self, value: object) -> None:
        if not isinstance(value, list):
            raise PackingError(f"{self._next} is {kind_of(value)}, not a list of tokens")
        self._numbers.append(len(value))

    def add_text(self, text: str) -> None:
        """Adds a number from its digits, or as `numpy.savetxt` writes it."""
        digits = text.strip()
        if SAVETXT.fullmatch(digits) and float(digits).is_integer():
            digits = str(int(float(digits)))
        if not digits.removeprefix("-").isdecimal() or not digits.isascii():
            raise self._refusal(_short(digits), WORD.search(digits) is not None)
        self.add(int(digits) if len(digits) < 32 else 10**32)

    def array(self) -> IntArray:
        return np.array(self._numbers, dtype=np.int64)

    @property
    def _next(self) -> str:
        return f"{self._source}: {self._each} {len(self._numbers)}"

    def _refusal(self, kind: str, is_text: bool) -> PackingError:
        """Returns the error for a value that is not a number; if the first value is text, with the way to lengths."""
        way = OF_TEXTS if is_text and not self._numbers else ""
        return PackingError(f"{self._next} is {kind}, not a whole number{way}")


def kind_of(value: object) -> str:
    """Describes a JSON value briefly."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"a text of {len(value)} characters" if isinstance(value, str) else _short(value)


def _short(value: object) -> str:
    """Returns a value as JSON writes it, in a few characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
