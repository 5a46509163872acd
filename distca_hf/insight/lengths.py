"""Lengths: document lengths from whatever file has them.

| what | how |
|---|---|
| `.json`, `.json.gz` | a flat list of whole numbers |
| `.jsonl`, `.jsonl.gz` | objects, one a line, with a column of lengths |
| `.parquet` | a column of lengths |
| a folder | what `datasets.Dataset.save_to_disk` wrote, with a column of lengths |
| `pretrain`, `prolong` | samples that come with distca_hf, where there is no file of that name |

A column of lengths is called `length`, `lengths` or `num_tokens` and has whole numbers, or is called `input_ids` and
has lists, whose lengths count. There must be one of them.

A folder with `input_ids` is what the loader takes, and is read as the loader reads it (`packing.source`): whatever
else it has, and with several documents in a row if `seq_lengths` says so.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distca_hf.cost import IntArray
from distca_hf.errors import PackingError
from distca_hf.layout import as_int_array, check_document_tokens
from distca_hf.packing.source import DocumentSource
from distca_hf.shipped import LENGTHS


NUMBER_COLUMNS = ("length", "lengths", "num_tokens")
TOKENS_COLUMN = "input_ids"
# Lengths of the documents of each row, from TRL's packing.
SEQUENCES_COLUMN = "seq_lengths"
COLUMNS = (*NUMBER_COLUMNS, TOKENS_COLUMN)


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """`[documents]` tokens of each, and the file and column they come from."""

    tokens: IntArray
    source: str


def read_lengths(path: Path) -> DocumentLengths:
    """Reads document lengths from a file or folder, or from a shipped sample of this name.

    Raises:
        PackingError: it cannot be read, has no lengths, more than one column of them, or a length is out of range.
    """
    sample = None if path.exists() else LENGTHS.files().get(str(path))
    try:
        lengths = _read(path) if sample is None else DocumentLengths(_read(sample).tokens, str(path))
    except PackingError:
        raise
    except Exception as error:  # readers of files raise whatever they like: all of it means the file is not readable
        raise PackingError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if len(lengths.tokens) == 0:
        raise PackingError(f"{lengths.source} has no documents")
    return DocumentLengths(check_document_tokens(lengths.tokens, lengths.source), lengths.source)


def _read(path: Path) -> DocumentLengths:
    """Reads the lengths in the way that the path's ending asks for."""
    if path.is_dir():
        return _read_dataset(path)
    ending = path.name.removesuffix(".gz").rpartition(".")[2]
    if ending == "json":
        return _read_list(path)
    if ending == "jsonl":
        return _read_lines(path)
    if ending == "parquet" and path.suffix != ".gz":
        return _read_parquet(path)
    raise PackingError(f"{path} must end in .json, .jsonl, .parquet or be a folder of a saved dataset")


def _read_list(path: Path) -> DocumentLengths:
    """Reads a flat JSON list."""
    numbers = json.loads(_text(path))
    if not isinstance(numbers, list):
        raise PackingError(f"{path} must hold a flat list of whole numbers, not {_kind(numbers)}")
    return DocumentLengths(_whole_numbers(numbers, str(path), "entry"), str(path))


def _read_lines(path: Path) -> DocumentLengths:
    """Reads JSON objects, one a line; all have the column that the first has."""
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise PackingError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise PackingError(f"{path}, line {number} must be an object with a length, not {_kind(row)}")
            rows.append(row)
    if not rows:
        return DocumentLengths(np.zeros(0, dtype=np.int64), str(path))
    column = _choose_column(list(rows[0]), path)
    source = f"{path}, column {column}"
    values = [row.get(column) for row in rows]
    if column != TOKENS_COLUMN:
        return DocumentLengths(_whole_numbers(values, source, "row"), source)
    lengths = []
    for number, tokens in enumerate(values):
        if not isinstance(tokens, list):
            raise PackingError(f"{source}: row {number} is {_kind(tokens)}, not a list of tokens")
        lengths.append(len(tokens))
    return DocumentLengths(np.array(lengths, dtype=np.int64), source)


def _read_parquet(path: Path) -> DocumentLengths:
    """Reads one column of a Parquet file."""
    import pyarrow.parquet as pq

    column = _choose_column(pq.read_schema(path).names, path)
    return _from_arrow(pq.read_table(path, columns=[column])[column], f"{path}, column {column}")


def _read_dataset(path: Path) -> DocumentLengths:
    """Reads one column of a saved `datasets.Dataset`."""
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(path))
    if not isinstance(dataset, Dataset):
        raise PackingError(f"{path} holds several datasets: {', '.join(dataset)}; give the folder of one of them")
    if TOKENS_COLUMN in dataset.column_names:
        return _read_source(dataset, path)
    column = _choose_column(dataset.column_names, path)
    values = dataset.select_columns([column]).with_format("arrow")[:][column]
    return _from_arrow(values, f"{path}, column {column}")


def _read_source(dataset: Any, path: Path) -> DocumentLengths:
    """Reads documents as the loader finds them."""
    try:
        tokens = DocumentSource(dataset, sys.maxsize).document_tokens
    except PackingError as error:
        raise PackingError(f"{path}: {error}") from error
    column = SEQUENCES_COLUMN if SEQUENCES_COLUMN in dataset.column_names else TOKENS_COLUMN
    return DocumentLengths(tokens, f"{path}, column {column}")


def _from_arrow(values: Any, source: str) -> DocumentLengths:
    """Returns lengths from an arrow column: its numbers, or the lengths of its lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if values.null_count:
        raise PackingError(f"{source}: {values.null_count} of {len(values)} rows are empty")
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not source.endswith(TOKENS_COLUMN):
            raise PackingError(f"{source} has lists, not whole numbers")
        values = pc.list_value_length(values)
    elif not pa.types.is_integer(kind) or source.endswith(TOKENS_COLUMN):
        wanted = "lists of tokens" if source.endswith(TOKENS_COLUMN) else "whole numbers"
        raise PackingError(f"{source} has {kind}, not {wanted}")
    return DocumentLengths(as_int_array(values.to_numpy(), source), source)


def _choose_column(names: Sequence[str], path: Path) -> str:
    """Returns the one column that says lengths.

    Raises:
        PackingError: there is none, or more than one, or rows hold several documents; names the columns.
    """
    if SEQUENCES_COLUMN in names:
        raise PackingError(
            f"{path} has a column {SEQUENCES_COLUMN}: its rows hold several documents; give the folder of a dataset "
            "saved with save_to_disk, which has input_ids, too"
        )
    found = [name for name in COLUMNS if name in names]
    if len(found) == 1:
        return found[0]
    if found:
        raise PackingError(f"{path} has several columns of lengths, {', '.join(found)}; keep one of them")
    there = ", ".join(names) if names else "none"
    raise PackingError(f"{path} has no column of lengths ({', '.join(COLUMNS)}); its columns: {there}")


def _whole_numbers(values: list[Any], source: str, each: str) -> IntArray:
    """Returns values that JSON calls integers; refuses all others: 3.0, true."""
    for at, value in enumerate(values):
        if type(value) is not int:
            raise PackingError(f"{source}: {each} {at} is {_kind(value)}, not a whole number")
        if abs(value) >= 2**63:
            raise PackingError(f"{source}: {each} {at} is {_short(value)}, far more tokens than a document can have")
    return np.array(values, dtype=np.int64)


def _kind(value: Any) -> str:
    """Returns the name that JSON has for a value."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"a text of {len(value)} characters" if isinstance(value, str) else _short(value)


def _short(value: Any) -> str:
    """Returns a number as JSON writes it, in a few characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _text(path: Path) -> str:
    """Reads the text of a file, possibly compressed."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
