"""Rows that a transform makes on access: seeded, alike on all ranks; and media, told from numbers and texts."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List

from distca_hf.data.collate import checked_contents
from distca_hf.data.documents import DocumentSource
from distca_hf.data.drawn_rows import generators_left_alone, seed_generators
from distca_hf.data.rows import Reading, media_columns
from distca_hf.errors import PackingError


TOKENS = 40
Row = dict[str, Any]


def dataset_of(make: Callable[[int], Row], rows: int = 12, **columns: Any) -> Dataset:
    """A dataset whose transform gives these rows."""
    stored = {"number": list(range(rows)), "length": [TOKENS] * rows, **columns}
    return Dataset.from_dict(stored).with_transform(
        lambda batch: {name: [value] for name, value in make(batch["number"][0]).items()}
    )


def source_of(make: Callable[[int], Row], reading: Reading | None = None, seed: int = 0, **columns: Any) -> Any:
    return DocumentSource(dataset_of(make, **columns), 1000, reading=reading or Reading(), seed=seed)


def tokens_of_row(number: int) -> list[int]:
    return list(range(10 * number + 3, 10 * number + 3 + TOKENS))


# Transforms that draw at random, by the generator that they draw from.
SEEDED: dict[str, Callable[[], int]] = {
    "random": lambda: random.randrange(1, TOKENS),
    "numpy": lambda: int(np.random.randint(1, TOKENS)),
    "torch": lambda: int(torch.randint(1, TOKENS, ())),
}


def cut_and_swapped(draw: Callable[[], int]) -> Callable[[int], Row]:
    """Rows whose parts change places, as those of fill-in-the-middle do."""

    def make(number: int) -> Row:
        tokens, cut = tokens_of_row(number), draw()
        tokens = tokens[cut:] + tokens[:cut]
        return {"input_ids": tokens, "labels": tokens}

    return make


@pytest.mark.parametrize("generator", SEEDED)
def test_row_is_decided_by_seed_epoch_and_number_and_generators_stay(generator: str) -> None:
    make = cut_and_swapped(SEEDED[generator])
    source, again = source_of(make), source_of(make)
    before = SEEDED[generator]()
    seed_generators(7)
    first = SEEDED[generator]()
    seed_generators(7)
    rows = [source.draw([number], epoch) for epoch in (0, 1) for number in (5, 3, 4)]

    assert SEEDED[generator]() == first, "what the training draws depends on no row"
    again.draw([1, 2], epoch=1)
    reversed_rows = [again.draw([number], epoch) for epoch in (1, 0) for number in (4, 3, 5)][::-1]
    for left, right in zip(rows, reversed_rows, strict=True):
        ((number, values),) = left.items()
        assert values["input_ids"].tolist() == right[number]["input_ids"].tolist()
    assert len({values["input_ids"].tobytes() for row in rows for values in row.values()}) > 4, before
    other_seed = source_of(make, seed=1)
    assert any((other_seed.draw([n])[n]["input_ids"] != source.draw([n])[n]["input_ids"]).any() for n in range(6))


def test_columns_of_a_row_and_its_segments_come_from_one_run() -> None:
    source = source_of(cut_and_swapped(SEEDED["random"]))
    draws = source.draw([0, 1])
    whole = source.read(1, 0, TOKENS, draws)
    parts = [source.read(1, 0, 15, draws), source.read(1, 15, TOKENS, draws)]

    assert whole.labels[1:].tolist() == whole.input_ids[1:].tolist() == whole.shift_labels[:-1].tolist()
    for name in ("input_ids", "labels", "shift_labels"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(whole, name).tolist()


OWN = np.random.default_rng(0)
CALLS, DRAWN = count(), [0]


def drawn_anew() -> int:
    """Draws from fresh entropy, and never the same number twice in a row."""
    while (number := int(np.random.default_rng().integers(1, TOKENS))) == DRAWN[0]:
        pass
    DRAWN[0] = number
    return number


REFUSED_DRAWS: dict[str, Callable[[], int]] = {
    "a generator of its own": lambda: int(OWN.integers(1, TOKENS)),
    "fresh entropy": drawn_anew,
    "the number of calls": lambda: 1 + next(CALLS) % (TOKENS - 1),
}


@pytest.mark.parametrize("kind", REFUSED_DRAWS)
@pytest.mark.parametrize("row", [None, 7], ids=["every row", "one row"])
def test_rows_that_cannot_be_drawn_again_are_refused_by_name(kind: str, row: int | None) -> None:
    make = cut_and_swapped(REFUSED_DRAWS[kind])

    def in_one_row(number: int) -> Row:
        return make(number) if row in (None, number) else {"input_ids": tokens_of_row(number)}

    with pytest.raises(PackingError, match=r"row \d+: .* gives other 'input_ids' .* dataset\.map") as told:
        checked_contents(source_of(in_one_row))
    assert row is None or str(told.value).startswith(f"row {row}:")


def test_row_that_depends_on_the_row_before_is_refused() -> None:
    earlier = [0]

    def mixed_with_the_row_before(number: int) -> Row:
        tokens = [*tokens_of_row(number)[:-1], earlier[0]]
        earlier[0] = number
        return {"input_ids": tokens}

    with pytest.raises(PackingError, match="gives other 'input_ids'"):
        checked_contents(source_of(mixed_with_the_row_before))


def test_every_row_decides_what_it_holds() -> None:
    masked = [-100] * 30 + tokens_of_row(0)[30:]

    def make(number: int) -> Row:
        row = {"input_ids": tokens_of_row(0)}
        labels, mask = {"labels": masked}, {"completion_mask": [0] * 35 + [1] * 5}
        return [row, row | labels, row | mask, row | labels | mask, row | {"labels": None}][number]

    for masks, learnt in (
        ("always", [39, 10, 5, 5, 39]),
        ("without labels", [39, 10, 5, 10, 39]),
        ("never", [39, 10, 39, 10, 39]),
    ):
        source = source_of(make, Reading(masks=masks), rows=5)  # type: ignore[arg-type]
        read = [source.read(row, 0, TOKENS, source.draw([row])) for row in range(5)]
        assert [int((tokens.labels != -100).sum()) for tokens in read] == learnt


IDS = {"input_ids": tokens_of_row(0)}
POSITIONS = list(range(TOKENS))
BAD_ROWS: dict[str, tuple[Row, str]] = {
    "positions of several documents": (
        {"position_ids": [*range(10), *range(30)]},
        "position_ids is 0 at token 10, which has position 10 in its document.*'seq_lengths'",
    ),
    "positions from 5 on": ({"position_ids": [5 + at for at in POSITIONS]}, "position_ids is 5 at token 0"),
    "several documents": ({"seq_lengths": [10, 30]}, r"gives seq_lengths \[10, 30\], and documents of \[40\] tokens"),
    "numbers of documents": (
        {"attention_mask": [1] * 20 + [2] * 20},
        "attention_mask is 2 at token 20.*'seq_lengths'",
    ),
    "a weight": ({"weight": 0.5}, r"column 'weight' holds numbers .*: leave it out of the transform"),
    "a weight of zero dimensions": ({"weight": torch.tensor(2)}, "column 'weight' holds numbers"),
    "weights per token": ({"loss_weights": [0.5] * TOKENS}, "column 'loss_weights' holds numbers"),
    "shifted labels": ({"shift_labels": tokens_of_row(0)}, "column 'shift_labels' holds numbers.*batches fill it in"),
    "an image": ({"pixel_values": np.zeros((2, 2))}, r"images, videos or sound \(pixel_values\)"),
    "a label per row": ({"labels": 3}, "column 'labels' holds one label per row"),
    "a mask of four dimensions": ({"attention_mask": np.ones((1, 4, 4))}, "gives 'attention_mask' of float64"),
    "an id beyond the vocabulary": ({"input_ids": [3] * 39 + [1 << 40]}, "input_ids is 1099511627776 at token 39"),
    "a negative id": ({"input_ids": [3, -1] + [3] * 38}, "input_ids is -1 at token 1"),
    "other columns": ({"token_type_ids": None}, "gives nothing in addition to tokens, and 'token_type_ids' .*row 0"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("at", [0, 9])
def test_row_that_cannot_be_trained_on_is_refused_by_number_wherever_it_is(kind: str, at: int) -> None:
    change, told = BAD_ROWS[kind]
    reading = Reading(inputs=frozenset({"input_ids", "token_type_ids", "shift_labels"}), vocabulary_tokens=1000)

    def make(number: int) -> Row:
        usual = IDS | ({"token_type_ids": [0] * TOKENS} if kind == "other columns" else {})
        return usual | change if number == at else usual

    if (kind, at) == ("other columns", 0):
        told = "gives 'token_type_ids' .* and nothing for row 0"
    with pytest.raises(PackingError, match=rf"row \d+: .*{told}"):
        checked_contents(source_of(make, reading))


def test_error_of_a_transform_tells_the_row() -> None:
    def make(number: int) -> Row:
        return IDS if number < 3 else {"input_ids": IDS["no such column"]}

    with pytest.raises(KeyError) as told:
        checked_contents(source_of(make))
    assert told.value.__notes__ == ["distca_hf: the dataset's transform raised this at row 3"]


def test_several_rows_for_one_are_refused() -> None:
    dataset = Dataset.from_dict({"length": [2, 2]}).with_transform(lambda rows: {"input_ids": [[3, 4], [5, 6]]})
    with pytest.raises(PackingError, match=r"row 0: the dataset's transform makes 2 rows of it"):
        DocumentSource(dataset, 1000)


def test_what_is_no_number_is_left_alone_and_positions_of_documents_are_right() -> None:
    def make(number: int) -> Row:
        text = {"text": "a", "messages": [{"role": "user"}], "words": ["a", "b"], "nothing": None, "empty": []}
        return IDS | text | {"position_ids": [*range(10), *range(30)], "seq_lengths": [10, 30]}

    source = source_of(make, seq_lengths=[[10, 30]] * 12)

    assert source.document_tokens.tolist() == [10, 30] * 12
    assert source.read(1, 0, 30, source.draw([1])).input_ids.tolist() == tokens_of_row(0)[10:]


def test_generators_are_restored_after_an_error() -> None:
    def fail() -> None:
        with generators_left_alone():
            seed_generators(1, 2, 3)
            raise ZeroDivisionError

    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    with pytest.raises(ZeroDivisionError):
        fail()

    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


ROWS = 2


@pytest.mark.parametrize(
    "name", ["pixel_values", "pixel_values_videos", "image_grid_thw", "input_features", "audio", "images"]
)
def test_lists_by_these_names_are_media(name: str) -> None:
    dataset = Dataset.from_dict({"input_ids": [[1, 2]] * ROWS, name: [[[1.0]]] * ROWS})

    assert media_columns(dataset) == [name]
    made = dataset.with_transform(lambda rows: {"input_ids": rows["input_ids"], name: rows[name]})
    assert media_columns(made) == [name]


def test_images_are_media_by_any_name() -> None:
    picture = np.zeros((2, 2, 3), dtype=np.uint8)
    kinds = {"one": Image(), "several": List(Image())}
    dataset = Dataset.from_dict({"one": [picture] * ROWS, "several": [[picture]] * ROWS}, features=Features(kinds))

    assert media_columns(dataset) == ["one", "several"]


@pytest.mark.parametrize(
    "column", [{"image_path": "a.png"}, {"video_id": 7}, {"imagery": [1]}, {"labels": [1]}, {"audio_seconds": 0.5}]
)
def test_words_and_numbers_about_media_are_none(column: dict[str, Any]) -> None:
    dataset = Dataset.from_dict({name: [value] * ROWS for name, value in column.items()})

    assert media_columns(dataset) == []
    assert media_columns(dataset.with_transform(lambda rows: rows)) == []
