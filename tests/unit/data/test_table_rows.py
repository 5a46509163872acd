"""Rows of tables: numbers as arrays without Python objects, and everything else as Python has it."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Image, Value

from distca_hf.data.readers import StreamReader
from distca_hf.data.rows import Reading, row_of
from distca_hf.data.streams import StreamSource
from distca_hf.errors import PackingError
from support.streams import numbered_stream


INTEGERS, FLOATS, BOOLEANS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())


@pytest.mark.parametrize(
    ("value", "kind", "dtype"),
    [
        ([1, -2, 3], INTEGERS, "int32"),
        ([1, 2], pa.large_list(pa.uint16()), "uint16"),
        ([1, 2], pa.list_(pa.int64(), 2), "int64"),
        ([0.5, -1.0], FLOATS, "float32"),
        ([True, False], BOOLEANS, "bool"),
        ([], INTEGERS, "int32"),
    ],
    ids=str,
)
def test_numbers_are_arrays(value: list[Any], kind: pa.DataType, dtype: str) -> None:
    other = value[::-1]
    rows = pa.table({"x": pa.array([other, value, other], kind)})
    made = row_of(rows.slice(1, 1))["x"]

    assert isinstance(made, np.ndarray)
    assert (made.dtype, made.tolist()) == (np.dtype(dtype), value)


@pytest.mark.parametrize(
    "value",
    [[1, None], None, 5, 0.5, "text", ["a", "b"], [[1, 2], [3]], {"a": [1]}, [{"a": 1}]],
    ids=str,
)
def test_other_values_are_as_python_has_them(value: object) -> None:
    assert row_of(pa.table({"x": pa.array([value])})) == {"x": value}


def test_streams_of_stored_rows_are_read_as_tables() -> None:
    def first_row(stream: Any) -> object:
        return next(iter(StreamSource(stream, Reading(), 64).part(0, 2, 0)))

    assert isinstance(first_row(numbered_stream()), pa.Table)
    assert isinstance(first_row(numbered_stream().map(lambda row: row)), dict)


def test_stream_of_decoded_images_is_read_as_python_has_it() -> None:
    """As a table, an image would be bytes and a path, which nobody would take for a column to refuse."""
    features = Features({"input_ids": [Value("int64")], "scan": Image()})
    rows = {"input_ids": [[1, 2]], "scan": [np.zeros((2, 2, 3), dtype=np.uint8)]}
    stream = Dataset.from_dict(rows, features=features).to_iterable_dataset()
    source = StreamSource(stream, Reading(), 64)

    with pytest.raises(PackingError, match="column 'scan'"):
        StreamReader(source, 0, 1, 0).read(1)
