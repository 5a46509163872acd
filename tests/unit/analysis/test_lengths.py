"""distca plan, lengths: the same documents from every kind of file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from distca_hf.analysis.lengths import read_lengths
from distca_hf.errors import PackingError


LENGTHS = [3, 1, 4, 1, 5, 9]
TOKENS = [[7] * length for length in LENGTHS]


def lines(column: str, values: list[object]) -> str:
    return "\n".join(json.dumps({"id": at, column: value}) for at, value in enumerate(values)) + "\n"


def parquet(**columns: object) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


def table(between: str) -> str:
    return "\n".join([f"id{between}length", *(f"{at}{between}{length}" for at, length in enumerate(LENGTHS))])


def arrow(path: Path) -> None:
    """Writes a file as `datasets` does in its cache."""
    written = pa.table({"length": LENGTHS})
    with pa.ipc.new_stream(str(path), written.schema) as file:
        file.write_table(written)


def save(dataset: Dataset) -> Callable[[Path], object]:
    return dataset.save_to_disk


def both(lengths: list[int]) -> str:
    rows = zip(lengths, TOKENS, strict=True)
    return "".join(json.dumps({"input_ids": tokens, "length": length}) + "\n" for length, tokens in rows)


READABLE: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "list.json": (lambda path: path.write_text(json.dumps(LENGTHS)), None),
    "list.json.gz": (lambda path: path.write_bytes(gzip.compress(json.dumps(LENGTHS).encode())), None),
    "rows.jsonl": (lambda path: path.write_text(lines("num_tokens", LENGTHS)), "num_tokens"),
    "rows.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(lines("lengths", LENGTHS).encode())), "lengths"),
    "tokens.jsonl": (lambda path: path.write_text(lines("input_ids", TOKENS)), "input_ids"),
    "table.csv": (lambda path: path.write_text(table(", ")), "length"),
    "table.csv.gz": (lambda path: path.write_bytes(gzip.compress(table(",").encode("utf-8-sig"))), "length"),
    "table.tsv": (lambda path: path.write_text(table("\t")), "length"),
    "windows.csv": (lambda path: path.write_bytes(table(",").replace("\n", "\r\n").encode()), "length"),
    "unnamed.csv": (lambda path: path.write_text("\n".join(map(str, LENGTHS))), None),
    "numbers.txt": (lambda path: path.write_text("\n".join(map(str, LENGTHS)) + "\n\n"), None),
    "numbers.TXT": (lambda path: path.write_text(" \r\n".join(map(str, LENGTHS))), None),
    "numbers.parquet": (parquet(length=pa.array(LENGTHS, pa.int16())), "length"),
    "tokens.parquet": (parquet(input_ids=TOKENS, labels=TOKENS), "input_ids"),
    "counted.parquet": (parquet(token_count=LENGTHS, text=["a"] * 6), "token_count"),
    "both.parquet": (parquet(input_ids=TOKENS, length=LENGTHS), "length"),
    "both.jsonl": (lambda path: path.write_text(both(LENGTHS)), "length"),
    "array.npy": (lambda path: np.save(path, np.array(LENGTHS, dtype=np.uint16)), None),
    "savetxt.txt": (lambda path: np.savetxt(path, LENGTHS, header="tokens"), None),
    "savetxt.csv": (lambda path: np.savetxt(path, LENGTHS), None),
    "saved": (save(Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS})), "input_ids"),
    "cache.arrow": (arrow, "length"),
    "written.json": (lambda path: Dataset.from_dict({"length": LENGTHS}).to_json(path), "length"),
    "chosen": (save(Dataset.from_dict({"length": [9, *LENGTHS]}).select(range(1, 7))), "length"),
}


@pytest.mark.parametrize("name", READABLE)
def test_every_kind_of_file(name: str, tmp_path: Path) -> None:
    write, column = READABLE[name]
    write(tmp_path / name)
    lengths = read_lengths(tmp_path / name)
    assert lengths.tokens.tolist() == LENGTHS
    assert lengths.source == f"{tmp_path / name}" + (f", column {column}" if column else "")


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "npy", "csv.gz"])
def test_files_of_a_folder_are_read_in_order(ending: str, tmp_path: Path) -> None:
    """Whatever else lies beside them."""
    for shard in range(3):
        path, part = tmp_path / "data" / f"train-{shard:05}-of-00003.{ending}", LENGTHS[2 * shard : 2 * shard + 2]
        path.parent.mkdir(exist_ok=True)
        write: dict[str, Callable[[], object]] = {
            "parquet": lambda path=path, part=part: pq.write_table(pa.table({"length": part}), path),
            "jsonl": lambda path=path, part=part: path.write_text(lines("length", part)),
            "npy": lambda path=path, part=part: np.save(path, part),
            "csv.gz": lambda path=path, part=part: path.write_bytes(gzip.compress("\n".join(map(str, part)).encode())),
        }
        write[ending]()
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "dataset_infos.json").write_text("{}")
    lengths = read_lengths(tmp_path)
    assert lengths.tokens.tolist() == LENGTHS
    assert lengths.source.startswith(f"{tmp_path}, 3 files")

    np.save(tmp_path / "data" / "test.npy", [1, 2])
    with pytest.raises(PackingError, match=r"several datasets or kinds: data/test\.npy, data/train-\*-of-"):
        read_lengths(tmp_path)
    assert read_lengths(tmp_path / "data" / f"train-*.{ending}").tokens.tolist() == LENGTHS


@pytest.mark.parametrize("name", ["both.parquet", "both.jsonl"])
def test_columns_of_lengths_that_disagree_are_refused_by_row(name: str, tmp_path: Path) -> None:
    wrong = [*LENGTHS[:2], 7, 8, *LENGTHS[4:]]
    if name.endswith("jsonl"):
        (tmp_path / name).write_text(both(wrong))
    else:
        parquet(input_ids=TOKENS, length=wrong)(tmp_path / name)
    with pytest.raises(PackingError, match=r"in row 2 length is 7 and input_ids 4 \(and 1 more like it\); keep one"):
        read_lengths(tmp_path / name)
