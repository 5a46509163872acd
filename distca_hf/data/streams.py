"""Streams: divides a stream among *readers*, each of which reads its own part.

    stream ──┬── reader 0   d0 d1 d2 d3 ...      a part of the stream each: its shards, or every n-th row
             ├── reader 1   d0 d1 d2 ...
             └── reader 2   d0 d1 d2 d3 d4 ...   a rank has one reader or several, or none

The number of readers stays the same when training resumes on another number of ranks. So each document keeps its
reader and number.
"""

import inspect
import zlib
from collections.abc import Container, Iterator, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from distca_hf.config import OverlongPolicy
from distca_hf.data.rows import Reading, is_media
from distca_hf.errors import PackingError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Versions of datasets whose streams begin anew when they are resumed a second time (datasets#8308).
LOSE_POSITION = ("5.0.0",)
# Most characters of a fact that ranks compare; longer ones end in a checksum.
MOST_FACT_CHARACTERS = 160
# Most files of a list whose sizes are asked for, and most tables of which rows are read, spread over it.
MOST_FILES, MOST_TABLES = 256, 16
# Parts of `datasets` that forget the rows that they hold when their state is loaded.
SHUFFLE_BUFFERS = ("BufferShuffledExamplesIterable",)
# Parts that count the rows of the whole stream.
COUNTING_STEPS = ("TakeExamplesIterable", "SkipExamplesIterable")


class Stream(Protocol):
    """Rows in an order, and the position in it. Rows are mappings with `input_ids`."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the latest row."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Makes the next iteration begin there."""
        ...


def is_stream(dataset: object) -> bool:
    """Returns whether a dataset is a stream: an iterable whose rows cannot be read by number."""
    kind = type(dataset)
    if any(base.__name__ == "IterableDataset" for base in kind.__mro__):
        return True
    return hasattr(kind, "__iter__") and (_has_state(dataset) or not hasattr(kind, "__getitem__"))


def _has_state(dataset: object) -> TypeGuard[Stream]:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def check_saves_position(stream: object) -> None:
    """Checks that the position of a stream can be saved. Raises PackingError if it cannot; says what to do."""
    if not _has_state(stream):
        raise PackingError(
            f"{type(stream).__name__} is a stream whose position cannot be saved: it has no state_dict and "
            "load_state_dict, so a resumed training would not know its documents. Give a datasets.IterableDataset, or "
            "torchdata's StatefulDataLoader; or leave tokens_per_rank out, and train on your own batches"
        )


class StreamSource:
    """Divides a stream into parts, and says how to read its rows.

    A `datasets.IterableDataset` is divided here. Any other stream is this rank's part already, with one reader per
    rank.

    Raises:
        PackingError: its position cannot be saved, or it was already divided; says what to do.
    """

    def __init__(
        self,
        stream: object,
        reading: Reading,
        longest_tokens: int,
        overlong: OverlongPolicy = "error",
        stay_whole: bool = False,
        shuffle: bool = True,  # whether each pass asks the stream for another order (`set_epoch`)
        skips_bad_rows: bool = False,  # whether rows that cannot be trained on are left out, with a warning each
    ) -> None:
        import datasets

        check_saves_position(stream)
        # Whether every rank was given the whole stream.
        self.is_divided_here = isinstance(stream, datasets.IterableDataset)
        self.reading, self.longest_tokens, self.overlong = reading, longest_tokens, overlong
        self.skips_bad_rows, self.stay_whole = skips_bad_rows, stay_whole
        self._stream, self._shuffle = stream, shuffle
        self.has_given_rows = False  # whether any pass of this process has read a row
        self._reads_tables, self._files = False, ""
        if isinstance(stream, datasets.IterableDataset):
            if datasets.__version__ in LOSE_POSITION:
                raise PackingError(
                    f"streams of datasets {datasets.__version__} begin anew when they are resumed a second time "
                    "(datasets#8308); pip install --upgrade datasets"
                )
            if stream._distributed is not None:
                raise PackingError(
                    "the stream is already divided between ranks (split_dataset_by_node); give the whole stream to "
                    "all ranks, and distca_hf divides it"
                )
            # Python decodes images and sound, for which columns are known.
            decoded = any(is_media("", feature) for feature in (stream.features or {}).values())
            self._reads_tables = stream._ex_iterable.iter_arrow is not None and not decoded
            self._files = _checksum([*_sources_of(stream._ex_iterable)])
        # Whether the stream loses no rows when its state is loaded.
        self.saves_position = not _has_step(getattr(stream, "_ex_iterable", None), SHUFFLE_BUFFERS)
        if not self.saves_position:
            log.info("the stream has a shuffle buffer: a resumed training reads it from the beginning of its pass")

    def identity(self, num_readers: int) -> dict[str, object]:
        """Returns facts of the stream that a saved position depends on."""
        stream: Any = self._stream
        return {
            "stream": type(stream).__name__,
            "readers": num_readers,
            "shards": int(stream.num_shards) if self.is_divided_here else 0,
            "columns": ", ".join(sorted(stream.column_names or ())) if self.is_divided_here else "",
            "files": self._files,
            "cut_tokens": 0 if self.overlong == "error" else self.longest_tokens,
            "skips_bad_rows": self.skips_bad_rows,
        }

    def facts(self) -> dict[str, str]:
        """Returns what is known of the rows without reading them, by name; must be the same on all ranks that are
        given the whole stream."""
        if not self.is_divided_here:
            return {}
        stream: Any = self._stream
        steps = {f"step {number} of the stream": text for number, text in enumerate(_steps_of(stream._ex_iterable))}
        return steps if self._shuffle else {"epoch of the stream": str(stream.epoch), **steps}

    def log_division(self, num_readers: int) -> None:
        """Warns if each reader reads the whole stream: it has too few shards, or steps that count rows."""
        stream: Any = self._stream
        if not self.is_divided_here or num_readers == 1 or self._strategy(num_readers) == "shards":
            return
        if self._counts_rows:
            log.warning(
                "the stream counts rows (take, skip): each of %d readers reads all of them and keeps every %d-th row",
                *(num_readers, num_readers),
            )
            return
        log.warning(
            "the stream has %d shards for %d readers: each reads all of them and keeps every %d-th row. Give it "
            "%d shards or more, a multiple if datasets is older than 5.2 (stream.reshard(), num_shards=...)",
            *(stream.num_shards, num_readers, num_readers, num_readers),
        )

    @cached_property
    def _counts_rows(self) -> bool:
        """Returns whether the stream has `take` or `skip`. With shards for each reader, `datasets` would take or skip
        a part of the number in every reader: other rows than in one process, also rows that evaluation has taken."""
        return _has_step(getattr(self._stream, "_ex_iterable", None), COUNTING_STEPS)

    def _strategy(self, num_readers: int) -> str:
        """Returns how the stream is divided: "shards" gives each reader its own, "auto" gives it every n-th row of all
        shards."""
        from datasets.distributed import split_dataset_by_node

        if self._counts_rows:
            return "auto"
        shards = int(self._stream.num_shards)  # type: ignore[attr-defined]
        can_be_uneven = "strategy" in inspect.signature(split_dataset_by_node).parameters
        return "shards" if shards % num_readers == 0 or (can_be_uneven and shards > num_readers) else "auto"

    def part(self, reader: int, num_readers: int, pass_number: int) -> Stream:
        """Returns the part of a reader, at the beginning of a pass."""
        part: Any = self._stream
        if self.is_divided_here:
            from datasets.distributed import split_dataset_by_node
            from datasets.iterable_dataset import StepExamplesIterable

            uneven = self._strategy(num_readers) == "shards" and part.num_shards % num_readers
            how = {"strategy": "shards"} if uneven else {}
            part = split_dataset_by_node(part, rank=reader, world_size=num_readers, **how)
            part._ex_iterable = _separate(part._ex_iterable)
            if self._counts_rows:  # `datasets` would divide shards if there are a multiple of readers
                every = {"step": num_readers, "offset": reader}
                part._ex_iterable, part._distributed = StepExamplesIterable(part._ex_iterable, **every), None
        if self._reads_tables:
            part = part.with_format("arrow")
        if self._shuffle and hasattr(part, "set_epoch"):
            part.set_epoch(pass_number)
        return part


def _steps_of(part: Any) -> Iterator[str]:
    """Yields a text for each step that makes the rows of a stream of `datasets`, the first one last."""
    values = {name: value for name, value in vars(part).items() if not name.startswith(("_", "token"))}
    values |= values.pop("kwargs", {})
    texts = [f"{name}={text}" for name, value in values.items() if (text := _text_of(value))]
    text = f"{type(part).__name__}({', '.join(texts)})"
    cut = f"{text[:MOST_FACT_CHARACTERS]}... ({_checksum(text)})"
    yield text if len(text) <= MOST_FACT_CHARACTERS else cut
    for inner in _inner(part):
        yield from _steps_of(inner)


def _sources_of(part: Any) -> Iterator[str]:
    """Yields texts of the files and tables from which a stream of `datasets` reads."""
    yield _text_of([*getattr(part, "kwargs", {}).values()])
    for inner in _inner(part):
        yield from _sources_of(inner)


def _text_of(value: Any, looks: bool = True) -> str:
    """Returns a text that is the same on every rank for the same value; empty if that cannot be known.

    Args:
        looks: whether to look at a file or table.
    """
    import datasets

    if isinstance(value, str):
        return _text_of_file(value, looks)
    if isinstance(value, bool | int | float):
        return "" if value is False else str(value)
    if isinstance(value, np.random.Generator):
        return _checksum(value.bit_generator.state)
    if isinstance(value, Mapping):  # may hold passwords
        return _checksum({name: _text_of(one) for name, one in value.items()}) if value else ""
    if isinstance(value, list | tuple):
        most = MOST_TABLES if isinstance(next(iter(value), None), datasets.Dataset) else MOST_FILES
        looked_at = {*np.linspace(0, len(value) - 1, min(len(value), most), dtype=int).tolist()}
        texts = (_text_of(one, number in looked_at) for number, one in enumerate(value))
        return ", ".join(filter(None, texts))
    if isinstance(value, datasets.Dataset):
        if not looks or not len(value):
            return f"{len(value)} rows"
        numbers = {0, len(value) // 2, len(value) - 1}
        if value._indices is not None:
            numbers = {value._indices.column(0)[number].as_py() for number in numbers}
        rows = [value.data.slice(number, 1).to_pylist() for number in sorted(numbers)]
        return f"{len(value)} rows, some of which have {_checksum(rows)}"
    return str(getattr(value, "__qualname__", ""))


def _text_of_file(path: str, looks: bool) -> str:
    """Returns the name of a file, with the size of a local one, and the revision of one of the hub. Folders, times and
    signatures of addresses differ between copies."""
    if path.startswith("hf://"):
        return path.partition("?")[0]
    name = path.partition("?")[0].rpartition("/")[2]
    local = Path(path.rpartition("::")[2].removeprefix("file://"))
    try:
        is_local = looks and "/" in path and local.is_file()
        return f"{name} of {local.stat().st_size} bytes" if is_local else name
    except OSError:  # a long text, say, is no path; or its folder may not be looked at
        return name


def _checksum(value: object) -> str:
    return f"checksum {zlib.crc32(str(value).encode()):08x}"


def _separate(step: Any) -> Any:
    """Returns copies of the steps that make the rows of a stream of `datasets`. The steps
    hold positions, which readers of one process, and of an earlier iteration, would share: `datasets` copies only the
    last step."""
    step = copy(step)
    for name, value in vars(step).items():
        if name == "ex_iterable":
            step.ex_iterable = _separate(value)
        elif name == "ex_iterables":
            step.ex_iterables = [_separate(one) for one in value]
    return step


def _inner(part: Any) -> list[Any]:
    """Returns the steps that a step of a stream of `datasets` reads from."""
    steps = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return [one for one in steps if one is not None]


def _has_step(part: object, names: Container[str]) -> bool:
    """Returns whether a stream of `datasets` has a step of one of these classes."""
    return type(part).__name__ in names or any(_has_step(inner, names) for inner in _inner(part))
