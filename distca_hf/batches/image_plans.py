"""Image plans: which rank computes which images of a batch, and which pixels one rank sends. Only sizes decide.

Safe in a thread: batches that are read ahead have their plan before their pass begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distca_hf.arrays import NO_INTEGERS, IntArray, sum_by
from distca_hf.batches.images import BatchImages, PixelKind
from distca_hf.cost import imbalance
from distca_hf.placement.images import ImageCost, place_images
from distca_hf.planning.image_moves import ImageMoves


class Units(NamedTuple):
    """Images, or frames of videos, of all ranks.

    Attributes:
        sizes: `[units, 3]` as in `BatchImages`.
        held: `[units]` rank whose batch holds each unit.
        rows: `[units]` number of rows of pixels.
        of_items: `[images and videos of this rank]` number of units of each.
    """

    sizes: IntArray
    held: IntArray
    rows: IntArray
    of_items: IntArray

    @classmethod
    def of(cls, images: Sequence[BatchImages], has_patches: bool, has_frames: bool, rank: int) -> "Units":
        """Returns the units of all ranks' images.

        Args:
            images: images of each rank.
            has_patches: whether rows of pixels are patches, not whole images.
            has_frames: see `ImagePlanner`.
            rank: this rank.
        """
        sizes, counts = np.concatenate([of.sizes for of in images]), np.array([len(of.sizes) for of in images])
        held, parts = np.repeat(np.arange(len(images)), counts), np.ones(len(sizes), dtype=np.int64)
        if has_frames:
            parts = sizes[:, 0]
            sizes = sizes.copy()
            sizes[:, 0] = 1
        of_units = np.repeat(sizes, parts, axis=0)
        rows = of_units.prod(axis=1) if has_patches else np.ones(len(of_units), dtype=np.int64)
        return cls(of_units, np.repeat(held, parts), rows, parts[held == rank])


class ShownImages(NamedTuple):
    """What ranks know of images before a pass.

    Attributes:
        plan: waits for images of all ranks, and returns their plan. A collective call.
        dtype: dtype of pixels.
        train: whether towers, or what follows them, need gradients on some rank.
        even: largest over mean work of ranks' towers if all images stay because it is small: then nobody needs the
            plan. None otherwise.
    """

    plan: Callable[[], "ImagePlan"]
    dtype: torch.dtype
    train: bool
    even: float | None


class ImagePlan(NamedTuple):
    """Where the images of a batch are computed, and what this rank sends.

    Attributes:
        images: images of each rank.
        every_rank: whether every rank computes an image.
        units: what ranks compute.
        stay: why units stay, whatever their work; empty if they may move.
        imbalance: largest over mean work of ranks' towers, where images arrived and as planned.
        rank_of: `[units]` rank that computes each.
        moves: moves of this rank; None if all units stay.
        pixels: rows of this rank's pixels in the order in which they leave, and numbers of rows to and from each rank.
    """

    images: Sequence[BatchImages]
    every_rank: bool
    units: Units
    stay: str = ""
    imbalance: tuple[float, float] = (1.0, 1.0)
    rank_of: IntArray = NO_INTEGERS
    moves: ImageMoves | None = None
    pixels: tuple[IntArray, list[int], list[int]] = NO_INTEGERS, [], []


@dataclass(frozen=True)
class ImagePlanner:
    """Plans images of a model's batches.

    Attributes:
        cost: work of an image.
        side: side of a patch in pixels, for towers that take whole images.
        has_frames: whether each frame of a video is computed like an image.
        rank: this rank, among those that hold rows.
    """

    cost: ImageCost
    side: int
    has_frames: bool
    rank: int

    def total_work(self, images: BatchImages | None) -> int:
        """Returns the work of a rank's images; 0 if their form is unknown."""
        if images is None or not len(images.sizes):
            return 0
        has_patches = images.form[0] == PixelKind.PATCH
        return int(self._work_of(Units.of([images], has_patches, self.has_frames, 0), has_patches).sum())

    def _work_of(self, units: Units, has_patches: bool) -> IntArray:
        """Returns the work of each unit."""
        patches = units.sizes.prod(axis=1) // (1 if has_patches else self.side) ** 2
        return self.cost.work_of(np.maximum(patches, 1))

    def plan(self, images: Sequence[BatchImages], every_rank: bool) -> ImagePlan:
        """Returns the plan of a batch that holds images on some rank.

        Args:
            images: images of each rank.
            every_rank: whether every rank must compute an image.
        """
        forms, num_ranks = [of.form for of in images if len(of.sizes)], len(images)
        has_patches = forms[0][0] == PixelKind.PATCH
        plan = ImagePlan(images, every_rank, Units.of(images, has_patches, self.has_frames, self.rank))
        units = plan.units
        if forms[0][0] == PixelKind.IMAGE and len({*forms}) > 1:
            stay = "images have different heights or widths on ranks, and a batch does not give their sizes"
            return plan._replace(stay=stay)
        if not self.has_frames and any(of.num_images != len(of.sizes) for of in images):
            return plan._replace(stay="it has videos whose frames are not computed like images")
        work = self._work_of(units, has_patches)
        placed = place_images(work, units.held, num_ranks, every_rank)
        before, after = (imbalance(sum_by(of, work, num_ranks)) for of in (units.held, placed.rank_of))
        plan = plan._replace(imbalance=(before, after))
        if (placed.rank_of == units.held).all() and (placed.dummies < 0).all():
            return plan
        moves = ImageMoves.of(placed.rank_of, placed.dummies, units.held, self.rank)
        pixels = moves.pixel_rows(units.rows[units.held == self.rank], units.rows)
        return plan._replace(rank_of=placed.rank_of, moves=moves, pixels=pixels)
