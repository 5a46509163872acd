"""distca plan, lengths: the same documents from every kind of file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from distca_hf.analysis.lengths import read_lengths


LENGTHS = [3, 1, 4, 1, 5, 9]
TOKENS = [[7] * length for length in LENGTHS]


def lines(column: str, values: list[object]) -> str:
    return "\n".join(json.dumps({"id": at, column: value}) for at, value in enumerate(values)) + "\n"


def parquet(**columns: object) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


def table(between: str) -> str:
    return "\n".join([f"id{between}length", *(f"{at}{between}{length}" for at, length in enumerate(LENGTHS))])


def save(dataset: Dataset) -> Callable[[Path], object]:
    return dataset.save_to_disk


READABLE: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "list.json": (lambda path: path.write_text(json.dumps(LENGTHS)), None),
    "list.json.gz": (lambda path: path.write_bytes(gzip.compress(json.dumps(LENGTHS).encode())), None),
    "rows.jsonl": (lambda path: path.write_text(lines("num_tokens", LENGTHS)), "num_tokens"),
    "rows.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(lines("lengths", LENGTHS).encode())), "lengths"),
    "tokens.jsonl": (lambda path: path.write_text(lines("input_ids", TOKENS)), "input_ids"),
    "table.csv": (lambda path: path.write_text(table(", ")), "length"),
    "table.csv.gz": (lambda path: path.write_bytes(gzip.compress(table(",").encode("utf-8-sig"))), "length"),
    "windows.csv": (lambda path: path.write_bytes(table(",").replace("\n", "\r\n").encode()), "length"),
    "unnamed.csv": (lambda path: path.write_text("\n".join(map(str, LENGTHS))), None),
    "numbers.txt": (lambda path: path.write_text("\n".join(map(str, LENGTHS)) + "\n\n"), None),
    "numbers.TXT": (lambda path: path.write_text(" \r\n".join(map(str, LENGTHS))), None),
    "numbers.parquet": (parquet(length=pa.array(LENGTHS, pa.int16())), "length"),
    "tokens.parquet": (parquet(input_ids=TOKENS, labels=TOKENS), "input_ids"),
    "saved": (save(Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS})), "input_ids"),
    "chosen": (save(Dataset.from_dict({"length": [9, *LENGTHS]}).select(range(1, 7))), "length"),
}


@pytest.mark.parametrize("name", READABLE)
def test_every_kind_of_file(name: str, tmp_path: Path) -> None:
    write, column = READABLE[name]
    write(tmp_path / name)
    lengths = read_lengths(tmp_path / name)
    assert lengths.tokens.tolist() == LENGTHS
    assert lengths.source == f"{tmp_path / name}" + (f", column {column}" if column else "")
