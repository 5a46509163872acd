"""Sizes of images are read in known forms; a batch in another form keeps its images."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distca_hf.batches.agreement import GivenAgreement, ShownNumbers
from distca_hf.batches.images import images_of
from distca_hf.batches.read_documents import DocumentReader
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.testing import LoopbackTransport, run_ranks


PATCHES = {"pixel_values": torch.zeros(24, 6), "image_grid_thw": torch.tensor([[1, 4, 4], [2, 2, 2]])}
WHOLE = {"pixel_values": torch.zeros(2, 3, 8, 12)}


@pytest.mark.parametrize(
    ("batch", "num_images", "sizes"),
    [
        ({}, 0, []),
        (PATCHES, 2, [[1, 4, 4], [2, 2, 2]]),
        ({"pixel_values_videos": torch.zeros(8, 6), "video_grid_thw": torch.tensor([[2, 2, 2]])}, 0, [[2, 2, 2]]),
        (WHOLE, 2, [[1, 8, 12]] * 2),
        (WHOLE | {"image_sizes": torch.tensor([[8, 4], [6, 12]])}, 2, [[1, 8, 4], [1, 6, 12]]),
        ({"pixel_values": torch.zeros(0, 6)}, 0, []),
    ],
)
def test_sizes_are_those_of_the_batch(batch: dict[str, Any], num_images: int, sizes: list[list[int]]) -> None:
    images = images_of(batch, has_sizes=True)

    assert images is not None
    assert (images.num_images, images.sizes.tolist()) == (num_images, sizes)


@pytest.mark.parametrize(
    "batch",
    [
        {"pixel_values": torch.zeros(2, 5, 3, 8, 8)},  # tiles of images
        PATCHES | {"input_features": torch.zeros(1, 4)},  # sound
        {"pixel_values": [torch.zeros(3, 8, 8)]},
        {"pixel_values": torch.zeros(24, 6)},
        {"image_grid_thw": torch.tensor([[1, 4, 4]])},
        PATCHES | {"pixel_values_videos": torch.zeros(8, 7), "video_grid_thw": torch.tensor([[2, 2, 2]])},
    ],
)
def test_images_in_other_forms_stay(batch: dict[str, Any]) -> None:
    assert images_of(batch, has_sizes=True) is None


def test_sizes_of_towers_that_mean_something_else_are_not_read() -> None:
    assert images_of(WHOLE | {"image_sizes": torch.tensor([[480, 640]])}, has_sizes=False) is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            PATCHES | {"pixel_values": torch.zeros(20, 6)},
            r"item 1 of 2 is 2 x 2 x 2 = 8 patches, and pixel_values has 4 for it: 20 patches in all, not 24",
        ),
        (
            PATCHES | {"pixel_values": torch.zeros(12, 6)},
            r"item 0 of 2 is 1 x 4 x 4 = 16 patches, and pixel_values has 12 for it",
        ),
        (PATCHES | {"pixel_values": torch.zeros(25, 6)}, r"item 1 of 2 .* = 8 patches, .* has 9 for it"),
        (WHOLE | {"image_sizes": torch.tensor([[8, 4], [6, 13]])}, r"image 1 of 2 is 6 x 13 pixels, .* holds 8 x 12"),
        (WHOLE | {"image_sizes": torch.tensor([[8, 4]])}, r"shape \[1, 2\], and pixel_values holds 2 images"),
    ],
)
def test_images_of_another_size_than_they_say_are_named(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        images_of(batch, has_sizes=True)


TEXT = {"input_ids": torch.tensor([[1, 2, 7]])}


def reach(batches: Sequence[dict[str, Any]], images_wait: bool) -> list[Any]:
    """Returns what ranks agreed on, or the error of each."""
    reader = DocumentReader(moves_images=True)

    def run(transport: LoopbackTransport) -> ShownNumbers | str:
        batch = TEXT | batches[transport.rank]
        try:
            return GivenAgreement(DistCAConfig(), transport).reach(batch, reader.read(batch), 0, images_wait)
        except PackingError as error:
            return str(error)

    return run_ranks(len(batches), run)


def bytes_of(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"pixel_values": batch["pixel_values"].byte()}


def test_images_of_a_dtype_that_does_not_move_stay_on_all_ranks() -> None:
    shown = reach([PATCHES, PATCHES], False)
    assert [(of.most_images, of.image_dtype) for of in shown] == [(2, torch.float32)] * 2
    for batches in ([bytes_of(PATCHES), PATCHES], [PATCHES, bytes_of(PATCHES)], [bytes_of(PATCHES), {}]):
        assert [(of.most_images, of.image_dtype) for of in reach(batches, False)] == [(0, None)] * 2


def test_images_of_a_dtype_that_does_not_move_are_refused_on_one_rank_that_would_wait() -> None:
    for error in reach([bytes_of(PATCHES), {}], True):
        assert isinstance(error, str)
        assert "rank 0 holds images, videos or sound, and rank 1 none" in error
    assert [of.most_images for of in reach([bytes_of(PATCHES), bytes_of(PATCHES)], True)] == [0, 0]
