"""Beginnings of documents: hashes, from which ranks know which documents begin alike.

A hash is of everything that layers compute from: tokens, their positions and kinds, images and videos.

    tokens    a  a  I  I  I  I  b  |  a  I  I  c  I  I        two documents
    images          ─────0────           ─1──     ─2──        features take the places of I, in the order of the batch

The hash of an image is added to the number of its first token. So documents share a prefix with images only if all
numbers of these images are equal.

Known forms of a batch say how many tokens an image has:

- patches with a grid `[time, height, width]`: the number of patches, divided by a number;
- images or tiles of one size: equally many for all;
- images padded to one size, with their own sizes: the area, divided by a square whose side divides all sizes.

If a batch has another form, or an image in two documents, its documents share nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch

from distca_hf.arrays import IntArray, offsets, ranges
from distca_hf.batches.batch_documents import Batch, media_of, shifted_labels
from distca_hf.data.documents import IGNORED_LABEL
from distca_hf.prefixes import hashes_of, random_factors


class Media(NamedTuple):
    """Names of a batch's entries for images, or for videos.

    Attributes:
        values: floating-point pixels.
        grid: `[items, 3]` numbers of patches over time, height and width.
        others: further entries with a row for each item.
    """

    values: str
    grid: str
    others: tuple[str, ...]


IMAGES = Media("pixel_values", "image_grid_thw", ("image_sizes",))
VIDEOS = Media("pixel_values_videos", "video_grid_thw", ("second_per_grid_ts",))
VALUES = (IMAGES.values, VIDEOS.values)
# Powers of `ODD_FACTOR` are factors in the number of a token: the first ones belong to positions, power `OF_KINDS` to
# the kind (text, image or video). It is odd, so that no bit of a position is lost.
ODD_FACTOR, OF_KINDS = 0x4F1BBCDCBFA53E0B, 10
# Entries of a batch that are read for the hashes of its media.
OF_ITEMS = (IMAGES.grid, *IMAGES.others, VIDEOS.grid, *VIDEOS.others)
# Seeds of factors: of the numbers in a row, of what describes an item, of the rows in the first channel.
IN_ROW, DESCRIBED, OF_ROWS = 46, 47, 48
# Rows that are hashed at once: few enough for a processor's cache.
ROWS = 64


class _UnknownMediaError(Exception):
    """Says why it is not known which tokens belong to an image."""


@dataclass(frozen=True)
class Placeholders:
    """Tokens whose embeddings are replaced by features.

    Attributes:
        image, video: the token; None if the model has no such token.
        has_sizes: whether the tower crops images to their own size.
    """

    image: int | None = None
    video: int | None = None
    has_sizes: bool = False

    @property
    def known(self) -> list[int]:
        """The tokens that the model has."""
        return [token for token in (self.image, self.video) if token is not None]


class Beginnings(NamedTuple):
    """What ranks know of the beginnings of documents.

    Attributes:
        hashes: of all documents (`prefixes.hashes_of`); None if the batch was not hashed.
        unlearnt: `[documents]` number of first tokens that predict no label to learn; None without labels.
        unshared: why images keep documents from sharing prefixes; empty if they may share.
    """

    hashes: IntArray | None = None
    unlearnt: IntArray | None = None
    unshared: str = ""


NO_BEGINNINGS = Beginnings()


def beginnings_of(
    batch: Batch,
    sums: Mapping[str, torch.Tensor],
    pack: Callable[[torch.Tensor], torch.Tensor],
    lengths: IntArray,
    least_tokens: int,
    placeholders: Placeholders,
) -> Beginnings:
    """Returns the beginnings of the documents of a batch with `input_ids`.

    Args:
        batch: on the host, except values of images and videos.
        sums: what `row_sums_of` returned, on the host.
        pack: picks the tokens of documents from a column `[B, L]`.
        lengths: `[documents]` tokens of each document.
        least_tokens: shortest prefix that documents share.
        placeholders: tokens of the model that features of images and videos replace.
    """
    tokens, positions, kinds = (batch.get(name) for name in ("input_ids", "position_ids", "mm_token_type_ids"))
    assert isinstance(tokens, torch.Tensor)

    def numbers_of(column: torch.Tensor) -> IntArray:
        numbers: IntArray = pack(column.expand(tokens.shape)).flatten().to(torch.int64).numpy()
        return numbers

    ids, unlearnt, unshared = numbers_of(tokens), None, ""
    numbers = ids if kinds is None else ids + numbers_of(kinds) * _factor(OF_KINDS)
    axes = () if positions is None else positions[None] if positions.ndim == 2 else positions
    for axis, of_axis in enumerate(axes):  # positions of a document may not begin at 0
        numbers = numbers + (numbers_of(of_axis) - ranges(0, lengths)) * _factor(axis + 1)
    if media_of(batch):
        try:
            numbers = numbers + _media_numbers(batch, sums, ids, lengths, placeholders)
        except _UnknownMediaError as error:
            unshared = str(error)
    labels = shifted_labels(batch)
    if labels is not None and labels.shape == tokens.shape:
        first = offsets(lengths)
        learnt = np.append(np.flatnonzero(numbers_of(labels) != IGNORED_LABEL), len(numbers))
        unlearnt = np.minimum(learnt[np.searchsorted(learnt, first[:-1])], first[1:]) - first[:-1]
    return Beginnings(hashes_of(numbers, lengths, least_tokens), unlearnt, unshared)


@cache
def _factor(power: int) -> np.int64:
    return np.uint64(pow(ODD_FACTOR, power, 2**64)).astype(np.int64)


def row_sums_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns a hash of each row of images and videos, int64 `[rows]`, on their device. Does not wait."""
    found = {name: batch[name] for name in media_of(batch) if name in VALUES}
    rows = {name: values for name, values in found.items() if isinstance(values, torch.Tensor) and values.ndim > 1}
    return {name: _row_sums(values) for name, values in rows.items()}


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    rows = values.detach().contiguous().flatten(0, -2)
    width = rows.shape[1] * rows.element_size()
    # Rows are hashed as the widest integers into which they divide.
    dtype = next(one for one in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % one.itemsize == 0)
    if int(rows.storage_offset()) * rows.element_size() % dtype.itemsize:
        rows = rows.clone()
    numbers = rows.view(dtype)
    if values.device.type != "cpu":
        factors = torch.from_numpy(random_factors(numbers.shape[1], IN_ROW)).to(values.device, non_blocking=True)
        return torch.cat([_sums(part.to(torch.int64), factors) for part in numbers.split(64 * ROWS)])
    of_host, factors_of_host = numbers.numpy(), random_factors(numbers.shape[1], IN_ROW)
    parts = (of_host[first : first + ROWS].astype(np.int64, copy=False) for first in range(0, len(rows), ROWS))
    return torch.from_numpy(np.concatenate([_sums(part, factors_of_host) for part in parts]))


def _sums(numbers: Any, factors: Any) -> Any:
    """Returns the sum of each row of int64 numbers x random factors, modulo 2 ** 64; arrays or tensors."""
    # Numbers may differ only in their highest bits, as 1.0 and -1.0 do, and so would products. So these bits are added
    # to lower ones. An exclusive or would not tell an image in bytes from its negative.
    folded = numbers + (numbers >> 32)
    folded += folded >> 23
    folded *= factors
    return folded.sum(1)


def _media_numbers(
    batch: Batch, sums: Mapping[str, torch.Tensor], tokens: IntArray, lengths: IntArray, placeholders: Placeholders
) -> IntArray:
    """Returns int64 `[tokens]`: the hash of an image or video at its first token, 0 at all other tokens.

    Args:
        tokens: `[tokens]` of all documents, without padding.
        lengths: `[documents]` tokens of each document.

    Raises:
        _UnknownMediaError: it is not known which tokens belong to an image.
    """
    unknown = [name for name in media_of(batch) if name not in (*VALUES, *OF_ITEMS)]
    if unknown:
        raise _UnknownMediaError(f"the batch has {unknown[0]}, and it is not known which tokens belong to it")
    numbers, borders = np.zeros_like(tokens), offsets(lengths)
    for media, token in ((IMAGES, placeholders.image), (VIDEOS, placeholders.video)):
        given = [name for name in (media.values, media.grid, *media.others) if batch.get(name) is not None]
        columns = {name: batch[name] for name in given if not _is_empty(batch[name])}
        if not columns:
            continue
        if media.values not in sums:
            raise _UnknownMediaError(f"the batch has {next(iter(columns))} without known {media.values}")
        if wrong := [
            name for name, column in columns.items() if not isinstance(column, torch.Tensor) or not column.ndim
        ]:
            raise _UnknownMediaError(f"{wrong[0]} is not a tensor with a row per item of {media.values}")
        if token is None:
            raise _UnknownMediaError(f"the model's config names no token for {media.values}")
        if int((batch["input_ids"] == token).sum()) != len(places := np.flatnonzero(tokens == token)):
            raise _UnknownMediaError(f"padding has tokens of {media.values}")
        item_tokens, hashes = _items(columns, media, sums[media.values].numpy(), len(places), placeholders.has_sizes)
        first, stop = offsets(item_tokens)[:-1], offsets(item_tokens)[1:]
        documents = [np.searchsorted(borders, places[at], side="right") for at in (first, stop - 1)]
        if (documents[0] != documents[1]).any():
            raise _UnknownMediaError(f"tokens of one item of {media.values} are in two documents")
        before = np.maximum(places[first] - 1, 0)
        if media.grid in columns and (tokens[before[1:]] == token).any():
            raise _UnknownMediaError(f"no token stands between two items of {media.values}")
        numbers[places[first]] += hashes
    return numbers


def _items(
    given: Mapping[str, torch.Tensor], media: Media, sums: IntArray, num_tokens: int, has_sizes: bool
) -> tuple[IntArray, IntArray]:
    """Returns tokens and hash of each image or video, both int64 `[items]`.

    Args:
        given: entries of the batch with these media.
        sums: int64 `[rows]` hashes of rows of values.
        num_tokens: tokens of all items together.
        has_sizes: see `Placeholders`.

    Raises:
        _UnknownMediaError: it is not known which tokens belong to an image.
    """
    values = given[media.values]
    columns = {name: as_int64(column).numpy() for name, column in given.items() if name != media.values}
    sizes, shape, channels = columns.get("image_sizes"), values.shape[1:], values.shape[1] if values.ndim == 4 else 1
    if (grid := columns.get(media.grid)) is not None and grid.ndim == values.ndim == 2:
        amounts = rows = grid.prod(axis=1)
        patches = int(amounts.sum())
        fits = num_tokens > 0 and patches % num_tokens == 0 and patches == len(values)
        per_token = patches // num_tokens if fits else 0
    elif media is IMAGES and values.ndim == 4 and grid is None:
        rows = np.full(len(values), channels * values.shape[2])
        if sizes is not None and has_sizes and sizes.shape == (len(values), 2):
            amounts, shape = sizes.prod(axis=1), torch.Size()  # zeros around an image add nothing to its hash
            side = isqrt(int(amounts.sum()) // max(num_tokens, 1))
            per_token = side**2
            fits = side > 0 and per_token * num_tokens == amounts.sum() and not (sizes % side).any()
        else:
            amounts, per_token = np.full(len(values), num_tokens), len(values)
            fits = sizes is None or (sizes == sizes[:1]).all()
    else:
        raise _UnknownMediaError(f"the batch has {media.values} of {values.ndim} axes, in an unknown form")
    if not fits or (amounts % per_token).any() or not amounts.all():
        raise _UnknownMediaError(f"the batch has {num_tokens} tokens for {len(rows)} items of {media.values}")
    wrong = next((name for name, column in columns.items() if len(column) != len(rows)), None)
    if wrong is not None:
        raise _UnknownMediaError(f"{wrong} has {len(columns[wrong])} rows for {len(rows)} items of {media.values}")
    factors = [random_factors(count // channels, OF_ROWS + at) for count in rows.tolist() for at in range(channels)]
    of_rows = np.add.reduceat((sums ^ (sums >> 32)) * np.concatenate(factors), offsets(rows)[:-1])
    described_by = [np.full((len(rows), 5), (media is IMAGES, len(shape), *shape, *[0] * (3 - len(shape))))]
    description = np.column_stack([*described_by, *(column.reshape(len(rows), -1) for column in columns.values())])
    return amounts // per_token, of_rows + _sums(description, random_factors(description.shape[1], DESCRIBED))


def _is_empty(values: Any) -> bool:
    return values.numel() == 0 if isinstance(values, torch.Tensor) else values in ([], ())


def as_int64(column: torch.Tensor) -> torch.Tensor:
    """Returns a column as int64, floating-point numbers by their bits."""
    return column.double().view(torch.int64) if column.is_floating_point() else column.to(torch.int64)
