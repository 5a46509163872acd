"""Packs with images: tokens and positions stay, and attention tasks move. Ranks with images that must stay may wait
for others."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distca_hf
from distca_hf.batches.given import GivenPlanner
from distca_hf.config import DistCAConfig
from distca_hf.errors import PackingError
from distca_hf.testing import LoopbackTransport, run_ranks
from support.multimodal import document, multimodal_model, pack
from support.ranks import run_ranks as run_processes
from support.versions import images_may_move


PACKS = [[document(0, 60, image_at=5), document(1, 40)], [document(2, 9, image_at=2), document(3, 7)]]


def score(logits: torch.Tensor) -> torch.Tensor:
    """Some number that depends on all tokens."""
    return logits.log_softmax(-1)[..., 5].sum()


def test_packs_with_images_have_the_gradients_of_their_documents() -> None:
    alone = multimodal_model("qwen2_5_vl", "sdpa")
    models = [multimodal_model("qwen2_5_vl") for _ in PACKS]
    positions: list[list[torch.Tensor]] = []
    expected = 0.0
    for documents in PACKS:
        positions.append([])
        for one in documents:
            text = torch.arange(one["input_ids"].shape[1]).expand(3, 1, -1)
            given = [one[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw") if name in one]
            positions[-1].append(alone.model.get_rope_index(*given)[0] if "image_grid_thw" in one else text)
            loss = score(alone(**one, use_cache=False).logits)
            loss.backward()
            expected += loss.item()

    def step(transport: LoopbackTransport) -> tuple[float, float, float]:
        model = models[transport.rank]
        distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=60)
        batch = pack(PACKS[transport.rank], positions[transport.rank])
        plan = GivenPlanner(DistCAConfig(), transport).plan(batch)
        assert plan is not None
        loss = score(model(**batch, distca_plan=plan).logits)
        loss.backward()
        return loss.item(), plan.facts.imbalance_before, plan.facts.imbalance

    steps = run_ranks(2, step, timeout_seconds=30.0)

    assert sum(loss for loss, _, _ in steps) == pytest.approx(expected, rel=1e-6)
    assert steps[0][1] > 1.5 > 1.1 > steps[0][2], "attention tasks moved"
    parameters = zip(alone.named_parameters(), *(model.parameters() for model in models), strict=True)
    for (name, one), *of_ranks in parameters:
        gradient = sum(x.grad if x.grad is not None else torch.zeros_like(x) for x in of_ranks)
        assert one.grad is None or (gradient - one.grad).norm() <= 1e-5 * one.grad.norm() + 1e-6, name
    assert any("visual" in name and one.grad is not None for name, one in alone.named_parameters())


def test_ranks_of_which_only_some_hold_images_are_named_where_images_wait() -> None:
    with_image, without = document(0, 12, image_at=3), document(1, 12)

    def plan(transport: LoopbackTransport, batches: list[dict[str, Any]], images_wait: bool) -> object:
        planner = GivenPlanner(DistCAConfig(), transport)
        return planner.plan(batches[transport.rank], images_wait=images_wait)

    for world_size in (2, 3):
        batches = [without, with_image, without][:world_size]
        with pytest.raises(PackingError, match=r"micro-batch 0: rank 1 holds images, .* and rank 0(, 2)? none"):
            run_ranks(world_size, partial(plan, batches=batches, images_wait=True), timeout_seconds=30.0)
        assert all(run_ranks(world_size, partial(plan, batches=batches, images_wait=False)))
    assert all(run_ranks(2, partial(plan, batches=[with_image] * 2, images_wait=True)))


def one_image(step: int, stays: bool) -> dict[str, Any]:
    """Returns a batch with an image on rank 0. It stays if the batch has something of images that is not known."""
    batch = document(step, 12, image_at=None if dist.get_rank() else 3)
    return batch | ({"image_patches": torch.ones(1)} if stays and not dist.get_rank() else {})


def _step_with_one_image() -> str:
    """Returns the error of a step in which rank 0 alone holds an image, and the layers of a tower are sharded."""
    model = multimodal_model("qwen2_5_vl")
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=64)
    for block in model.model.visual.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(PackingError) as stopped:
        model(**one_image(0, stays=True))
    return str(stopped.value)


def test_a_tower_that_would_wait_for_ranks_without_images_is_stopped_by_name(tmp_path: Path) -> None:
    errors = run_processes(2, _step_with_one_image, tmp_path)

    assert all("micro-batch 0: rank 0 holds images, videos or sound, and rank 1 none" in error for error in errors)


def _steps_under_ddp(find_unused: bool, is_frozen: bool, stays: bool) -> list[str]:
    """Returns errors of two steps in which rank 0 alone holds an image, and towers are trained by DDP."""
    model = multimodal_model("qwen2_5_vl")
    model.model.visual.requires_grad_(not is_frozen)
    distca_hf.enable(model, distca_hf.DistCAPlugin(), longest_document_tokens=64)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
    errors = []
    for step in range(2):
        try:
            score(wrapped(**one_image(step, stays)).logits).backward()
        except PackingError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    ("find_unused", "is_frozen", "stays"),
    [
        (False, False, True),
        pytest.param(False, False, False, marks=images_may_move),
        (True, False, False),
        (False, True, False),
    ],
)
def test_gradients_of_towers_that_would_be_waited_for_are_named(
    find_unused: bool, is_frozen: bool, stays: bool, tmp_path: Path
) -> None:
    """DDP itself would say so in the next step, and the last step would hang. Images that may move are computed on all
    ranks."""
    for errors in run_processes(2, _steps_under_ddp, tmp_path, find_unused, is_frozen, stays):
        assert len(errors) == (2 if stays else 0)
        assert all("rank 0 holds images, videos or sound, and rank 1 none" in error for error in errors)
