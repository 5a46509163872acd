"""Image plans: which rank computes which images, and which rows of pixels and features one rank sends. Only sizes
decide.

    arrived    0 | page page photo          computed    0 | page photo          an image of p patches costs p² + ap:
               1 | photo                                1 | page photo          all of them attend to each other

Towers run before the text decoder, and ranks wait for each other in between. So their work is balanced separately. An
image stays where it arrived if that rank has room. Nothing moves if a batch is even already.

    rank 0   batch [i0 i1]  ── pixels ──▶  computes [i0 i2]  ── features ──▶  [i0 i1]
    rank 1   batch [i2]                    computes [i1]                      [i2]

Units are images, or frames of videos. The order of a batch is its images, then the frames of its videos. Ranks compute
units in the order in which they arrive: by rank, then in that rank's order. So features leave in the order in which
they were computed.

Safe in a thread: batches that are read ahead have their plan before their pass begins.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from distca_hf.arrays import NO_INTEGERS, IntArray, offsets, ranges, sum_by
from distca_hf.batches.images import BatchImages, PixelKind
from distca_hf.cost import imbalance
from distca_hf.placement.given import EVEN


# Room for images that stay, as a multiple of even work. Tried in this order, until the busiest rank has hardly more
# work than if images stayed only by chance.
STAYING, HARDLY_MORE = (1.005, 1.0), 1.01


@dataclass(frozen=True)
class ImageCost:
    """Work of a tower: operations of its attention and matrices.

    Attributes:
        pair: operations of a pair of patches that attend to each other, in all layers that attend to whole images.
        patch: operations of a patch in everything else.
    """

    pair: int = 0
    patch: int = 1

    def work_of(self, patches: IntArray) -> IntArray:
        """Returns the work of images, or frames, of so many patches."""
        work: IntArray = patches * (self.pair * patches + self.patch)
        return work


class PlacedImages(NamedTuple):
    """The ranks that compute images.

    Attributes:
        rank_of: `[images]` rank that computes each image.
        dummies: `[ranks]` image that a rank computes for nobody, so that its tower runs, too; or -1.
    """

    rank_of: IntArray
    dummies: IntArray


def are_even(loads: IntArray) -> bool:
    """Returns whether ranks with this work keep their images."""
    return bool(loads.max(initial=0) <= EVEN * loads.mean())


def place_images(work: IntArray, home: IntArray, num_ranks: int, every_rank: bool = False) -> PlacedImages:
    """Returns where images are computed.

    Args:
        work: `[images]` work of each image.
        home: `[images]` rank whose batch holds it.
        num_ranks: ranks that share the images.
        every_rank: whether every rank must compute an image, if there is any.
    """
    rank_of = _placed(work, home, num_ranks)
    dummies = np.full(num_ranks, -1)
    if every_rank and len(work):
        dummies[np.bincount(rank_of, minlength=num_ranks) == 0] = int(work.argmin())
    return PlacedImages(rank_of, dummies)


def _placed(work: IntArray, home: IntArray, num_ranks: int) -> IntArray:
    """Returns the rank of each image: the largest first, on their home if it has room, else on the least busy rank."""
    loads = sum_by(home, work, num_ranks)
    if are_even(loads):
        return home
    least, best = max(loads.mean(), work.max()), None
    for staying in STAYING:
        dealt = _dealt(work, home, num_ranks, staying * least)
        busiest = sum_by(dealt, work, num_ranks).max()
        if busiest <= HARDLY_MORE * least:  # some rank has as much in any case
            return dealt
        best = _dealt(work, home, num_ranks, 0.0) if best is None else best
        if busiest <= HARDLY_MORE * sum_by(best, work, num_ranks).max():
            return dealt
    assert best is not None
    return best


def _dealt(work: IntArray, home: IntArray, num_ranks: int, room: float) -> IntArray:
    """Deals images, the largest first. An image stays home if its rank then has at most `room` work."""
    loads, of_images, rank_of = [0] * num_ranks, work.tolist(), home.tolist()
    least_busy = [(0, rank) for rank in range(num_ranks)]  # a heap, whose entries may be out of date
    for image in np.argsort(-work, kind="stable").tolist():
        size, rank = of_images[image], rank_of[image]
        if loads[rank] + size > room:
            while least_busy[0][0] != loads[rank := least_busy[0][1]]:
                heapq.heapreplace(least_busy, (loads[rank], rank))
            rank_of[image] = rank
        loads[rank] += size
    return np.array(rank_of, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ImageMoves:
    """Moves of one rank.

    Attributes:
        sent: numbers, within its batch, of the units that it sends, by destination.
        sent_to: `[sent]` their destinations.
        computed: numbers, among units of all ranks, of those that it computes, in order. A dummy is the only one.
        computed_of: `[computed]` the ranks whose batches hold them.
        is_dummy: whether it computes a unit whose features nobody needs.
        computed_on: `[units of the batch]` the rank that computes each unit.
        of_ranks: `[ranks]` number of units that each rank computes, with dummies.
    """

    sent: IntArray
    sent_to: IntArray
    computed: IntArray
    computed_of: IntArray
    is_dummy: bool
    computed_on: IntArray
    of_ranks: IntArray

    @classmethod
    def of(cls, rank_of: IntArray, dummies: IntArray, held: IntArray, rank: int) -> Self:
        """Returns the moves of a rank.

        Args:
            rank_of, dummies: where units of all ranks are computed (`PlacedImages`); they are numbered by rank, in the
                order of batches.
            held: `[units]` rank whose batch holds each.
        """
        with_dummy = np.flatnonzero(dummies >= 0)
        unit = np.concatenate([np.arange(len(held)), dummies[with_dummy]])
        target = np.concatenate([rank_of, with_dummy])
        leaves = np.flatnonzero(held[unit] == rank)
        leaves = leaves[np.lexsort((unit[leaves], target[leaves]))]
        comes = np.sort(unit[target == rank])  # by home rank, because units are numbered by rank
        first = int(np.searchsorted(held, rank))
        return cls(
            sent=unit[leaves] - first,
            sent_to=target[leaves],
            computed=comes,
            computed_of=held[comes],
            is_dummy=bool(dummies[rank] >= 0),
            computed_on=rank_of[held == rank],
            of_ranks=np.bincount(target, minlength=len(dummies)),
        )

    def pixel_rows(self, rows: IntArray, all_rows: IntArray) -> tuple[IntArray, list[int], list[int]]:
        """Returns rows of the batch's pixels in the order in which they leave, and numbers of rows to and from each
        rank.

        Args:
            rows: `[units of the batch]` number of rows of each unit.
            all_rows: `[units]` the same for all ranks.
        """
        sent = sum_by(self.sent_to, rows[self.sent], len(self.of_ranks))
        return _rows_of(self.sent, rows), sent.tolist(), self._computed_rows(all_rows)

    def feature_rows(self, rows: IntArray, all_rows: IntArray) -> tuple[IntArray, list[int], list[int]]:
        """Returns the places of features, in the order in which they come home, and numbers of rows to and from each
        rank.

        Args:
            rows: `[units of the batch]` number of features of each unit.
            all_rows: `[units]` the same for all ranks.
        """
        num_ranks = len(self.of_ranks)
        places = _rows_of(np.argsort(self.computed_on, kind="stable"), rows)
        sent = [0] * num_ranks if self.is_dummy else self._computed_rows(all_rows)
        return places, sent, sum_by(self.computed_on, rows, num_ranks).tolist()

    def _computed_rows(self, all_rows: IntArray) -> list[int]:
        """Returns the number of rows of the units that this rank computes, by the rank that holds them."""
        return sum_by(self.computed_of, all_rows[self.computed], len(self.of_ranks)).tolist()


def _rows_of(units: IntArray, rows: IntArray) -> IntArray:
    """Returns the rows of some units of a batch, one unit after the other."""
    return ranges(offsets(rows)[:-1][units], rows[units])


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
