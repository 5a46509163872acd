"""Images that move while something differs on one rank, or changes after the first pass: gradients stay those of every
row by itself."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_moved_images import PAGE, exactly, given, made
from test_shared_images import CAT, DOG, LONG, QUESTION, TAIL, Image, Row, loss_of
from test_shared_prefixes import words
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distca_hf
from distca_hf.integrations.models.forward_watch import watch_of
from support.given_batches import Batch, Gradients, gradients_of
from support.multimodal import IMAGE_TOKEN
from support.ranks import run_ranks
from support.versions import images_may_move


pytestmark = images_may_move

MOST = 1e-12
MANY: list[list[Row]] = [[[QUESTION, CAT, TAIL, PAGE, words(9, 7), DOG, LONG], [words(5, 8), PAGE]], [[words(30, 1)]]]
ONE: list[list[Row]] = [[[words(4, 1), Image(20), words(50, 1)]], [[words(30, 1)]]]
PROMPTS: list[list[Row]] = [[[QUESTION, CAT, TAIL]], [[QUESTION, CAT, TAIL, DOG, LONG], [words(5, 8), CAT]]]


def enabled(kind: str = "qwen3_vl") -> nn.Module:
    return distca_hf.enable(made(kind, "plain", "distca"), distca_hf.DistCAPlugin())


def train(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    with exactly():
        loss_of(model, batch).backward()


def batches_alone(kind: str, rows: Sequence[Sequence[Row]]) -> list[Batch]:
    return [given(kind, [row]) for of_rank in rows for row in of_rank]


def alone(kind: str, batches: Sequence[Batch], frozen: bool = False) -> Gradients:
    """Returns the sum of the gradients of batches in one process without distca."""
    model = made(kind, "frozen" if frozen else "plain", "sdpa")
    with exactly():
        for batch in batches:
            loss_of(model, batch).backward()
    return gradients_of(model)


def worst(ours: Gradients, expected: Gradients) -> float:
    """Returns the largest relative difference of a gradient."""
    assert ours.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    return max(
        ((ours[name] - one).abs().max() / max(one.abs().max().item(), 1e-4 * largest)).item()
        for name, one in expected.items()
    )


def difference(ours: Gradients, kind: str, batches: Sequence[Batch], frozen: bool = False) -> float:
    """Returns the largest difference of summed gradients on rank 0; 0 on other ranks, whose sums are the same."""
    return 0.0 if dist.get_rank() else worst(ours, alone(kind, batches, frozen))


def summed(model: nn.Module) -> Gradients:
    """Returns sums over ranks; of shards, which are means."""
    gradients = gradients_of(model)
    for name, gradient in gradients.items():
        if isinstance(gradient, DTensor):
            gradients[name] = gradient.full_tensor() * dist.get_world_size()
        else:
            dist.all_reduce(gradient)
    return gradients


def _freeze() -> float:
    model, batch = enabled(), given("qwen3_vl", MANY[dist.get_rank()])
    for _ in range(2):
        train(model, batch)
    if dist.get_rank():
        model.model.visual.requires_grad_(False)
    train(model, batch)
    model.model.visual.requires_grad_(False)  # on all ranks: only the text's gradients are compared
    return difference(summed(model), "qwen3_vl", batches_alone("qwen3_vl", MANY), frozen=True)


def test_towers_may_be_frozen_on_one_rank_in_a_later_pass(tmp_path: Path) -> None:
    """Which weights train is compared in passes 1, 2, 4, 8; what moves in backward, in each."""
    assert max(run_ranks(2, _freeze, tmp_path)) <= MOST


def _wrap() -> float:
    model = enabled()
    model.model.visual.requires_grad_(False)
    train(model, given("qwen3_vl", MANY[dist.get_rank()]))
    for block in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, given("qwen3_vl", MANY[dist.get_rank()]))
    model.model.visual.requires_grad_(True)
    train(model, given("qwen3_vl", ONE[dist.get_rank()]))
    return difference(summed(model), "qwen3_vl", batches_alone("qwen3_vl", ONE))


def test_towers_may_be_sharded_and_then_train_after_the_first_pass(tmp_path: Path) -> None:
    """Weights are others then, and a rank without an image takes part in the tower of the other."""
    assert max(run_ranks(2, _wrap, tmp_path)) <= MOST


def _need_gradients() -> tuple[float, torch.Tensor | None]:
    model, batch = enabled(), given("qwen3_vl", MANY[dist.get_rank()])
    if "pixel_values" in batch:
        batch["pixel_values"].requires_grad_()
    train(model, batch)
    of_pixels = batch["pixel_values"].grad if "pixel_values" in batch else None
    return difference(summed(model), "qwen3_vl", batches_alone("qwen3_vl", MANY)), of_pixels


def test_images_stay_if_a_gradient_returns_to_pixels(tmp_path: Path) -> None:
    (of_first, of_pixels), (of_other, _) = run_ranks(2, _need_gradients, tmp_path)
    batches = batches_alone("qwen3_vl", MANY)
    with_images = [batch for batch in batches if "pixel_values" in batch]
    for batch in with_images:
        batch["pixel_values"].requires_grad_()
    alone("qwen3_vl", batches)

    assert max(of_first, of_other) <= MOST
    expected = torch.cat([batch["pixel_values"].grad for batch in with_images])
    assert of_pixels is not None
    assert (of_pixels - expected).abs().max() <= MOST * expected.abs().max()


def of_embeddings(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns a number of all tokens, whose embeddings the caller looks up: which are of images is not known then."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    batch = {name: value for name, value in batch.items() if name not in ("input_ids", "mm_token_type_ids")}
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).expand(4, *ids.shape)
    logits = model(inputs_embeds=model.get_input_embeddings()(ids), **batch, use_cache=False).logits
    return (logits.square().sum(-1) * mask).sum() / 100


def _give_embeddings() -> float:
    model, expected = enabled(), made("qwen3_vl", "plain", "sdpa")
    with exactly():
        of_embeddings(model, given("qwen3_vl", MANY[dist.get_rank()])).backward()
        for batch in batches_alone("qwen3_vl", MANY):
            of_embeddings(expected, batch).backward()
    assert watch_of(model).planner.latest_moves.crosses
    return worst(summed(model), gradients_of(expected))


def test_layers_get_features_also_of_embeddings_that_a_caller_gives(tmp_path: Path) -> None:
    assert max(run_ranks(2, _give_embeddings, tmp_path)) <= MOST


def _give_features() -> float:
    model, batch = enabled("llava"), given("llava", PROMPTS[dist.get_rank()])
    if not dist.get_rank():
        with exactly():
            features = model.model.get_image_features(batch.pop("pixel_values"), return_dict=True)
        batch["mm_encoder_outputs"] = {"image": features}
    train(model, batch)
    return difference(summed(model), "llava", batches_alone("llava", PROMPTS))


def test_features_that_one_rank_gives_are_used(tmp_path: Path) -> None:
    assert max(run_ranks(2, _give_features, tmp_path)) <= MOST


def _choose() -> float:
    model, batch = enabled("llava"), given("llava", PROMPTS[dist.get_rank()])
    train(model, batch | {"vision_feature_layer": -1 - dist.get_rank()})
    batches = [given("llava", [row]) | {"vision_feature_layer": -1 - rank} for rank in (0, 1) for row in PROMPTS[rank]]
    return difference(summed(model), "llava", batches)


def test_features_that_ranks_choose_are_used(tmp_path: Path) -> None:
    assert max(run_ranks(2, _choose, tmp_path)) <= MOST


def _divide() -> float:
    plugin, mesh = distca_hf.DistCAPlugin(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plugin.use_mesh(mesh, data="data", tensor="tensor")
    model = distca_hf.enable(made("qwen3_vl", "plain", "distca"), plugin)
    train(model, given("qwen3_vl", MANY[dist.get_rank() // 2]))
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=mesh["data"].get_group())
    assert watch_of(model).towers.imbalance[0] == 2.0
    return difference(gradients, "qwen3_vl", batches_alone("qwen3_vl", MANY))


def test_tensor_ranks_compute_the_same_images(tmp_path: Path) -> None:
    assert max(run_ranks(4, _divide, tmp_path)) <= MOST


def _fail() -> tuple[bool, bool, float]:
    """Returns whether images wait for the backbone after a pass that fails before it, and after the next one."""
    model, open_after = enabled(), list[bool]()
    hook = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, given("qwen3_vl", MANY[dist.get_rank()]))
    open_after.append(watch_of(model).towers._is_open)
    hook.remove()
    with torch.no_grad():
        loss_of(model.eval(), given("qwen3_vl", ONE[dist.get_rank()]))
    open_after.append(watch_of(model).towers._is_open)
    train(model.train(), given("qwen3_vl", ONE[dist.get_rank()]))
    return *open_after, difference(summed(model), "qwen3_vl", batches_alone("qwen3_vl", ONE))  # type: ignore[return-value]


def test_images_of_a_pass_that_failed_are_forgotten(tmp_path: Path) -> None:
    for was_open, is_open, most in run_ranks(2, _fail, tmp_path):
        assert was_open
        assert not is_open
        assert most <= MOST


def with_blank(rows: Sequence[Row]) -> Batch:
    """Returns rows of text, with an image in the padding, as LLaMA-Factory gives ranks that have none."""
    batch = given("qwen3_vl", [[*row, CAT] if number == 0 else row for number, row in enumerate(rows)])
    batch["attention_mask"][batch["input_ids"] == IMAGE_TOKEN] = 0
    return batch


BLANK: list[Row] = [[words(30, 1)], [words(7, 2)]]


def _train_blank(of_ranks: Sequence[bool]) -> float:
    model = enabled()
    has_blank = of_ranks[dist.get_rank()]
    for _ in range(2):
        train(model, with_blank(BLANK) if has_blank else given("qwen3_vl", MANY[0]))
    batches = [
        with_blank([row]) if is_blank else given("qwen3_vl", [row])
        for is_blank in of_ranks
        for row in (BLANK if is_blank else MANY[0])
    ]
    return difference(summed(model), "qwen3_vl", batches)


@pytest.mark.parametrize("of_ranks", [(False, True), (True, True)], ids=["one rank", "all ranks"])
def test_images_in_padding_do_not_reach_layers(of_ranks: Sequence[bool], tmp_path: Path) -> None:
    assert max(run_ranks(2, partial(_train_blank, of_ranks), tmp_path)) <= MOST
