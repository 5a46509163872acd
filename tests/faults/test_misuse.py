"""What is easily done wrong on several ranks is refused before a step is taken, with what to do."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

import distca_hf
from distca_hf.errors import ConfigError, PackingError
from support.data import random_dataset
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks


CPU = torch.device("cpu")


def _train_without_the_plan() -> tuple[int, float]:
    """A collator or wrapper that knows only tensors has dropped the plan of a document that is on both ranks: it is
    found again, but not where the tensors were copied, too."""
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    losses = [model(**batch).loss.item()]
    del batch["distca_plan"]
    losses.append(model(**batch).loss.item())
    positions = batch["position_ids"][0].tolist()
    begins = [right for left, right in pairwise([-2, *positions]) if right != left + 1]
    words = f"begin a document at position {max(begins)} instead of 0.* must be passed on with its distca_plan"
    copies = {name: value.clone() for name, value in batch.items()} | {"input_ids": batch["input_ids"] + 1}
    with pytest.raises(PackingError, match=words):
        model(**copies)
    plain, names = tiny_model(implementation="sdpa", num_hidden_layers=1).eval(), ("input_ids", "position_ids")
    with pytest.raises(PackingError, match=words):
        plain(**{name: batch[name].clone() for name in names}, use_cache=False)
    return max(begins), losses[1] - losses[0]


def test_placed_batch_that_lost_its_plan_is_refused_where_a_document_is_cut(tmp_path: Path) -> None:
    for begins, difference in run_ranks(2, _train_without_the_plan, tmp_path):
        assert begins > 0, "the document must be cut"
        assert difference == 0


def _open_transport_beside_accelerate() -> int:
    assert Accelerator().distributed_type == DistributedType.MULTI_CPU
    return distca_hf.DistCAPlugin().transport(CPU).world_size


def test_ranks_that_accelerate_trains_together_are_accepted(tmp_path: Path) -> None:
    assert run_ranks(2, _open_transport_beside_accelerate, tmp_path) == [2, 2]


def _open_transport_beside_accelerate_that_was_not_told_to_use_the_cpu() -> str:
    """Accelerate looks for a GPU, finds none, and trains every process alone."""
    del os.environ["ACCELERATE_USE_CPU"]
    assert Accelerator().distributed_type == DistributedType.NO
    with pytest.raises(ConfigError) as caught:
        distca_hf.DistCAPlugin().transport(CPU)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate would find a GPU")
def test_ranks_that_accelerate_does_not_train_together_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _open_transport_beside_accelerate_that_was_not_told_to_use_the_cpu, tmp_path):
        assert "2 processes are in the process group, but Accelerate trains 1 together" in message
        assert "use_cpu=True" in message


def _evaluate_without_the_plan(folder: Path) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    teacher = tiny_model(num_hidden_layers=1).eval()
    with torch.no_grad():
        teacher(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    (folder / "evaluated").touch()


def test_cut_document_without_its_plan_is_refused_in_evaluation_too(tmp_path: Path) -> None:
    outcomes = start_ranks(2, _evaluate_without_the_plan, tmp_path, tmp_path)

    assert all("a placed batch arrived in a model that was not enabled" in outcome.output for outcome in outcomes)
    assert not (tmp_path / "evaluated").exists()


def _train_another_model_on_the_same_batch() -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    model, other = distca_hf.enable(tiny_model(), plugin), tiny_model()
    batch = next(iter(plugin.dataloader(random_dataset(1, lengths=(150,)))))
    model(**batch).loss.backward()
    other(**batch)


def test_model_that_was_not_enabled_is_refused_after_one_that_was(tmp_path: Path) -> None:
    for outcome in start_ranks(2, _train_another_model_on_the_same_batch, tmp_path):
        assert outcome.exit_code == 1
        assert "arrived in a model that was not enabled" in outcome.output


def _attach_where_sharding_was_asked_for_in_vain(folder: Path) -> str:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, fsdp=True)
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=random_dataset())
    with pytest.raises(ConfigError) as caught:
        distca_hf.DistCAPlugin(tokens_per_rank=96).attach(trainer)
    return str(caught.value)


def test_fsdp_that_accelerate_does_not_run_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, _attach_where_sharding_was_asked_for_in_vain, tmp_path, tmp_path):
        assert "FSDP was asked for, but Accelerate runs DistributedType.MULTI_CPU" in message
