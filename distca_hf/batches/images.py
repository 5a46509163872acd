"""Images of a batch: their sizes, which ranks exchange before towers run.

    patches    pixel_values [patches, features]    image_grid_thw [images, 3]    Qwen-VL; videos alike
    whole      pixel_values [images, C, H, W]      image_sizes [images, 2] if images are padded (Mistral 3), or none

Sizes are read and checked on the host, together with documents. Images of batches in other forms stay.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from distca_hf.arrays import IntArray
from distca_hf.batches.batch_documents import media_of, tokens_of
from distca_hf.batches.beginnings import IMAGES, VIDEOS
from distca_hf.comm.agreement import labels_of
from distca_hf.comm.grid import Scope
from distca_hf.comm.transport import Transport
from distca_hf.errors import PackingError


SIZES = "image_sizes"
# Argument of forward that takes features instead of pixels.
OUTPUTS = "mm_encoder_outputs"
# Further arguments of `get_image_features`, which its configuration has, too.
CHOICES = ("vision_feature_layer", "vision_feature_select_strategy")
KNOWN = {IMAGES.values, IMAGES.grid, SIZES, VIDEOS.values, VIDEOS.grid}
# Numbers before the sizes in a gather: count of images, and form of pixels.
HEADER = 6


class BatchImages(NamedTuple):
    """Images and videos of one rank's batch.

    Attributes:
        num_images: number of images; videos follow them.
        sizes: `[items, 3]` numbers of patches over time, height and width; for whole images 1, height and width in
            pixels.
        form: kind of pixels, number of axes, and shape of a row; zeros without pixels.
    """

    num_images: int
    sizes: IntArray
    form: tuple[int, ...] = (0,) * 5

    @property
    def numbers(self) -> IntArray:
        """All of it in a row, which ranks gather; empty without items."""
        return np.array(
            [self.num_images, *self.form, *self.sizes.flatten()] if len(self.sizes) else [], dtype=np.int64
        )

    @classmethod
    def of_numbers(cls, numbers: IntArray) -> Self:
        """Returns the images that `numbers` tell."""
        if not len(numbers):
            return cls(0, np.zeros((0, 3), dtype=np.int64))
        num_images, *form = numbers[:HEADER].tolist()
        return cls(num_images, numbers[HEADER:].reshape(-1, 3), tuple(form))


class PixelKind(enum.IntEnum):
    """What a row of pixels is."""

    PATCH = 1  # of an image with a grid
    IMAGE = 2
    PADDED_IMAGE = 3  # with a size


class PixelForm(NamedTuple):
    """Form of pixels, the same on all ranks.

    Attributes:
        kind: what a row of pixels is.
        dtype: dtype in which pixels travel.
        room: shape of a row; for whole images, the largest height and width on any rank.
    """

    kind: PixelKind
    dtype: torch.dtype
    room: tuple[int, ...]

    @property
    def has_patches(self) -> bool:
        """Whether rows of pixels are patches, not whole images."""
        return self.kind is PixelKind.PATCH


NO_IMAGES = BatchImages(0, np.zeros((0, 3), dtype=np.int64))


def images_of(batch: Mapping[str, Any], has_sizes: bool, known: Sequence[int] = ()) -> BatchImages | None:
    """Returns the images of a batch, whose ids and sizes are on the host; None if their form is unknown.

    Args:
        has_sizes: see `Placeholders`; for other towers `image_sizes` means something else.
        known: tokens that features of images and videos replace.

    Raises:
        PackingError: an image has another size than its grid, or its entry of `image_sizes`, says; or ids hold none of
            these tokens.
    """
    names = media_of(batch)
    if not names:
        return NO_IMAGES
    if not KNOWN.issuperset(names) or not all(isinstance(batch[name], torch.Tensor) for name in names):
        return None
    if SIZES in names and not has_sizes:
        return None
    if VIDEOS.values in names and IMAGES.values in names:
        pixels, of_videos = batch[IMAGES.values], batch[VIDEOS.values]
        if pixels.dtype != of_videos.dtype or pixels.shape[1:] != of_videos.shape[1:]:
            return None
    found = list[IntArray]()
    for media in (IMAGES, VIDEOS):
        has_values, has_grid = media.values in names, media.grid in names
        if not has_values:
            if has_grid or (media is IMAGES and SIZES in names):
                return None
            found.append(NO_IMAGES.sizes)
        elif has_grid and SIZES not in names and batch[media.values].ndim in (2, 4) and batch[media.grid].ndim == 2:
            found.append(_grids(batch[media.values], batch[media.grid], media.values, media.grid))
        elif media is IMAGES and batch[media.values].ndim == 4 and not has_grid:
            found.append(_whole(batch[media.values], batch[SIZES] if SIZES in names else None))
        else:
            return None
    if known and "input_ids" in batch and not torch.isin(batch["input_ids"], torch.tensor(known)).any():
        raise PackingError(
            f"the batch has {', '.join(names)} of {sum(map(len, found))} images or videos, and input_ids hold no "
            f"token that their features replace ({' or '.join(map(str, known))}). If rows were cut at a length, cut "
            "none with images (max_length=None), or leave out their images, too"
        )
    return BatchImages(len(found[0]), np.concatenate(found), _form_of(batch))


def image_tokens(batch: Mapping[str, Any], known: Sequence[int]) -> torch.Tensor:
    """Returns `[B, L]` which tokens are of images, also in padding. If ids do not tell, all tokens of a batch with
    images may be of these.

    Args:
        batch: on the host.
        known: tokens that features of images and videos replace.
    """
    if "input_ids" in batch and known:
        return torch.isin(batch["input_ids"], torch.tensor(known))
    return torch.full(tokens_of(batch).shape[:2], bool(media_of(batch)))


def runs_of(is_image: torch.Tensor) -> IntArray:
    """Returns where runs of tokens of images begin and end, in turn, among all tokens of a batch."""
    runs: IntArray = np.flatnonzero(np.diff(is_image.flatten().numpy(), prepend=False, append=False))
    return runs


def may_move(batch: Mapping[str, Any]) -> bool:
    """Returns whether other ranks may compute the images of a batch: no gradient returns to its pixels, and the caller
    gives no features, and no choice of features, which may differ on another rank."""
    pixels = (batch.get(media.values) for media in (IMAGES, VIDEOS))
    return all(batch.get(name) is None for name in (OUTPUTS, *CHOICES)) and not (
        torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in pixels)
    )


def _grids(pixels: torch.Tensor, grid: torch.Tensor, pixels_name: str, grid_name: str) -> IntArray:
    """Returns `[items, 3]` sizes of a grid, checked against the patches in pixels."""
    sizes: IntArray = grid.numpy().astype(np.int64)
    ends, patches = sizes.prod(axis=1).cumsum(), len(pixels)
    if ends[-1] != patches:
        image = min(int(np.searchsorted(ends, patches, side="right")), len(ends) - 1)
        first = int(ends[image - 1]) if image else 0
        raise PackingError(
            f"{grid_name} says that item {image} of {len(sizes)} is {' x '.join(map(str, sizes[image]))} = "
            f"{int(ends[image]) - first} patches, and {pixels_name} has {patches - first} for it: {patches} patches "
            f"in all, not {int(ends[-1])}. Give both as one processor made them"
        )
    return sizes


def _whole(pixels: torch.Tensor, sizes: torch.Tensor | None) -> IntArray:
    """Returns `[images, 3]` sizes of whole images, 1, height and width; those given are checked against pixels."""
    count, _, *room = pixels.shape
    numbers = np.tile(room, (count, 1)) if sizes is None else sizes.numpy().astype(np.int64)
    if numbers.shape != (count, 2):
        raise PackingError(
            f"{SIZES} is of shape {[*numbers.shape]}, and {IMAGES.values} holds {count} images; give "
            f"[{count}, 2] heights and widths"
        )
    if len(large := np.flatnonzero((numbers > room).any(axis=1) | (numbers < 1).any(axis=1))):
        raise PackingError(
            f"{SIZES} says that image {large[0]} of {count} is {' x '.join(map(str, numbers[large[0]]))} pixels, and "
            f"{IMAGES.values} holds {' x '.join(map(str, room))}. Give both as one processor made them"
        )
    return np.column_stack([np.ones(count, dtype=np.int64), numbers])


def pixel_form(images: Sequence[BatchImages], dtype: torch.dtype, labels: Sequence[str], where: str) -> PixelForm:
    """Returns the form of the pixels of all ranks.

    Args:
        images: images of each rank.
        dtype: dtype in which pixels travel.
        labels: names of the ranks.
        where: names rank and pass in messages.

    Raises:
        PackingError: ranks hold pixels of different shapes, because their processors differ.
    """
    holding = [rank for rank, of in enumerate(images) if len(of.sizes)]
    forms = np.array([images[rank].form for rank in holding])
    kind, axes = forms[0, :2].tolist()
    same = ["kind of rows", "number of axes", "numbers of a patch, or channels"]
    if kind == PixelKind.PATCH:
        same += ["height of a patch", "width of a patch"]
    for at, name in enumerate(same):
        if len(others := np.flatnonzero(forms[:, at] != forms[0, at])):
            of_ranks = [(int(forms[which, at]), labels[holding[which]]) for which in (0, others[0])]
            meanings = {"kind of rows": (None, *(of.name.lower() for of in PixelKind))}.get(name)
            shown_as = (f"{x if meanings is None else meanings[x]} on rank {label}" for x, label in of_ranks)
            raise PackingError(
                f"{where}: {name} of pixels is {' and '.join(shown_as)}; nothing was sent. Use "
                "one processor, with the same settings, on all ranks"
            )
    return PixelForm(PixelKind(kind), dtype, tuple(forms[:, 2 : 1 + axes].max(axis=0).tolist()))


def _form_of(batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns kind, number of axes and shape of pixels; zeros without pixels."""
    for media in (IMAGES, VIDEOS):
        pixels = batch.get(media.values)
        if pixels is not None and pixels.numel():
            is_padded = batch.get(SIZES) is not None
            whole = PixelKind.PADDED_IMAGE if is_padded else PixelKind.IMAGE
            kind = whole if batch.get(media.grid) is None else PixelKind.PATCH
            return kind, pixels.ndim, *pixels.shape[1:], *[0] * (4 - pixels.ndim)
    return NO_IMAGES.form


def check_all_hold(transport: Transport, flags: Sequence[int], number: int) -> None:
    """Checks that all ranks hold images, or none.

    Raises:
        PackingError: some do not; ranks with images would wait for them.
    """
    if len(set(flags)) == 1:
        return
    labels = labels_of(transport, Scope.ROWS)
    holding, without = (
        ", ".join(label for label, flag in zip(labels, flags, strict=True) if flag == which) for which in (1, 0)
    )
    raise PackingError(
        f"{transport.grid.name}, micro-batch {number}: rank {holding} holds images, videos or "
        f"sound, and rank {without} none. Ranks with images would wait for the others for ever: for weights "
        "of towers that are sharded, or for gradients of towers that train. Give every rank an image in every "
        "micro-batch (a blank one, say); or freeze the towers, leave them out of sharding (ignored parameters "
        "of FSDP), and with DDP set find_unused_parameters=True"
    )
