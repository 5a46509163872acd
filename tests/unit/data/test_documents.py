"""Documents of a dataset: every column and storage it may have, lengths without tokens, tokens by slice."""

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, LargeList, List, Value

from distca_hf.data import rows as rows_module
from distca_hf.data.documents import DocumentSource, Tokens, check_map_style
from distca_hf.data.rows import ArrowColumn, Reading
from distca_hf.errors import PackingError


CAPACITY = 100
DOCUMENTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42]]


def dataset_of(**columns: Any) -> Dataset:
    return Dataset.from_dict({"input_ids": DOCUMENTS, **columns})


def read(source: DocumentSource, document: int, start: int = 0, stop: int | None = None) -> Tokens:
    """Tokens of a document, to its end by default."""
    tokens = int(source.document_tokens[document])
    return source.read(document, start, tokens if stop is None else stop, source.draw([document]))


def tokens_of(source: DocumentSource) -> list[list[int]]:
    """All documents, each read at once."""
    return [
        read(source, document, 0, int(tokens)).input_ids.tolist()
        for document, tokens in enumerate(source.document_tokens)
    ]


def labels_of(source: DocumentSource, document: int) -> tuple[list[int], list[int]]:
    """Labels and shifted labels of a whole document."""
    tokens = read(source, document)
    return tokens.labels.tolist(), tokens.shift_labels.tolist()


def refusal(dataset: Any, capacity: int = CAPACITY, **settings: Any) -> str:
    with pytest.raises(PackingError) as refused:
        DocumentSource(dataset, capacity, **settings)
    return str(refused.value)


# --- plain datasets, however they are stored


def chunked(dataset: Dataset) -> Dataset:
    """The same rows in chunks of two, the last of them sliced out of a longer table."""
    more = datasets.concatenate_datasets([dataset.select([0, 1]).flatten_indices(), dataset])
    return Dataset(more.data.slice(2))


STORAGES: dict[str, Callable[[Dataset], Dataset]] = {
    "as it is": lambda dataset: dataset,
    "reversed": lambda dataset: dataset.select([3, 2, 1, 0]).select([3, 2, 1, 0]),
    "shuffled and sorted again": lambda dataset: (
        dataset.add_column("n", [0, 1, 2, 3]).shuffle(seed=1).sort("n").remove_columns("n")
    ),
    "concatenated": lambda dataset: datasets.concatenate_datasets([dataset.select([0, 1]), dataset.select([2, 3])]),
    "concatenated from slices": lambda dataset: datasets.concatenate_datasets(
        [dataset.select(range(0, 1)), dataset.select(range(1, 3)), dataset.select([3])]
    ),
    "concatenated columns": lambda dataset: datasets.concatenate_datasets(
        [dataset, Dataset.from_dict({"other": ["1", "2", "3", "4"]})], axis=1
    ),
    "sliced out": lambda dataset: datasets.concatenate_datasets([dataset, dataset]).select(range(4, 8)),
    "in sliced chunks": chunked,
    "with empty chunks": lambda dataset: Dataset(
        datasets.table.InMemoryTable(
            pa.concat_tables([dataset.data.table.slice(0, 0), dataset.data.table, dataset.data.table.slice(4)])
        )
    ),
    "mapped": lambda dataset: dataset.map(lambda row: {"length": len(row["input_ids"])}),
    "filtered": lambda dataset: datasets.concatenate_datasets(
        [Dataset.from_dict({"input_ids": [[]]}), dataset]
    ).filter(lambda row: len(row["input_ids"]) > 0),
    "as torch": lambda dataset: dataset.with_format("torch"),
    "as numpy, not the text": lambda dataset: dataset.add_column("text", ["a"] * 4).with_format(
        "numpy", ["input_ids", "labels"]
    ),
}


@pytest.mark.parametrize("store", STORAGES.values(), ids=STORAGES)
def test_documents_are_the_same_however_the_dataset_is_stored(store: Callable[[Dataset], Dataset]) -> None:
    labels = [[50 + token for token in document] for document in DOCUMENTS]
    source = DocumentSource(store(dataset_of(labels=labels)), CAPACITY)

    assert source.document_tokens.tolist() == [3, 1, 5, 2]
    assert tokens_of(source) == DOCUMENTS
    assert [labels_of(source, document)[0][1:] for document in range(4)] == [row[1:] for row in labels]


@pytest.mark.parametrize(
    "feature",
    [List(Value(kind)) for kind in ("int8", "int32", "int64", "uint8", "uint16", "uint32")]
    + [LargeList(Value("int32"))],
    ids=lambda feature: f"{type(feature).__name__}-{feature.feature.dtype}",
)
def test_tokens_of_any_integer_type_become_int64(feature: Any) -> None:
    source = DocumentSource(Dataset.from_dict({"input_ids": DOCUMENTS}, Features({"input_ids": feature})), CAPACITY)

    assert tokens_of(source) == DOCUMENTS
    kind = feature.feature.dtype
    largest = [[1, np.iinfo(kind).max if kind != "int64" else 2**40]]
    source_of_largest = DocumentSource(
        Dataset.from_dict({"input_ids": largest}, Features({"input_ids": feature})), CAPACITY
    )
    assert tokens_of(source_of_largest) == largest
    tokens = read(source, 0, 0, 3)
    assert tokens.input_ids.dtype == tokens.labels.dtype == tokens.shift_labels.dtype == np.int64


def test_rows_of_fixed_size() -> None:
    features = Features({"input_ids": List(Value("int32"), length=3)})
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]}, features)

    assert tokens_of(DocumentSource(dataset, CAPACITY)) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert tokens_of(DocumentSource(dataset.select([2, 0]), CAPACITY)) == [[7, 8, 9], [1, 2, 3]]


def test_tokens_read_do_not_share_memory_with_the_dataset() -> None:
    source = DocumentSource(dataset_of(labels=DOCUMENTS), CAPACITY)
    tokens = read(source, 0, 0, 3)
    tokens.input_ids[:] = 0
    tokens.labels[:] = 0

    assert tokens_of(source) == DOCUMENTS
    assert labels_of(source, 0) == ([-100, 12, 13], [12, 13, -100])


# --- labels


MASKS = [[0, 1, 1], [1], [0, 0, 1, 1, 0], [1, 0]]
OTHER_MASKS = [[1, 0, 1], [0], [1, 1, 1, 0, 1], [1, 1]]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("kind", [int, bool])
def test_masked_tokens_are_not_learnt(name: str, kind: type) -> None:
    masks = [[kind(value) for value in mask] for mask in MASKS]
    source = DocumentSource(dataset_of(**{name: masks}), CAPACITY)

    assert labels_of(source, 0) == ([-100, 12, 13], [12, 13, -100])
    assert labels_of(source, 2) == ([-100, -100, 33, 34, -100], [-100, 33, 34, -100, -100])
    assert labels_of(source, 3) == ([-100, -100], [-100, -100])
    assert tokens_of(source) == DOCUMENTS


def test_both_masks_and_labels_must_agree_that_a_token_is_learnt() -> None:
    labels = [[1, 2, 3], [4], [5, -100, 6, 7, 8], [9, 10]]
    columns = {"labels": labels, "completion_mask": MASKS, "assistant_masks": OTHER_MASKS}
    source = DocumentSource(dataset_of(**columns), CAPACITY)

    assert labels_of(source, 0)[0] == [-100, -100, 3]
    assert labels_of(source, 2)[0] == [-100, -100, 6, -100, -100]
    only_masks = DocumentSource(dataset_of(completion_mask=MASKS, assistant_masks=OTHER_MASKS), CAPACITY)
    assert labels_of(only_masks, 2)[0] == [-100, -100, 33, -100, -100]


def test_label_after_a_cut_is_known_on_both_sides() -> None:
    """However a document is cut, its segments' labels put together are those of the whole document."""
    columns = {"labels": [[1, 2, 3], [4], [5, 6, -100, 7, 8], [9, 10]], "completion_mask": MASKS}
    for dataset in (dataset_of(), dataset_of(**columns)):
        source = DocumentSource(dataset, CAPACITY)
        whole = read(source, 2, 0, 5)
        for cut in range(1, 5):
            parts = [read(source, 2, 0, cut), read(source, 2, cut, 5)]
            for name in ("input_ids", "labels", "shift_labels"):
                assert np.concatenate([getattr(part, name) for part in parts]).tolist() == (
                    getattr(whole, name).tolist()
                )


# --- rows that hold several documents


def packed(**columns: Any) -> Dataset:
    """Two rows, as TRL packs them, of documents of 2, 3 and 1 and of 4 tokens."""
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    return Dataset.from_dict({"input_ids": rows, "seq_lengths": [[2, 3, 1], [4]], **columns})


def test_packed_rows_are_taken_apart() -> None:
    source = DocumentSource(packed(), CAPACITY)

    assert source.document_tokens.tolist() == [2, 3, 1, 4]
    assert source.rows.tolist() == [0, 0, 0, 1]
    assert tokens_of(source) == [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    assert "document 3 (row 1) has 4 tokens" in refusal(packed(), capacity=3)


def test_labels_do_not_cross_documents_of_a_packed_row() -> None:
    source = DocumentSource(packed(), CAPACITY)

    assert [labels_of(source, document) for document in range(3)] == [
        ([-100, 2], [2, -100]),
        ([-100, 4, 5], [4, 5, -100]),
        ([-100], [-100]),
    ]


def test_packed_rows_in_several_chunks() -> None:
    many = datasets.concatenate_datasets([packed(), packed().select([1, 0])])

    assert DocumentSource(many, CAPACITY).document_tokens.tolist() == [2, 3, 1, 4, 4, 2, 3, 1]
    inside = Dataset(datasets.concatenate_datasets([packed(), packed()]).data.slice(1, 2))
    assert tokens_of(DocumentSource(inside, CAPACITY)) == [[7, 8, 9, 10], [1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("seq_lengths", "parts"),
    [
        ([[2, 3, 1], [5]], ["row 1", "sum to 5", "4 tokens"]),
        ([[2, 3], [4]], ["row 0", "sum to 5", "6 tokens"]),
        ([[2, 3, 1], []], ["row 1", "sum to 0", "4 tokens"]),
        ([[2, 3, 1], None], ["row 1", "sum to 0", "4 tokens"]),
        ([[2, 4, 0], [4]], ["seq_lengths", "document 2 has 0 tokens"]),
        ([[2, 5, -1], [4]], ["seq_lengths", "document 2 has -1 tokens"]),
        ([[2.0, 4.0], [4.0]], ["seq_lengths", "integers", "float64"]),
        ([[2, 3, None], [4]], ["seq_lengths", "integers"]),
        ([6, 4], ["seq_lengths"]),
        (["2,3,1", "4"], ["seq_lengths"]),
    ],
    ids=str,
)
def test_wrong_seq_lengths_are_refused(seq_lengths: Any, parts: list[str]) -> None:
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    message = refusal(Dataset.from_dict({"input_ids": rows, "seq_lengths": seq_lengths}))

    for part in parts:
        assert part in message


# --- tokens made on access


def made_on_access(rows: list[dict[str, Any]], **columns: Any) -> Dataset:
    """A dataset whose transform gives these rows, each with the columns that it has."""
    dataset = Dataset.from_dict({"number": list(range(len(rows))), **columns})

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        (number,) = batch["number"]
        return {name: [value] for name, value in rows[number].items()}

    dataset.set_transform(transform)
    return dataset


@pytest.mark.parametrize("form", [list, np.array, "torch"], ids=str)
def test_transform_with_a_length_column(form: Any) -> None:
    import torch

    make = torch.tensor if form == "torch" else form
    labels = [[50 + token for token in document] for document in DOCUMENTS]
    rows = [
        {"input_ids": make(ids), "labels": make(of_row), "completion_mask": [1] * len(ids)}
        for ids, of_row in zip(DOCUMENTS, labels, strict=True)
    ]
    rows[0]["completion_mask"] = [0, 0, 1]
    dataset = made_on_access(rows, length=[3, 1, 5, 2])
    source = DocumentSource(dataset, CAPACITY)

    assert source.document_tokens.tolist() == [3, 1, 5, 2]
    assert tokens_of(source) == DOCUMENTS
    assert tokens_of(DocumentSource(dataset.select([2, 0]), CAPACITY)) == [DOCUMENTS[2], DOCUMENTS[0]]
    assert labels_of(source, 0)[0] == [-100, -100, 63]
    assert labels_of(source, 2) == ([-100, 82, 83, 84, 85], [82, 83, 84, 85, -100])
    assert read(source, 2, 1, 3).input_ids.tolist() == [32, 33]


def test_transform_without_a_length_column_is_refused() -> None:
    rows = [{"input_ids": document} for document in DOCUMENTS]

    for columns in ({}, {"length": [3.0, 1.0, 5.0, 2.0]}, {"length": [3, 1, None, 2]}):
        message = refusal(made_on_access(rows, **columns))
        for part in ("set_transform", "'length'", "dataset.map"):
            assert part in message


def test_transform_without_tokens_is_refused() -> None:
    message = refusal(made_on_access([{"text": "a"}], length=[1]))

    assert "transform gives no 'input_ids'" in message
    assert "text" in message


@pytest.mark.parametrize(
    "row",
    [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4]}, {"input_ids": [1, 2]}],
    ids=["tokens", "labels", "fewer"],
)
def test_transform_that_gives_more_or_fewer_than_announced_is_refused(row: dict[str, list[int]]) -> None:
    """Tokens beyond the announced length would be left out without a word; a later row is refused when it is read."""
    assert re.search(r"row 0: .*\([24],\); .*announces 3 integers", refusal(made_on_access([row], length=[3])))
    source = DocumentSource(made_on_access([{"input_ids": [1, 2, 3]}, row], length=[3, 3]), CAPACITY)
    with pytest.raises(PackingError, match=r"row 1: .*announces 3 integers"):
        read(source, 1)


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1, 2]], ["a", "b"]], ids=str)
def test_transform_that_gives_no_integers_is_refused(values: Any) -> None:
    message = refusal(made_on_access([{"input_ids": values}], length=[2]))

    assert "row 0: the dataset's transform gives 'input_ids' of" in message


# --- columns that do not fit


def test_length_column_that_disagrees_is_refused_with_both_numbers() -> None:
    message = refusal(dataset_of(length=[3, 1, 6, 9]))

    for part in ("row 2", "'length' says 6", "input_ids has 5 tokens", "Rename"):
        assert part in message


def test_length_column_of_something_else_is_left_alone() -> None:
    for lengths in ([0.1, 0.2, 0.3, 0.4], ["a", "b", "c", "d"], [3, None, 5, 2]):
        assert DocumentSource(dataset_of(length=lengths), CAPACITY).document_tokens.tolist() == [3, 1, 5, 2]


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ([[1, 1, 1], [1], [1, 1, 1, 1], [1, 1]], ["row 2", "4 values for 5 tokens"]),
        ([[1, 1, 1], [1, 1], [1, 1, 1, 1, 1], [1, 1]], ["row 1", "2 values for 1 tokens"]),
        ([[1, 1, 1], None, [1, 1, 1, 1, 1], [1, 1]], ["row 1", "0 values for 1 tokens"]),
    ],
    ids=["too few", "too many", "missing"],
)
def test_columns_of_other_lengths_are_refused(name: str, values: Any, parts: list[str]) -> None:
    message = refusal(dataset_of(**{name: values}))

    for part in [f"'{name}'", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("values", "row"), [([[], [1]], 0), ([[1], [2, 3], []], 2), ([[1], None], 1)], ids=["first", "last", "no list"]
)
def test_rows_without_tokens_are_refused(values: Any, row: int) -> None:
    message = refusal(Dataset.from_dict({"input_ids": values}))

    assert f"document {row} has 0 tokens" in message
    assert "filter" in message


@pytest.mark.parametrize("column", ["input_ids", "labels", "completion_mask"])
def test_missing_values_are_refused_where_they_are_read(column: str) -> None:
    columns = {"input_ids": [[1, 2, 3], [4, 5, 6, 7]], column: [[1, 1, 1], [1, 1, None, 1]]}
    source = DocumentSource(Dataset.from_dict(columns), CAPACITY)

    assert read(source, 0, 0, 3).input_ids.tolist() == columns["input_ids"][0]
    with pytest.raises(PackingError, match=f"row 1: column '{column}' has missing values between tokens 0 and 4"):
        read(source, 1, 0, 4)


@pytest.mark.parametrize("column", ["input_ids", "labels", "assistant_masks"])
@pytest.mark.parametrize(
    "values",
    [[[1.0, 2.0], [3.0]], [["a", "b"], ["c"]], [[[1], [2]], [[3]]], [1, 2], ["a", "b"], [None, None]],
    ids=str,
)
def test_columns_that_hold_no_lists_of_integers_are_refused_by_type(column: str, values: Any) -> None:
    message = refusal(Dataset.from_dict({"input_ids": [[1, 2], [3]], column: values}))
    told = (
        "holds one label per row" if (column, values) == ("labels", [1, 2]) else "must hold a list of integers per row"
    )

    assert f"column '{column}' {told}" in message


# --- columns that a model or a loss may need, or that nobody sees


def test_all_columns_that_would_be_left_out_are_named_at_once() -> None:
    dataset = dataset_of(id=[1, 2, 3, 4], text=["a"] * 4, score=[0.5] * 4, year=[2000] * 4)
    with pytest.raises(
        PackingError, match=r"column 'id' \(and 2 more like it\) .*remove_columns\(\['id', 'score', 'year'\]"
    ):
        DocumentSource(dataset, CAPACITY)


KINDS = [[0, 1, 1], [1], [0, 0, 1, 1, 0], [1, 0]]


@pytest.mark.parametrize(("kinds", "dtype"), [(int, np.int64), (bool, np.int64), (float, np.float32)])
def test_inputs_of_the_model_go_with_their_tokens(kinds: type, dtype: type) -> None:
    dataset = dataset_of(token_type_ids=[[kinds(kind) for kind in row] for row in KINDS]).select([3, 2])
    source = DocumentSource(dataset, CAPACITY, reading=Reading(inputs=frozenset({"token_type_ids"})))
    (values,) = read(source, 1, 1, 4).inputs.values()

    assert (values.tolist(), values.dtype, source.inputs) == ([0, 1, 1], dtype, {"token_type_ids": dtype})


@pytest.mark.parametrize(
    ("columns", "inputs", "told"),
    [
        ({"weight": [0.5, 1.0, 1.0, 0.0]}, (), "'weight' holds numbers .*does not name it.*remove_columns"),
        ({"n": [1, 2, 3, 4]}, None, r"'n' holds numbers .*plugin\.dataloader\(model=\.\.\.\)"),
        ({"token_type_ids": KINDS}, None, "'token_type_ids' holds numbers"),
        ({"token_type_ids": KINDS}, (), "'token_type_ids' holds numbers"),
        ({"shift_labels": DOCUMENTS}, ("shift_labels",), "'shift_labels' holds numbers .* batches fill it in"),
        ({"token_type_ids": [0, 1, 2, 3]}, ("token_type_ids",), "must hold a list of numbers per row, not int8"),
        ({"inputs_embeds": [[[0.5]]] * 4}, ("inputs_embeds",), "must hold a list of numbers per row, not list"),
        (
            {"token_type_ids": [[0]] * 4},
            ("token_type_ids",),
            "row 0: column 'token_type_ids' has 1 values for 3 tokens",
        ),
        ({"attention_mask": [[[[1]]]] * 4}, (), "'attention_mask' must hold a list of integers per row"),
        (
            {"labels": [0, 1, 2, 0]},
            (),
            "'labels' holds one label per row, as for classifying texts.*Leave tokens_per_rank out",
        ),
    ],
    ids=str,
)
def test_numbers_that_placed_batches_would_leave_out_are_refused_by_name(
    columns: dict[str, Any], inputs: tuple[str, ...] | None, told: str
) -> None:
    reading = Reading(inputs=None if inputs is None else frozenset(inputs))
    assert re.search(told, refusal(dataset_of(**columns), reading=reading))


def test_columns_that_the_format_hides_are_not_read() -> None:
    masks = [[0] * len(document) for document in DOCUMENTS]
    dataset = dataset_of(labels=DOCUMENTS, completion_mask=masks, weight=[0.5] * 4)
    shown = dataset.with_format("torch", columns=["input_ids", "labels"])

    assert labels_of(DocumentSource(shown, CAPACITY), 0)[0] == [-100, 12, 13]
    shown.set_format("torch", columns=["input_ids", "completion_mask"])
    assert labels_of(DocumentSource(shown, CAPACITY), 0)[0] == [-100, -100, -100]
    assert "hides its column 'input_ids' (set_format(columns=['labels']))" in refusal(
        dataset.with_format("torch", columns=["labels"])
    )
    shown.set_format("torch", columns=["labels"], output_all_columns=True)
    assert "'weight' holds numbers" in refusal(shown)


class FillInTheMiddle(Dataset):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)


def test_dataset_that_makes_rows_itself_is_refused() -> None:
    message = refusal(FillInTheMiddle(dataset_of().data.table))

    assert "FillInTheMiddle makes its rows itself (__getitem__)" in message


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize(("token", "vocabulary"), [(128, 128), (1 << 40, 128), (-1, 128), (-1, None), (-100, 128)])
def test_tokens_that_the_model_does_not_know_are_named(column: str, token: int, vocabulary: int | None) -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6, 7]], column: [[1, 127, 0], [1, 2, 3, token]]}
    source = DocumentSource(Dataset.from_dict(rows), CAPACITY, reading=Reading(vocabulary_tokens=vocabulary))
    known = "0 or more" if vocabulary is None else "0 to 127 in this model"

    assert read(source, 0).input_ids.tolist() == rows["input_ids"][0]
    if (column, token) == ("labels", -100):
        assert read(source, 1).labels.tolist() == [-100, 2, 3, -100]
        return
    with pytest.raises(PackingError, match=f"row 1: {column} is {token} at token 3, and tokens are {known}"):
        read(source, 1, 2, 4)


def test_positions_that_disagree_with_documents_are_refused_where_they_are_read() -> None:
    rows = {"input_ids": [[1, 2, 3, 4, 5, 6]] * 2, "seq_lengths": [[4, 2]] * 2}
    positions = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    source = DocumentSource(Dataset.from_dict(rows | {"position_ids": positions}), 3, "split")

    assert tokens_of(source.__class__(Dataset.from_dict(rows), 3, "split"))[:3] == [[1, 2, 3], [4], [5, 6]]
    assert [read(source, document).input_ids.tolist() for document in range(3)] == [[1, 2, 3], [4], [5, 6]]
    with pytest.raises(PackingError, match="row 1: position_ids is 0 at token 3, which has position 3"):
        read(source, 4)


# --- datasets that were padded or packed for somebody else


@pytest.mark.parametrize(("mask", "token"), [([1, 1, 1, 0, 0], 3), ([0, 0, 1, 1, 1], 0), ([1, 0, 1, 1, 1], 1)])
def test_padding_is_refused_where_it_is_read_with_row_and_token(mask: list[int], token: int) -> None:
    masks = [[1] * len(document) for document in DOCUMENTS]
    masks[2] = mask
    source = DocumentSource(dataset_of(attention_mask=masks), CAPACITY)

    assert read(source, 3, 0, 2).input_ids.tolist() == DOCUMENTS[3]
    for start in {0, token}:  # also from a later segment the token is counted in its row
        with pytest.raises(PackingError, match=f"row 2: attention_mask is 0 at token {token}: the dataset is padded"):
            read(source, 2, start, 5)


def test_padding_of_a_transform_is_refused_too() -> None:
    row = {"input_ids": [5, 6, 7, 0]}
    rows = [row, row | {"attention_mask": [1, 1, 1, 1]}, row | {"attention_mask": [1, 1, 1, 0]}]
    source = DocumentSource(made_on_access(rows, length=[4] * 3), CAPACITY)

    assert [read(source, document).input_ids.tolist() for document in (0, 1)] == [[5, 6, 7, 0]] * 2
    with pytest.raises(PackingError, match="row 2: attention_mask is 0 at token 3"):
        read(source, 2)


def test_positions_without_lengths_are_refused_and_with_them_left_alone() -> None:
    packed = {"input_ids": [[1, 2, 3, 4]], "position_ids": [[0, 1, 0, 1]]}
    assert "say which documents a row holds in a column 'seq_lengths'" in refusal(Dataset.from_dict(packed))

    source = DocumentSource(Dataset.from_dict(packed | {"seq_lengths": [[2, 2]]}), CAPACITY)
    assert tokens_of(source) == [[1, 2], [3, 4]]


# --- what is no dataset


@pytest.mark.parametrize("refuse", [check_map_style, lambda dataset: DocumentSource(dataset, CAPACITY)])
def test_stream_is_refused_with_what_to_do(refuse: Callable[[Any], Any]) -> None:
    with pytest.raises(PackingError, match=r"IterableDataset .* datasets\.Dataset\.from_generator"):
        refuse(dataset_of().to_iterable_dataset())


# --- documents longer than a micro-batch


LONG = [list(range(100, 110)), [1, 2, 3], list(range(200, 223))]


def test_long_document_is_an_error_with_document_row_and_both_lengths() -> None:
    message = refusal(Dataset.from_dict({"input_ids": LONG}), capacity=8)

    for part in ("document 0 (row 0)", "10 tokens", "hold 8", "1 more", "split", "truncate", "tokens_per_rank"):
        assert part in message
    message = refusal(Dataset.from_dict({"input_ids": LONG}), capacity=22, overlong="error")
    for part in ("document 2 (row 2)", "23 tokens", "hold 22. Raise ranks x tokens_per_rank to 23"):
        assert part in message


@pytest.mark.parametrize("policy", ["error", "split", "truncate"])
def test_documents_of_the_capacity_are_left_whole(policy: str) -> None:
    source = DocumentSource(Dataset.from_dict({"input_ids": LONG}), 23, policy)

    assert tokens_of(source) == LONG
    assert (source.documents_truncated, source.tokens_truncated) == (0, 0)


@pytest.mark.parametrize("capacity", [1, 4, 5, 7, 10, 22])
def test_split_keeps_every_token_in_order(capacity: int) -> None:
    source = DocumentSource(Dataset.from_dict({"input_ids": LONG}), capacity, "split")
    expected = [document[at : at + capacity] for document in LONG for at in range(0, len(document), capacity)]

    assert tokens_of(source) == expected
    assert list(chain.from_iterable(tokens_of(source))) == list(chain.from_iterable(LONG))
    rows = [row for row, document in enumerate(LONG) for _ in range(0, len(document), capacity)]
    assert source.rows.tolist() == list(rows)
    assert (source.documents_truncated, source.tokens_truncated) == (0, 0)


def test_parts_of_a_split_document_are_documents_of_their_own() -> None:
    """The first token of a part is not learnt: nothing before it can be attended to."""
    source = DocumentSource(Dataset.from_dict({"input_ids": LONG}), 4, "split")

    assert labels_of(source, 0) == ([-100, 101, 102, 103], [101, 102, 103, -100])
    assert labels_of(source, 1) == ([-100, 105, 106, 107], [105, 106, 107, -100])
    assert labels_of(source, 2) == ([-100, 109], [109, -100])


def test_split_of_packed_and_selected_rows() -> None:
    dataset = Dataset.from_dict({"input_ids": [[1, 2, 3], LONG[0]], "seq_lengths": [[1, 2], [3, 7]]}).select([1, 0])
    source = DocumentSource(dataset, 3, "split")

    assert tokens_of(source) == [[100, 101, 102], [103, 104, 105], [106, 107, 108], [109], [1], [2, 3]]


@pytest.mark.parametrize(("capacity", "documents", "tokens"), [(22, 1, 1), (10, 1, 13), (8, 2, 17), (1, 3, 33)])
def test_truncate_keeps_beginnings_and_counts_the_rest(
    capacity: int, documents: int, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = DocumentSource(Dataset.from_dict({"input_ids": LONG}), capacity, "truncate")

    assert tokens_of(source) == [document[:capacity] for document in LONG]
    assert labels_of(source, 2)[1][-1] == -100  # the label is beyond the end
    assert (source.documents_truncated, source.tokens_truncated) == (documents, tokens)
    assert f"truncated {documents} of 3 documents to {capacity} tokens; {tokens} tokens" in caplog.text


# --- what is read


class CountingColumn(ArrowColumn):
    """Remembers what is read."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.reads: list[tuple[int, int, int]] = []

    def read(self, row: int, start: int, stop: int) -> np.ndarray:
        self.reads.append((row, start, stop))
        return super().read(row, start, stop)


def counting_source(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> DocumentSource:
    monkeypatch.setattr(rows_module, "ArrowColumn", CountingColumn)
    return DocumentSource(dataset, CAPACITY)


def test_lengths_are_known_without_reading_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    source = counting_source(dataset_of(labels=DOCUMENTS, completion_mask=MASKS), monkeypatch)

    assert source.document_tokens.sum() == 11
    assert all(column.reads == [] for column in source._rows._columns.values())


@pytest.mark.parametrize(
    ("dataset", "segment", "read"),
    [
        (dataset_of(labels=DOCUMENTS, completion_mask=MASKS), (2, 1, 3), (2, 1, 4)),
        (dataset_of(labels=DOCUMENTS, completion_mask=MASKS), (2, 0, 5), (2, 0, 5)),
        (dataset_of(labels=DOCUMENTS, completion_mask=MASKS), (2, 4, 5), (2, 4, 5)),
        (dataset_of(labels=DOCUMENTS, completion_mask=MASKS), (0, 0, 1), (0, 0, 2)),
        (packed(), (1, 0, 2), (0, 2, 5)),
        (packed(), (1, 0, 3), (0, 2, 5)),
    ],
    ids=["middle", "whole", "end", "beginning", "cut in a packed row", "whole in a packed row"],
)
def test_segment_reads_its_own_tokens_and_one_label_after_a_cut(
    dataset: Dataset, segment: tuple[int, int, int], read: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = counting_source(dataset, monkeypatch)
    source.read(*segment)

    assert all(column.reads == [read] for column in source._rows._columns.values())


# --- fingerprint


def test_fingerprint_depends_on_the_lengths_alone() -> None:
    source = DocumentSource(dataset_of(), CAPACITY)
    same_lengths = Dataset.from_dict({"input_ids": [[0] * len(document) for document in DOCUMENTS]})

    assert DocumentSource(same_lengths, CAPACITY).fingerprint == source.fingerprint
    for other in (dataset_of().select([1, 0, 2, 3]), dataset_of().select([0, 1, 2]), packed()):
        assert DocumentSource(other, CAPACITY).fingerprint != source.fingerprint
    split = DocumentSource(dataset_of(), 2, "split")
    assert split.fingerprint != source.fingerprint
