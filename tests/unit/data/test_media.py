"""Media beside tokens: found by name and kind, and told from numbers and texts about them."""

from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List

from distca_hf.data.rows import media_columns


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
