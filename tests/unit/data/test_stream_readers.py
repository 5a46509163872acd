"""How a stream is divided: readers share no position, and files are known by name, size and revision."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset

from distca_hf.data import streams
from distca_hf.data.readers import ReaderPosition, StreamReader
from distca_hf.data.rows import Reading
from distca_hf.data.streams import StreamSource, _text_of


def _rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(20):
            yield {"input_ids": [10 + 20 * shard + number]}


def _made(first: int = 0, shards: int = 3) -> IterableDataset:
    return IterableDataset.from_generator(_rows, gen_kwargs={"shards": list(range(first, first + shards))})


def _stored(shards: int = 3) -> IterableDataset:
    return Dataset.from_list([*_rows([0, 1, 2])]).to_iterable_dataset(num_shards=shards)


def _later(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [row["input_ids"][0] + 500]}


STREAMS: dict[str, Callable[[], IterableDataset]] = {
    "made": _made,
    "stored": _stored,
    "mapped": lambda: _made().map(_later),
    "mapped and filtered": lambda: _stored().map(_later).filter(lambda row: row["input_ids"][0] % 7 > 0),
    "interleaved": lambda: interleave_datasets([_made(), _made(3)]),
    "interleaved at random": lambda: interleave_datasets([_made(), _made(3)], probabilities=[0.7, 0.3], seed=3),
    "joined": lambda: concatenate_datasets([_made(), _made(3)]),
}
# Readers that each get shards, and those that each get every n-th row of the same shards.
READERS = (3, 5)


def _read_on(readers: list[StreamReader], times: int) -> list[list[int]]:
    """Rows of each reader; they read by turns."""
    rows: list[list[int]] = [[] for _ in readers]
    for _ in range(times):
        for reader, of_reader in zip(readers, rows, strict=True):
            of_reader += [int(document.tokens.input_ids[0]) for document in reader.read(1)]
    return rows


@pytest.mark.parametrize("num_readers", READERS)
@pytest.mark.parametrize("kind", STREAMS)
def test_readers_of_one_process_do_not_disturb_each_other(kind: str, num_readers: int) -> None:
    """Those that go on from a snapshot, too, while the readers before them still read and prefetch."""

    def source() -> StreamSource:
        return StreamSource(STREAMS[kind](), Reading(), 1000)

    expected = [_read_on([StreamReader(source(), number, num_readers, 0)], 8)[0] for number in range(num_readers)]
    shared = source()
    earlier = [StreamReader(shared, number, num_readers, 0) for number in range(num_readers)]
    rows = _read_on(earlier, 4)
    later = [
        StreamReader(shared, number, num_readers, 0, ReaderPosition(reader.snapshot, reader.documents))
        for number, reader in enumerate(earlier)
    ]
    of_later, of_earlier = [[] for _ in later], [[] for _ in later]
    for _ in range(4):
        for before, after, more in zip(of_earlier, of_later, range(num_readers), strict=True):
            after += _read_on(later[more : more + 1], 1)[0]
            before += _read_on(earlier[more : more + 1], 1)[0]

    assert of_later == of_earlier
    assert [first + then for first, then in zip(rows, of_later, strict=True)] == expected


def test_files_are_known_by_size_or_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for file in files:
        file.write_text(json.dumps({"input_ids": [1, 2]}) + "\n")

    def of_files() -> dict[str, object]:
        stream = load_dataset("json", data_files=[*map(str, files)], split="train", streaming=True)
        return StreamSource(stream, Reading(), 64).identity(1)

    before = of_files()
    assert of_files() == before
    files[3].write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    assert {name for name, value in of_files().items() if value != before[name]} == {"files"}

    monkeypatch.setattr(streams, "MOST_FILES", 2)
    assert _text_of([*map(str, files)]) == "0.jsonl of 22 bytes, 1.jsonl, 2.jsonl, 3.jsonl of 25 bytes"
    assert _text_of(f"gzip://text::{files[0]}") == "0.jsonl of 22 bytes"
    assert _text_of("https://host/a/b.parquet?token=5") == "b.parquet"
    assert _text_of(str(tmp_path)) == tmp_path.name, "folders have other sizes elsewhere"
    tables = [Dataset.from_dict({"input_ids": [[number]] * 3}) for number in range(40)]
    texts = _text_of(tables).split(", ")
    assert sum("some of which have" in text for text in texts) == streams.MOST_TABLES
    revisions = [_text_of(f"hf://datasets/owner/name@{revision}/train.parquet") for revision in ("1f", "2e")]
    assert len(set(revisions)) == 2


def test_a_generator_may_be_given_texts_too_long_for_paths() -> None:
    text = "this and/or that " * 300

    def rows(texts: list[str]) -> Iterator[dict[str, Any]]:
        yield from ({"input_ids": [*map(ord, text)]} for text in texts)

    stream = IterableDataset.from_generator(rows, gen_kwargs={"texts": [text, "that"]})
    source = StreamSource(stream, Reading(), 10_000)
    assert source.identity(2)["files"] == StreamSource(stream, Reading(), 10_000).identity(2)["files"]
    [document] = StreamReader(source, 0, 2, 0).read(1)
    assert len(document) == len(text)
