"""Images: decides which rank computes which image or frame, so that towers have even work on all ranks.

    arrived    0 | page page photo          computed    0 | page photo          an image of p patches costs p² + ap:
               1 | photo                                1 | page photo          all of them attend to each other

Towers run before the text decoder, and ranks wait for each other in between. So their work is balanced separately. An
image stays where it arrived if that rank has room. Nothing moves if a batch is even already.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca_hf.arrays import IntArray, sum_by
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
