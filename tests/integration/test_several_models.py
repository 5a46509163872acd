"""Several models in one process: a student and its teacher, and two models that train on the same batch."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, PreTrainedModel

import distca_hf
from distca_hf.errors import PlanError
from support.data import random_dataset, random_documents
from support.models import tiny_config, tiny_model
from support.ranks import run_ranks


STEPS = 3
CAPACITY_TOKENS = 192
Batch = dict[str, Any]
# Losses and, by model and parameter, gradients of every step; both averaged over ranks.
Numbers = tuple[list[list[float]], list[dict[str, torch.Tensor]]]


def new_plugin() -> distca_hf.DistCAPlugin:
    return distca_hf.DistCAPlugin(tokens_per_rank=CAPACITY_TOKENS // dist.get_world_size())


def other_model() -> PreTrainedModel:
    """A model of another shape, with other weights."""
    torch.manual_seed(1)
    config = tiny_config("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="distca")


def placed_batches(plugin: distca_hf.DistCAPlugin) -> Iterator[Batch]:
    yield from plugin.dataloader(random_dataset())


def packed_batches(plugin: distca_hf.DistCAPlugin) -> Iterator[Batch]:
    """Long documents on rank 0 and short ones on rank 1, or all on the only rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(STEPS):
        packs = [random_documents(2, seed, (90, 60)), random_documents(4, seed + 100, (5, 9, 17))]
        labels = sum(len(ids) - 1 for pack in packs for ids in pack)
        mine = packs[rank] if world == 2 else packs[0] + packs[1]
        batch = DataCollatorWithFlattening()([{"input_ids": ids, "labels": ids} for ids in mine])
        yield {**batch, "num_items_in_batch": labels / world}


SOURCES = {"placed": placed_batches, "packed": packed_batches}


def without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}


def labels_of_all_ranks(batch: Batch) -> float:
    """Labels per rank: a sum over this rank's tokens, divided by it, has the mean over all labels as its mean."""
    if "distca_plan" in batch:
        return batch["distca_plan"].label_tokens / dist.get_world_size()
    return batch["num_items_in_batch"]


def distance(student_TV: torch.Tensor, teacher_TV: torch.Tensor, learnt_T: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence, summed over the tokens that are learnt."""
    per_token_T = nn.functional.kl_div(
        student_TV.log_softmax(-1), teacher_TV.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    return (per_token_T * learnt_T).sum()


def learnt_tokens(batch: Batch) -> torch.Tensor:
    """Tokens whose next one is a label, as 0 and 1."""
    shifted = batch.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return (shifted[0] != -100).float()


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def gradients_of(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Gradients as DDP left them: averaged over ranks."""
    return {
        f"{which} {name}": parameter.grad.clone()
        for which, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _distil(source: str, teacher_is_enabled: bool) -> Numbers:
    plugin = new_plugin()
    student = distca_hf.enable(tiny_model(), plugin).train()
    teacher = other_model().eval().requires_grad_(False)
    if teacher_is_enabled:
        distca_hf.enable(teacher, plugin)
    wrapped = nn.parallel.DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses, gradients = [], []
    for batch in islice(SOURCES[source](plugin), STEPS):
        with torch.no_grad():
            taught = teacher(**without_labels(batch)).logits[0]
        output = wrapped(**batch)
        apart = distance(output.logits[0], taught, learnt_tokens(batch)) / labels_of_all_ranks(batch)
        (output.loss + apart).backward()
        losses.append([mean_over_ranks(output.loss).item(), mean_over_ranks(apart).item()])
        gradients.append(gradients_of({"student": student, "teacher": teacher}))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def _train_two(source: str, together: bool) -> Numbers:
    """Both models on every batch: one after the other, or both forward before either goes backward."""
    plugin = new_plugin()
    models = {"first": tiny_model(), "second": other_model()}
    wrapped = {
        name: nn.parallel.DistributedDataParallel(distca_hf.enable(model, plugin).train())
        for name, model in models.items()
    }
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    losses, gradients = [], []
    for batch in islice(SOURCES[source](plugin), STEPS):
        computed = []
        for model in wrapped.values():
            computed.append(model(**batch).loss)
            if not together:
                computed[-1].backward()
        if together:
            for loss in computed:
                loss.backward()
        losses.append([mean_over_ranks(loss).item() for loss in computed])
        gradients.append(gradients_of(models))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients


def check_equal(ranks: list[Numbers], alone: Numbers) -> None:
    for losses, gradients in ranks:
        for step in range(STEPS):
            assert losses[step] == pytest.approx(alone[0][step], abs=1e-5)
            assert gradients[step].keys() == alone[1][step].keys()
            for name, expected in alone[1][step].items():
                torch.testing.assert_close(gradients[step][name], expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("source", "teacher_is_enabled"),
    [("placed", True), ("packed", False)],
    ids=["placed", "packed, teacher not enabled"],
)
def test_student_learns_from_its_teacher_as_on_one_rank(source: str, teacher_is_enabled: bool, tmp_path: Path) -> None:
    alone = run_ranks(1, _distil, tmp_path / "alone", source, teacher_is_enabled)[0]
    ranks = run_ranks(2, _distil, tmp_path / "together", source, teacher_is_enabled)

    check_equal(ranks, alone)
    assert all(name.startswith("student") for step in alone[1] for name in step)
    assert all(apart > 1e-3 for _, apart in alone[0]), "the teacher must know something else"


@pytest.mark.parametrize(
    ("source", "together"), [("packed", False), ("placed", True)], ids=["one after the other", "forward together"]
)
def test_second_model_trains_on_the_same_batch(source: str, together: bool, tmp_path: Path) -> None:
    alone = run_ranks(1, _train_two, tmp_path / "alone", source, False)[0]
    ranks = run_ranks(2, _train_two, tmp_path / "together", source, together)

    check_equal(ranks, alone)


def _teach_without_enabling() -> str:
    """Its documents may be cut: without a plan the teacher would see parts of them."""
    batch = next(placed_batches(new_plugin()))
    with torch.no_grad(), pytest.raises(PlanError) as caught:
        other_model().eval()(**without_labels(batch))
    return str(caught.value)


def test_teacher_that_is_not_enabled_is_refused_on_placed_batches(tmp_path: Path) -> None:
    for message in run_ranks(2, _teach_without_enabling, tmp_path):
        assert "a model that was not enabled" in message
