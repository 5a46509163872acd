"""Placed batches of a stream in one process: every document once, the exact place, and what is refused."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import accelerate
import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node

import distca_hf
from distca_hf.batches.prepare import Prefetcher
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.batches.stream_wires import same_inputs, send_tokens
from distca_hf.comm.transport import LocalTransport
from distca_hf.data.readers import StreamReader
from distca_hf.data.rows import Reading
from distca_hf.data.stream_buffer import keys_of
from distca_hf.data.streams import StreamSource
from distca_hf.errors import ConfigError, PackingError
from distca_hf.layout import Topology
from distca_hf.placement.place import place
from distca_hf.telemetry import LoaderTimes
from support.data import random_dataset
from support.streams import Rows, all_tokens, numbered, numbered_stream, tokens_in


CAPACITY_TOKENS = 64
COLUMNS = ["input_ids", "position_ids", "labels", "shift_labels", "attention_mask"]


def loader_of(stream: Any, seed: int = 3, shuffle: bool = True, micro_steps: int = 1, **settings: Any) -> StreamLoader:
    plugin = distca_hf.DistCAPlugin(**{"tokens_per_rank": CAPACITY_TOKENS, "pad_to_multiple_of": 1} | settings)
    return plugin.dataloader(stream, seed=seed, shuffle=shuffle, device="cpu", micro_steps=micro_steps)


def tokens_of(batches: Any) -> Counter[int]:
    return sum(map(tokens_in, batches), Counter())


def saved(loader: StreamLoader) -> dict[str, Any]:
    """The position, as it comes back from a file."""
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def plain(batch: dict[str, Any]) -> list[list[int]]:
    return [batch[name][0].tolist() for name in COLUMNS]


STREAMS: dict[str, Callable[[], Any]] = {
    "shards": numbered_stream,
    "shuffled shards": lambda: numbered_stream().shuffle(seed=5, buffer_size=1),
    "a shuffle buffer": lambda: numbered_stream().shuffle(seed=5, buffer_size=30),
    "mapped one by one": lambda: numbered_stream().map(lambda row: {"input_ids": list(row["input_ids"])}),
    "mapped in batches": lambda: numbered_stream().map(lambda rows: dict(rows), batched=True, batch_size=7),
    "filtered": lambda: numbered_stream(200).filter(lambda row: row["input_ids"][0] < 170),
    "concatenated": lambda: concatenate_datasets([numbered_stream().take(100), numbered_stream().skip(100)]),
    "interleaved": lambda: interleave_datasets(
        [
            numbered_stream(160, 1).filter(lambda row: row["input_ids"][0] % 2 == 0),
            numbered_stream(160, 1).filter(lambda row: row["input_ids"][0] % 2 == 1),
        ],
        stopping_strategy="all_exhausted",
    ),
    "another class": lambda: Rows([{"input_ids": numbered(number)} for number in range(160)]),
}


def assert_goes_on_after_two_stops(stream: Callable[[], Any], micro_steps: int) -> None:
    whole = [plain(batch) for batch in loader_of(stream(), micro_steps=micro_steps)]

    parts, state = [], None
    for stop in (4, 5, None):  # the first is in the middle of a step of three
        loader = loader_of(stream(), micro_steps=micro_steps)
        if state is not None:
            loader.load_state_dict(state)
        parts += [plain(batch) for batch in islice(loader, stop)]
        state = saved(loader)

    assert parts == whole
    assert Counter(token for batch in whole for token in batch[0] if token) == all_tokens()


@pytest.mark.parametrize(
    ("stream", "micro_steps"),
    [(stream, 1 + 2 * (number % 2)) for number, stream in enumerate(STREAMS.values())],
    ids=STREAMS.keys(),
)
def test_a_stream_stopped_twice_goes_on_with_the_same_batches(stream: Callable[[], Any], micro_steps: int) -> None:
    assert_goes_on_after_two_stops(stream, micro_steps)


def test_batches_are_full_and_the_last_ones_even() -> None:
    documents = random_dataset(200, lengths=(1, 2, 3, 5, 7, 20))
    held = [int(batch["attention_mask"].sum()) for batch in loader_of(documents.to_iterable_dataset(num_shards=3))]

    assert min(held[:-5]) >= CAPACITY_TOKENS - 1
    assert min(held[-4:]) >= CAPACITY_TOKENS / 2


def test_the_position_is_of_the_batch_handed_out_however_far_ahead_the_stream_was_read() -> None:
    ahead, not_ahead = (loader_of(numbered_stream(), prefetch=depth) for depth in (6, 1))
    for loader in (ahead, not_ahead):
        for _ in islice(loader, 5):
            pass

    assert saved(ahead) == saved(not_ahead)


def test_thread_makes_what_it_was_asked_for_and_then_closes_the_stream() -> None:
    """All ranks ask for the same number, so all of them make as many, whenever they stop."""
    made, closed = [], []

    def make() -> Iterator[int]:
        try:
            for number in count():
                made.append(number)
                yield number
        finally:
            closed.append(number)

    items = iter(Prefetcher(make, 3, LoaderTimes(), in_step=True))
    assert [next(items), next(items)] == [0, 1]
    items.close()

    assert made == [0, 1, 2, 3, 4, 5]  # two that were taken, three ahead, and one in hand
    assert closed == [5]


def test_each_pass_has_every_document_once_and_another_order() -> None:
    loader = loader_of(numbered_stream())
    passes = [[plain(batch) for batch in loader] for _ in range(3)]

    assert [Counter(token for batch in of for token in batch[0] if token) for of in passes] == [all_tokens()] * 3
    assert passes[0] != passes[1] != passes[2]
    other = loader_of(numbered_stream())
    assert [[plain(batch) for batch in other] for _ in range(3)] == passes


def test_without_shuffling_documents_keep_their_order() -> None:
    loader = loader_of(random_dataset(80, lengths=(8,)).to_iterable_dataset(num_shards=4), shuffle=False)
    firsts = [batch["input_ids"][0, ::8].tolist() for batch in loader]

    assert list(chain(*firsts)) == [ids[0] for ids in random_dataset(80, lengths=(8,))["input_ids"]]


def test_an_endless_stream_goes_on_and_resumes() -> None:
    rows = [{"input_ids": numbered(number)} for number in range(20)]
    batches = [plain(batch) for batch in islice(loader_of(Rows(rows, endless=True)), 40)]
    first = loader_of(Rows(rows, endless=True))
    half = [plain(batch) for batch in islice(first, 20)]
    second = loader_of(Rows(rows, endless=True))
    second.load_state_dict(saved(first))

    assert half + [plain(batch) for batch in islice(second, 20)] == batches


def test_columns_go_with_their_tokens() -> None:
    """Labels, masks and inputs of the model are those of a map-style dataset with the same documents."""
    documents = random_dataset(60, lengths=(5, 9, 17, 30))
    ids = documents["input_ids"]
    columns = {
        "input_ids": ids,
        "labels": [[token if place % 3 else -100 for place, token in enumerate(row)] for row in ids],
        "completion_mask": [[place % 2 for place, _ in enumerate(row)] for row in ids],
    }
    stored = Dataset.from_dict(columns)

    def documents_of(loader: Any) -> Counter[Any]:
        found = Counter()
        for batch in loader:
            rows = [batch[name][0].tolist() for name in COLUMNS]
            starts = [at for at, position in enumerate(rows[1]) if position == 0 and rows[4][at]]
            ends = [*starts[1:], int(batch["attention_mask"].sum())]
            found.update(
                tuple(tuple(row[start:stop]) for row in rows) for start, stop in zip(starts, ends, strict=True)
            )
        return found

    assert documents_of(loader_of(stored.to_iterable_dataset(num_shards=3))) == documents_of(loader_of(stored))


def test_rows_of_several_documents_and_long_documents_are_divided() -> None:
    packed = Dataset.from_dict({"input_ids": [[7] * 9, [8] * 100], "seq_lengths": [[2, 3, 4], [100]]})
    (first, second) = loader_of(packed.to_iterable_dataset(), overlong="split", shuffle=False)
    positions = [batch["position_ids"][0].tolist() for batch in (first, second)]

    lengths = [[*np.diff([*np.flatnonzero(np.array(of) == 0), len(of)])] for of in positions]
    assert sorted(chain(*lengths)) == [2, 3, 4, 36, 64]


def test_truncated_documents_are_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(Rows([{"input_ids": [7] * 100}, {"input_ids": [8] * 90}]), overlong="truncate")
    held = [int(batch["attention_mask"].sum()) for batch in loader]

    assert held == [64, 64]
    assert loader.documents_truncated == 2
    assert "row 0: a document of 100 tokens is truncated to 64" in caplog.text


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": []}, "row 5: it has no tokens"),
    "nothing": ({"input_ids": None}, "row 5: input_ids is None; leave such rows out"),
    "no column": ({"text": "a"}, r"row 5: the stream gives no 'input_ids', only \['text'\]"),
    "padding": ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "row 5: attention_mask is 0 at token 1"),
    "negative": ({"input_ids": [1, -2]}, "row 5: input_ids is -2 at token 1"),
    "a batch": ({"input_ids": [[1, 2], [3, 4]]}, r"row 5: the stream gives 'input_ids' .* shape \(2, 2\)"),
    "uneven": ({"input_ids": [1, 2], "labels": [1]}, r"row 5: the stream gives 'labels' .* has 2 tokens"),
    "too long": ({"input_ids": [1] * 65}, "row 5: a document has 65 tokens, and ranks x tokens_per_rank is 64"),
    "lengths": ({"input_ids": [1, 2], "seq_lengths": [1, 2]}, r"row 5: seq_lengths are \[1, 2\].* 2 tokens"),
}


@pytest.mark.parametrize(("row", "told"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_row_is_named_or_left_out_if_asked(
    row: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": numbered(number)} for number in range(30)]
    rows.insert(5, row)
    with pytest.raises(PackingError, match=f"reader 0 of 1, {told}"):
        list(loader_of(Rows(rows)))

    assert tokens_of(loader_of(Rows(rows), skip_bad_rows=True)) == all_tokens(30)
    assert "left out: reader 0 of 1, row 5" in caplog.text


def test_a_mistake_in_all_rows_is_not_left_out() -> None:
    with pytest.raises(PackingError, match="row 100: the stream gives no 'input_ids'"):
        list(loader_of(Rows([{"text": "a"}], endless=True), skip_bad_rows=True))


def test_error_of_the_stream_names_reader_and_row() -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        if row["input_ids"][0] == 40:
            raise OSError("shard-3 is gone")
        return row

    with pytest.raises(OSError, match="shard-3 is gone") as error:
        list(loader_of(numbered_stream(shards=1).map(broken)))
    assert error.value.__notes__ == ["distca_hf: reader 0 of 1 got this instead of row 30 of its part of the stream"]


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_transform_that_draws_from_training_is_refused(draw: Callable[[], Any]) -> None:
    def drawing(row: dict[str, Any]) -> dict[str, Any]:
        draw()
        return row

    with pytest.raises(PackingError, match="draws at random"):
        next(iter(loader_of(numbered_stream().map(drawing))))


@pytest.mark.parametrize(
    ("other", "settings", "told"),
    [
        (lambda: numbered_stream(shards=5), {}, "shards=6, this loader has 5"),
        (lambda: numbered_stream(labels=[numbered(number) for number in range(160)]), {}, "columns='input_ids'"),
        (lambda: numbered_stream(), {"seed": 4}, "seed=3, this loader has 4"),
        (lambda: numbered_stream(), {"overlong": "split"}, "cut_tokens=0, this loader has 64"),
        (lambda: numbered_stream(161), {}, r"files='checksum \w{8}', this loader has 'checksum \w{8}'"),
        (lambda: Rows([]), {}, "stream='IterableDataset', this loader has 'Rows'"),
    ],
    ids=["a shard vanished", "columns", "seed", "policy", "files", "class"],
)
def test_stream_that_changed_since_it_was_saved_is_refused(
    other: Callable[[], Any], settings: dict[str, Any], told: str
) -> None:
    loader = loader_of(numbered_stream())
    for _ in islice(loader, 12):
        pass

    def resume() -> None:
        changed = loader_of(other(), **settings)
        changed.load_state_dict(saved(loader))
        list(changed)

    with pytest.raises(ConfigError, match=told):
        resume()


@pytest.mark.parametrize(
    ("documents", "token", "told"), [(160, 5, "the checksum [0-9]+, and now have"), (1, 0, "had read .* ends at")]
)
def test_rows_that_changed_since_the_position_was_saved_are_noticed(documents: int, token: int, told: str) -> None:
    def stream(documents: int, token: int) -> IterableDataset:
        def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
            for number in range(shards[0], documents, 6):
                yield {"input_ids": [*numbered(number), token]}

        return IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(6))})

    loader = loader_of(stream(160, 0))
    for _ in islice(loader, 12):
        pass
    changed = loader_of(stream(documents, token))
    changed.load_state_dict(saved(loader))

    with pytest.raises(ConfigError, match=told):
        list(changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", [-1]),
        ("positions", [[0, 0, {}, 0, 0]]),
        ("refills", 2.0),
        ("into_step", 1),
        ("micro_batches", 3),
    ],
)
def test_changed_field_of_a_position_is_refused_by_name(field: str, value: object) -> None:
    loader = loader_of(numbered_stream())
    next(iter(loader))
    state = saved(loader) | {field: value}
    before = saved(other := loader_of(numbered_stream()))
    with pytest.raises(ConfigError, match=field):
        other.load_state_dict(state)
    assert saved(other) == before


def test_position_within_a_step_is_not_taken_to_other_sizes() -> None:
    loader = loader_of(numbered_stream(), micro_steps=3)
    for _ in islice(loader, 4):
        pass
    with pytest.raises(ConfigError, match="after 1 of 3 micro-batches of an optimizer step"):
        loader_of(numbered_stream(), micro_steps=2).load_state_dict(saved(loader))


def test_what_cannot_be_resumed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackingError, match="already divided between ranks"):
        loader_of(split_dataset_by_node(numbered_stream(), 0, 2))
    with pytest.raises(PackingError, match="generator is a stream whose position cannot be saved"):
        loader_of(row for row in [{"input_ids": [1]}])
    with pytest.raises(PackingError, match="the stream gave no document"):
        list(loader_of(Rows([])))
    with pytest.raises(ConfigError, match="stream_buffer_tokens=100 is less than 128"):
        loader_of(numbered_stream(), stream_buffer_tokens=100)
    with pytest.raises(ConfigError, match="num_workers=2 draw rows of a transform"):
        distca_hf.DistCAPlugin(tokens_per_rank=64).dataloader(numbered_stream(), num_workers=2)
    with pytest.raises(ConfigError, match=r"skip_first_batches.* goes on by its saved position"):
        accelerate.skip_first_batches(loader_of(numbered_stream()), 3)
    monkeypatch.setattr(datasets, "__version__", "5.0.0")
    with pytest.raises(PackingError, match=r"datasets 5\.0\.0 begin anew .* a second time"):
        loader_of(numbered_stream())


def test_positions_of_datasets_and_of_streams_are_not_mixed() -> None:
    stored = random_dataset(60, lengths=(5, 9, 17))
    loaders = loader_of(stored), loader_of(stored.to_iterable_dataset())
    positions = []
    for loader in loaders:
        next(iter(loader))
        positions.append(saved(loader))
    with pytest.raises(ConfigError, match="is of a stream, and this loader reads a map-style dataset"):
        loaders[0].load_state_dict(positions[1])
    with pytest.raises(ConfigError, match="is of a map-style dataset, and this loader reads a stream"):
        loaders[1].load_state_dict(positions[0])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": 5}, "input_ids is 5, and must be a list"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [1.5, 1.5]}, r"seq_lengths are \[1\.5, 1\.5\], and must be a list"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, r"columns of what is learnt are \['labels'\], and \[\] before"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "column 'loss_mask' holds numbers that a loss may need"),
    ],
    ids=str,
)
def test_a_row_unlike_the_others_is_refused_by_its_number(row: dict[str, Any], told: str) -> None:
    with pytest.raises(PackingError, match=f"reader 0 of 1, row 2: .*{told}"):
        list(loader_of(Rows([{"input_ids": [1, 2]}, {"input_ids": [3]}, row])))


def test_a_stream_that_does_not_begin_again_is_told() -> None:
    class Once(Rows):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            self._begin = self.at
            return super().__iter__()

    loader = loader_of(Once([{"input_ids": numbered(number)} for number in range(60)]))
    assert tokens_of(loader) == all_tokens(60)
    with pytest.raises(
        PackingError, match=r"pass 1: the stream gave no document\. Iterating over it again must begin"
    ):
        next(iter(loader))


def test_state_that_json_would_change_is_refused() -> None:
    class Strange(Rows):
        def state_dict(self) -> dict[Any, Any]:
            return {0: self.at}

    with pytest.raises(ConfigError, match="state of Strange cannot be saved as JSON"):
        list(loader_of(Strange([{"input_ids": numbered(number)} for number in range(160)])))


def test_further_numbers_per_token_travel_as_they_are() -> None:
    """Whole numbers and floats; only a model says which of them it takes."""
    features = Features(
        {"input_ids": List(Value("int32")), "kinds": List(Value("int8")), "weights": List(Value("float32"))}
    )
    rows = {"input_ids": [[1, 2, 3]], "kinds": [[0, 1, -1]], "weights": [[0.1, -2.5, 1e-30]]}
    stream = Dataset.from_dict(rows, features=features).to_iterable_dataset()
    reader = StreamReader(StreamSource(stream, Reading(inputs=frozenset({"kinds", "weights"})), 8), 0, 1, 0)
    documents = dict(zip(keys_of(0, 0, 1).tolist(), reader.read(1), strict=True))
    inputs = same_inputs(LocalTransport(), ['{"kinds": "int64", "weights": "float32"}'])
    layout = place([3], 1, topology=Topology(1, 1))
    received = send_tokens(LocalTransport(), layout, keys_of(0, 0, 1), documents, inputs, "here")

    tokens = received.read(0, 0, 3, {})
    assert reader.inputs == inputs
    assert tokens.inputs["kinds"].tolist() == [0, 1, -1]
    assert tokens.inputs["weights"].tolist() == np.array(rows["weights"][0], dtype=np.float32).tolist()


def test_training_that_waits_for_its_stream_is_told_who_reads_longest(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(numbered_stream())
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    assert "slower than training" not in caplog.text
    loader.times.wait_seconds, loader.times.step_seconds = 30.0, 70.0
    next(batches)
    next(batches)

    assert caplog.text.count("the stream is slower than training, which waited for it in 30% of") == 1
    assert "Rank 0 reads longest" in caplog.text


@pytest.mark.parametrize(("workers", "micro_steps"), [(0, 1), (2, 3)])
def test_loader_of_torchdata_goes_on_after_two_stops(workers: int, micro_steps: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(numbered_stream(shards=4), batch_size=None, num_workers=workers)

    assert_goes_on_after_two_stops(loader, micro_steps)


@pytest.mark.parametrize("num_readers", [2, 3])
def test_readers_together_take_and_skip_the_rows_that_one_process_would(num_readers: int) -> None:
    steps: list[Callable[[IterableDataset], IterableDataset]] = [
        lambda stream: stream.take(50),
        lambda stream: stream.skip(50).filter(lambda row: True),
        lambda stream: stream.shuffle(seed=5, buffer_size=20).take(50),
    ]
    for step in steps:
        source = StreamSource(step(numbered_stream(160, shards=6)), Reading(), CAPACITY_TOKENS)
        expected = [row["input_ids"] for row in step(numbered_stream(160, shards=6))]
        read = [
            document.tokens.input_ids.tolist()
            for number in range(num_readers)
            for document in StreamReader(source, number, num_readers, 0).read(10_000)
        ]
        assert sorted(read) == sorted(expected)
