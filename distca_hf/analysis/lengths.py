"""Lengths: document lengths from whatever file has them.

| what | how |
|---|---|
| `.json` | a flat list of whole numbers |
| `.jsonl` | objects, one a line, with a column of lengths |
| `.csv` | a table with a column of lengths, or one column of whole numbers without a name |
| `.txt` | whole numbers, one a line |
| `.parquet` | a column of lengths |
| a folder | what `datasets.Dataset.save_to_disk` wrote, with a column of lengths |
| `pretrain`, `prolong` | samples that come with distca_hf, where there is no file of that name |

All but the last two may be compressed (`.gz`). A column of lengths is called `length`, `lengths` or `num_tokens` and
has whole numbers, or is called `input_ids` and has lists, whose lengths count. There must be one of them.

A folder with `input_ids` is what the loader takes, and is read as the loader reads it (`data.documents`): whatever
else it has, and with several documents in a row if `seq_lengths` says so.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca_hf.analysis.length_columns import SEQUENCES_COLUMN, TOKENS_COLUMN, choose_column
from distca_hf.analysis.length_texts import read_csv, read_json, read_jsonl, read_txt
from distca_hf.cost import IntArray
from distca_hf.data.documents import DocumentSource
from distca_hf.errors import PackingError
from distca_hf.layout import as_int_array, check_document_tokens
from distca_hf.shipped import LENGTHS


TEXTS = {"json": read_json, "jsonl": read_jsonl, "csv": read_csv, "txt": read_txt}


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
    ending = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    if ending in TEXTS:
        numbers = TEXTS[ending](path)
        return DocumentLengths(numbers.array(), numbers.source)
    if ending == "parquet" and path.suffix != ".gz":
        return _read_parquet(path)
    endings = ", ".join(f".{ending}" for ending in (*TEXTS, "parquet"))
    raise PackingError(f"{path} must end in {endings} or be a folder of a saved dataset")


def _read_parquet(path: Path) -> DocumentLengths:
    """Reads one column of a Parquet file."""
    import pyarrow.parquet as pq

    column = choose_column(pq.read_schema(path).names, path)
    return _from_arrow(pq.read_table(path, columns=[column])[column], f"{path}, column {column}")


def _read_dataset(path: Path) -> DocumentLengths:
    """Reads one column of a saved `datasets.Dataset`."""
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(path))
    if not isinstance(dataset, Dataset):
        raise PackingError(f"{path} holds several datasets: {', '.join(dataset)}; give the folder of one of them")
    if TOKENS_COLUMN in dataset.column_names:
        return _read_source(dataset, path)
    column = choose_column(dataset.column_names, path)
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
