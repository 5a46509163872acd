"""Images are planned from their sizes, ahead of their pass if their batch is known."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from distca_hf.batches.beginnings import Placeholders
from distca_hf.batches.given import GivenPlanner
from distca_hf.batches.image_plans import ImageCost, ImagePlan, ImagePlanner
from distca_hf.batches.images import NO_IMAGES, BatchImages, PixelKind, pixel_form
from distca_hf.batches.read_documents import ENTRY, DocumentReader, ReadDocuments, Reading, reading_of, take_reading
from distca_hf.comm.agreement import Facts
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError, PlanMismatchError
from distca_hf.kernels.interface import CallTensors
from distca_hf.runtime.live_plan import LivePlan
from distca_hf.testing import LoopbackTransport, run_ranks


IMAGE = 7
READER = DocumentReader(packs_rows=True, with_images=True, placeholders=Placeholders(IMAGE), moves_images=True)
# Sides of the images of both ranks in three batches.
SIDES: list[list[tuple[int, ...]]] = [[(4, 4), (), (4,)], [(), (4, 2, 2), ()]]
CPU, COST = torch.device("cpu"), ImageCost(pair=0, patch=1)
PATCHES = (PixelKind.PATCH, 2, 6, 0, 0)


def of(*sizes: list[int], num_images: int | None = None, form: tuple[int, ...] = PATCHES) -> BatchImages:
    return BatchImages(len(sizes) if num_images is None else num_images, np.array(sizes), form)


def batch_of(*sides: int) -> dict[str, Any]:
    """A batch with one row for each image, whose sides are so many patches, and a token of text."""
    ids = [torch.tensor([*[IMAGE] * side**2, 1]) for side in sides] or [torch.tensor([1, 2])]
    batch = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(len(one)) for one in ids])[None],
    }
    if not sides:
        return batch
    grid = torch.tensor([[1, side, side] for side in sides])
    return batch | {"pixel_values": torch.ones(int(grid.prod(1).sum()), 6), "image_grid_thw": grid}


def test_plans_of_two_ranks_fit_together() -> None:
    images = [of([1, 4, 4], [1, 4, 4], [1, 2, 2]), of([1, 2, 2])]
    plans = [ImagePlanner(COST, 1, False, rank).plan(images, False) for rank in (0, 1)]

    for plan in plans:
        assert plan.imbalance == (pytest.approx(36 / 20), 1.0)
        assert plan.rank_of.tolist() == [0, 1, 0, 1]
    (leaving, sent, received), (others, other_sent, other_received) = (plan.pixels for plan in plans)
    assert leaving.tolist() == [*range(16), *range(32, 36), *range(16, 32)]
    assert (sent, received) == ([20, 16], [20, 0])
    assert (others.tolist(), other_sent, other_received) == ([0, 1, 2, 3], [0, 4], [16, 4])


@pytest.mark.parametrize(
    ("images", "stay"),
    [
        ([of([1, 4, 4]), of([1, 4, 4])], ""),
        ([of([2, 4, 4], num_images=0), NO_IMAGES], "videos whose frames"),
        (
            [
                of([1, 64, 64], form=(PixelKind.IMAGE, 4, 3, 64, 64)),
                of([1, 64, 32], form=(PixelKind.IMAGE, 4, 3, 64, 32)),
            ],
            "different heights or widths",
        ),
    ],
    ids=["even", "videos", "sizes"],
)
def test_images_stay_if_they_are_even_or_must(images: list[BatchImages], stay: str) -> None:
    plan = ImagePlanner(COST, 16, False, 0).plan(images, False)

    assert plan.moves is None
    assert stay in plan.stay
    assert bool(stay) == bool(plan.stay)


def test_pixels_of_another_form_are_named() -> None:
    labels = ["0", "1", "2"]
    form = pixel_form([NO_IMAGES, of([1, 2, 2]), of([1, 4, 4])], torch.bfloat16, labels, "rank 0, here")
    assert (form.kind, form.dtype, form.room) == (PixelKind.PATCH, torch.bfloat16, (6,))
    other = of([1, 4, 4], form=(PixelKind.PATCH, 4, 6, 2, 2))
    with pytest.raises(PackingError, match=r"here: number of axes of pixels is 2 on rank 1 and 4 on rank 2; nothing"):
        pixel_form([NO_IMAGES, of([1, 2, 2]), other], torch.float32, labels, "rank 0, here")


def attend(live: LivePlan | None) -> None:
    """Does what a model's first layer does before it attends: ranks show each other what they know."""
    assert live is not None
    live.begin_forward_pass(1, {})
    live.forward_pass.agree_to_attend(live.fingerprint, CallTensors((torch.float32,) * 3, (torch.Size((1, 8)),) * 3))


def planner_of(transport: LoopbackTransport) -> GivenPlanner:
    def read(batch: dict[str, Any]) -> ReadDocuments:
        return ((reading := reading_of(batch)) and reading.documents) or READER.read(batch)

    images = ImagePlanner(COST, 1, False, transport.rank)
    return GivenPlanner(DistCAConfig(), transport, read=read, places_rows=True, image_planner=images)


def test_images_of_batches_that_are_read_ahead_have_their_plan_before_the_pass() -> None:
    """Nothing is gathered for them in the pass. Another plan is made if towers wait for each other only since then."""

    def run(transport: LoopbackTransport) -> tuple[list[list[int]], int, list[bool]]:
        planner, plans = planner_of(transport), list[ImagePlan]()
        batches = [batch_of(*sides) for sides in SIDES[transport.rank]]
        for batch in batches:
            batch[ENTRY] = Reading(READER, batch)
        readings = [take_reading(batch) for batch in batches]
        planner.begin_step(readings[1:], 2, CPU)
        gathers, usual = list[str](), transport.gather
        transport.gather = lambda values, where, *more: (gathers.append(where), usual(values, where, *more))[1]  # type: ignore[method-assign]
        for number, batch in enumerate(batches):
            live = planner.plan(batch, images_wait=number == 2)
            assert planner.images is not None
            assert planner.images.dtype == torch.float32
            plans.append(planner.images.plan())
            attend(live)
            planner.end_pass()
        return [plan.rank_of.tolist() for plan in plans], len(gathers), [plan.every_rank for plan in plans]

    first, second = run_ranks(2, run)
    assert first == second
    # Two agreements for each of three batches, sizes and lengths of the first one, and of both others.
    assert first == ([[0, 1], [1, 0, 0], [0]], 8, [False, False, True])


def test_even_images_of_one_form_stay_without_their_plan() -> None:
    """Their sizes are not gathered, so nothing waits for the plan."""

    def run(transport: LoopbackTransport, sides: list[tuple[int, ...]]) -> tuple[float | None, list[int]]:
        gathered, usual = list[int](), transport.gather
        transport.gather = lambda values, *more: (gathered.append(len(values)), usual(values, *more))[1]  # type: ignore[method-assign]
        planner = planner_of(transport)
        attend(planner.plan(batch_of(*sides[transport.rank])))
        assert planner.images is not None
        return planner.images.even, gathered

    [(even, few), _] = run_ranks(2, partial(run, sides=[(4, 4), (4, 4)]))
    [(uneven, more), _] = run_ranks(2, partial(run, sides=[(4, 4), (4, 2)]))
    assert (even, uneven) == (1.0, None)
    assert sum(few) < sum(more)


def test_arguments_of_towers_are_compared_only_if_images_may_move() -> None:
    def run(transport: LoopbackTransport, has_images: bool) -> None:
        batch = batch_of(*(2,) * (has_images and transport.rank))
        planner_of(transport).plan(batch, towers=Facts({"argument zoom of towers": transport.rank}))

    run_ranks(2, partial(run, has_images=False))
    with pytest.raises(PlanMismatchError, match="argument zoom of towers is 0 on rank 0, 1 on rank 1"):
        run_ranks(2, partial(run, has_images=True))
