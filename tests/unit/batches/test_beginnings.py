"""Hashes of the beginnings of documents with images: which tokens belong to which image, and which images differ."""

from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.batches.beginnings import Placeholders, row_sums_of
from distca_hf.batches.document_gather import begin_alike, to_share
from distca_hf.batches.read_documents import DocumentReader, ReadDocuments
from distca_hf.prefixes import random_factors


IMAGE, VIDEO, LEAST = 9, 8, 12
PLACEHOLDERS = Placeholders(image=IMAGE, video=VIDEO, has_sizes=True)
Batch = dict[str, Any]


def read(batch: Batch, placeholders: Placeholders = PLACEHOLDERS, least: int = LEAST) -> ReadDocuments:
    return DocumentReader(packs_rows=True, with_images=True, shared_tokens=least, placeholders=placeholders).read(
        batch
    )


def rows(*image_tokens: int, video: bool = False) -> Batch:
    """Two equal rows of 20 tokens. Each has two images with these tokens, from tokens 2 and 10 on."""
    ids = torch.arange(100, 120).repeat(2, 1)
    for start, count in zip((2, 10), image_tokens, strict=True):
        ids[:, start : start + count] = VIDEO if video else IMAGE
    return {"input_ids": ids}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_grids() -> Batch:
    grid = torch.tensor([[1, 2, 4], [1, 4, 4]])
    return rows(2, 4) | {"pixel_values": drawn(24, 6).repeat(2, 1), "image_grid_thw": grid.repeat(2, 1)}


def with_videos() -> Batch:
    grid, seconds = torch.tensor([[2, 2, 2], [1, 4, 4]]), torch.tensor([0.5, 1.0])
    columns = {"pixel_values_videos": drawn(24, 6), "video_grid_thw": grid, "second_per_grid_ts": seconds}
    return rows(2, 4, video=True) | {name: torch.cat([one, one]) for name, one in columns.items()}


def with_tiles() -> Batch:
    return rows(6, 3) | {"pixel_values": drawn(3, 3, 4, 5).repeat(2, 1, 1, 1)}


def with_sizes() -> Batch:
    pixels, sizes = drawn(2, 3, 8, 12), torch.tensor([[8, 4], [8, 12]])
    return rows(2, 6) | {"pixel_values": pixels.repeat(2, 1, 1, 1), "image_sizes": sizes.repeat(2, 1)}


MAKES = [with_grids, with_videos, with_tiles, with_sizes]


def equal_tokens(batch: Batch) -> int:
    """How many first tokens of both rows count as equal, in steps of one."""
    least = 1
    for least in range(1, 20):
        found = read(batch, least=least)
        assert found.unshared == ""
        if not begin_alike(found, least):
            return least - 1
    return least


# A number of an image's first row, and of its last.
@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("make", MAKES)
def test_documents_are_equal_up_to_the_first_token_of_another_image(make: Any, at: str) -> None:
    batch = make()
    name = next(name for name in batch if name.startswith("pixel_values"))
    items, half = batch[name], len(batch[name]) // 2
    assert equal_tokens(batch) == 19
    second = {with_grids: 8, with_videos: 8, with_tiles: 2, with_sizes: 1}[make]
    begins = 5 if make is with_tiles and at == "last" else 2  # of its second tile
    for row, tokens in ((0 if at == "first" else second - 1, begins), (second if at == "first" else half - 1, 10)):
        changed = items.clone()
        changed[half + row].view(-1)[-1] += 1e-3
        assert equal_tokens(batch | {name: changed}) == tokens


@pytest.mark.parametrize("make", [with_grids, with_videos, with_sizes])
def test_images_of_equal_numbers_and_other_sizes_differ(make: Any) -> None:
    batch = make()
    name = next(name for name in batch if "grid" in name or "sizes" in name)
    turned = batch[name].clone()
    turned[-1] = turned[-1].flip(0) if len(turned[-1]) == 2 else torch.tensor([1, 2, 8])
    if name == "image_sizes":
        batch["pixel_values"] = batch["pixel_values"].repeat(1, 1, 2, 1)[:, :, :12]
    assert equal_tokens(batch | {name: turned}) == 10
    if make is with_videos:  # and so do videos at another speed
        assert equal_tokens(batch | {"second_per_grid_ts": torch.tensor([0.5, 1.0, 0.5, 0.25])}) == 10


def test_speeds_of_videos_differ_at_every_token() -> None:
    """Numbers of 0.5 and 1.0 differ only in their highest bits, which factors of some tokens would push out."""
    [at, *_] = np.flatnonzero(random_factors(2**15) % 2**12 == 0).tolist()
    ids = torch.full((2, at + 9), 7)
    ids[:, at : at + 2] = VIDEO
    of_videos = {"pixel_values_videos": drawn(4, 6).repeat(2, 1), "video_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
    for second, is_alike in ((0.5, True), (1.0, False)):
        seconds = {"second_per_grid_ts": torch.tensor([0.5, second])}
        found = read({"input_ids": ids, **of_videos, **seconds}, least=at + 3)
        assert found.unshared == ""
        assert begin_alike(found, at + 3) == is_alike


def test_images_are_equal_however_much_they_are_padded() -> None:
    """To the largest image of each rank's batch."""
    batch = with_sizes()
    batch["pixel_values"][::2, :, :, 4:] = 0  # the first image of a row
    one = {name: batch[name][: len(batch[name]) // 2] for name in batch}
    wider = one | {"pixel_values": torch.nn.functional.pad(one["pixel_values"], (0, 8, 0, 3))}
    assert np.array_equal(read(one, least=15).hashes, read(wider, least=15).hashes)


def black_and_white(*white: tuple[int, int]) -> torch.Tensor:
    """An image of -1.0 with some dots of 1.0."""
    image = torch.full((1, 1, 6, 8), -1.0)
    for row, column in white:
        image[0, 0, row, column] = 1.0
    return image


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (black_and_white(), black_and_white((0, 1), (0, 5))),  # bits 63 of two words
        (black_and_white((1, 2), (1, 3)), black_and_white((1, 4), (1, 5))),
        (black_and_white((0, 0)), black_and_white((1, 0))),
        (drawn(1, 1, 6, 8), drawn(1, 1, 6, 8).flip(2)),
        (drawn(1, 1, 6, 6), drawn(1, 1, 6, 6).mT),
        (drawn(1, 3, 6, 8), drawn(1, 3, 6, 8).flip(1)),
        (drawn(1, 1, 6, 8).to(torch.bfloat16), drawn(1, 1, 6, 8).flip(3).to(torch.bfloat16)),
        (drawn(1, 1, 5, 7), drawn(1, 1, 5, 7).flip(2)),  # rows are not of whole words
        (drawn(1, 1, 5, 7).to(torch.uint8), drawn(1, 1, 5, 7).to(torch.uint8) + (torch.arange(7) == 6)),
        (drawn(1, 1, 6, 8).to(torch.uint8), 255 - drawn(1, 1, 6, 8).to(torch.uint8)),  # all bits are the opposite
    ],
)
def test_images_that_differ_little_have_other_hashes(one: torch.Tensor, other: torch.Tensor) -> None:
    batch = rows(4, 4) | {"pixel_values": torch.cat([one, one, one, one.clone()])}
    assert equal_tokens(batch) == 19
    assert equal_tokens(batch | {"pixel_values": torch.cat([one, one, one, other])}) == 10


def test_row_sums_do_not_depend_on_how_images_lie_in_memory() -> None:
    wide = drawn(70, 3, 12)
    sums = row_sums_of({"pixel_values": wide[:, 1]})["pixel_values"]
    assert torch.equal(sums, row_sums_of({"pixel_values": wide[:, 1].clone()})["pixel_values"])
    assert len({*sums.tolist()}) == 70
    later = drawn(70 * 12 + 1)[1:].view(70, 12)
    of_later = row_sums_of({"pixel_values": later})["pixel_values"]
    assert torch.equal(of_later, row_sums_of({"pixel_values": later.clone()})["pixel_values"])


@pytest.mark.gpu
@pytest.mark.parametrize("values", [drawn(9000, 36), drawn(70, 7).to(torch.bfloat16), drawn(5, 3, 6, 7).double()])
def test_row_sums_on_a_gpu_are_those_of_the_host(values: torch.Tensor) -> None:
    of_gpu = row_sums_of({"pixel_values": values.cuda()})["pixel_values"]
    assert of_gpu.is_cuda
    assert torch.equal(of_gpu.cpu(), row_sums_of({"pixel_values": values})["pixel_values"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_features": drawn(4, 8)}, "the batch has image_features, and it is not known which tokens belong"),
        ({"pixel_values": None}, "the batch has image_grid_thw without known pixel_values"),
        ({"pixel_values": [drawn(24, 6)] * 2}, "the batch has pixel_values without known pixel_values"),
        ({"pixel_values": drawn(48)}, "the batch has pixel_values without known pixel_values"),
        ({"image_grid_thw": [[1, 2, 4]]}, "image_grid_thw is not a tensor with a row per item of pixel_values"),
        ({"image_grid_thw": torch.tensor(4)}, "image_grid_thw is not a tensor with a row per item of pixel_values"),
        ({"image_grid_thw": torch.ones(12)}, "the batch has pixel_values of 2 axes, in an unknown form"),
        ({"pixel_values": drawn(46, 6)}, "the batch has 12 tokens for 4 items of pixel_values"),
        ({"pixel_values": drawn(4, 3, 8, 8)}, "the batch has pixel_values of 4 axes, in an unknown form"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]] * 2)}, "of one item of pixel_values are in two"),
        ({"pixel_values_videos": drawn(8, 6)}, "the batch has pixel_values_videos of 2 axes, in an unknown form"),
        ({"image_sizes": torch.ones(3, 2)}, "image_sizes has 3 rows for 4 items of pixel_values"),
    ],
)
def test_documents_share_nothing_if_their_images_are_not_known(change: Batch, said: str) -> None:
    batch = {name: value for name, value in (with_grids() | change).items() if value is not None}
    if "in two" in said:
        batch["input_ids"][0, 13], batch["input_ids"][1, 14] = 7, IMAGE
    found = read(batch)
    assert said in found.unshared
    assert to_share(found, True, False, LEAST).hashes is None


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (with_sizes, {"image_sizes": torch.tensor([[8, 4], [8, 12], [8, 5], [8, 11]])}, "16 tokens for 4 items"),
        (with_tiles, {"input_ids": rows(6, 2)["input_ids"]}, "16 tokens for 6 items"),
        (with_tiles, {"pixel_values": drawn(1, 2, 3, 4, 5)}, "pixel_values of 5 axes, in an unknown form"),
    ],
)
def test_tokens_that_do_not_fit_images_share_nothing(make: Any, change: Batch, said: str) -> None:
    assert said in read(make() | change).unshared


def test_tokens_of_other_models_share_nothing() -> None:
    assert "config names no token for pixel_values" in read(with_grids(), Placeholders()).unshared
    unequal = Placeholders(image=IMAGE)  # it is not known how a tower divides its tokens
    assert "12 tokens for 4 items" in read(with_sizes() | {"input_ids": rows(2, 4)["input_ids"]}, unequal).unshared
    joined = rows(2, 4)
    joined["input_ids"][:, 2:8], joined["input_ids"][:, 10:14] = IMAGE, 7
    assert "no token stands between two items" in read(with_grids() | joined).unshared
    padded = with_grids() | {"attention_mask": torch.ones(2, 20, dtype=torch.int64)}
    padded["attention_mask"][:, 19], padded["input_ids"][0, 19] = 0, IMAGE
    assert "padding has tokens of pixel_values" in read(padded).unshared


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("form", ["positions", "kinds"])
def test_positions_and_kinds_of_images_tell_tokens_apart(axis: int, form: str) -> None:
    batch = with_grids() | {"mm_token_type_ids": (with_grids()["input_ids"] == IMAGE).long()}
    batch["position_ids"] = torch.arange(20).repeat(3, 2, 1)
    batch["cu_seq_lens_q"] = torch.tensor([0, 20, 40], dtype=torch.int32)
    assert equal_tokens(batch) == 19
    if form == "positions":
        batch["position_ids"] = batch["position_ids"].clone()
        batch["position_ids"][axis, 1, 7 + axis :] += 1
        batch["position_ids"][(axis + 1) % 3, 1, 7 + axis :] -= 1
    else:
        batch["mm_token_type_ids"][1, 7 + axis] = 2
    assert equal_tokens(batch) == 7 + axis


def test_hashes_of_a_batch_are_the_same_in_another_batch() -> None:
    """Ranks compare them."""
    batch = with_grids()
    one = {name: batch[name][: len(batch[name]) // 2] for name in batch}
    alone, both = read(one, least=15).hashes, read(batch, least=15).hashes
    assert np.array_equal([*alone, *alone], both)
