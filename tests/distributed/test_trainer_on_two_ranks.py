"""What Trainer does on several ranks besides training steps: uneven evaluation, worker processes, versions."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import distca_hf
from distca_hf.batches import agreement as facts
from distca_hf.integrations.models.forward_watch import watch_of
from support.data import random_dataset, random_documents
from support.models import tiny_model
from support.ranks import run_ranks, start_ranks


def _trainer(folder: Path, implementation: str = "distca", **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_eval_batch_size": 1,
    }
    dataset = random_dataset(30)
    trainer = Trainer(
        model=tiny_model(implementation=implementation, num_hidden_layers=1),
        args=TrainingArguments(output_dir=str(folder), **settings | arguments),
        train_dataset=dataset.add_column("labels", dataset["input_ids"]),
        data_collator=DataCollatorWithFlattening(),
    )
    if implementation == "distca":
        distca_hf.DistCAPlugin().attach(trainer)
    return trainer


EVALUATED = 5
SHORT = (20, 30, 40)


def _evaluate(folder: Path, implementation: str) -> tuple[float, float]:
    """Losses of an evaluation and a prediction of more documents than ranks can share equally."""
    rows = random_documents(EVALUATED, lengths=SHORT)
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = _trainer(folder, implementation, prediction_loss_only=True)
    return trainer.evaluate(dataset)["eval_loss"], trainer.predict(dataset).metrics["test_loss"]


def test_uneven_evaluation_is_as_trainers_own(tmp_path: Path) -> None:
    ours = run_ranks(2, _evaluate, tmp_path / "distca", tmp_path, "distca")
    usual = run_ranks(2, _evaluate, tmp_path / "sdpa", tmp_path, "sdpa")

    assert ours[0] == ours[1] == pytest.approx(usual[0], rel=1e-5)


def _train(folder: Path, workers: int) -> list[float]:
    multiprocessing.current_process()._config["daemon"] = False  # ranks of tests may not have children otherwise
    multiprocessing.set_start_method("fork", force=True)  # as in an ordinary process; a fork server would import all
    trainer = _trainer(folder, per_device_train_batch_size=2, dataloader_num_workers=workers)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_packs_may_come_from_worker_processes(tmp_path: Path) -> None:
    (usual, _), (same, _) = (run_ranks(2, _train, tmp_path / f"{workers}", tmp_path, workers) for workers in (0, 1))

    assert same == usual


class WithHead(torch.nn.Module):
    """A model of the program's own, around one of Transformers."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.inner = tiny_model(implementation=implementation, num_hidden_layers=1)
        self.head = torch.nn.Linear(self.inner.config.hidden_size, 1)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        # With a cache, Transformers does not tell documents of a pack apart.
        states = self.inner.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return {"loss": (self.head(states)[..., 0] - labels.abs().sqrt()).square().mean()}


def _train_a_module(folder: Path, implementation: str) -> tuple[list[float], bool]:
    """Losses of this rank, and whether rows crossed."""
    usual = _trainer(folder, "sdpa")
    torch.manual_seed(0)
    model = WithHead(implementation)
    if implementation == "distca":
        distca_hf.enable(model.inner, distca_hf.DistCAPlugin())
    trainer = Trainer(
        model=model, args=usual.args, train_dataset=usual.train_dataset, data_collator=usual.data_collator
    )
    trainer.train()
    watch = watch_of(model.inner)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, watch is not None and watch.planner.latest_moves.crosses


def test_trainer_of_a_module_around_an_enabled_model_needs_no_attach(tmp_path: Path) -> None:
    for (losses, crosses), (expected, _) in zip(
        run_ranks(2, _train_a_module, tmp_path / "distca", tmp_path, "distca"),
        run_ranks(2, _train_a_module, tmp_path / "sdpa", tmp_path, "sdpa"),
        strict=True,
    ):
        assert crosses
        assert losses == pytest.approx(expected, rel=1e-5)


def _train_detached(folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a second training: detached, and of a Trainer with sdpa that was never attached to."""
    detached, other = _trainer(folder), _trainer(folder, "sdpa")
    detached.train()
    distca_hf.DistCAPlugin().detach(detached)
    other.model.load_state_dict(detached.model.state_dict())
    for trainer in (detached, other):
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
    return tuple([log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in (detached, other))


def test_detached_ranks_train_on_their_own_batches(tmp_path: Path) -> None:
    for losses, expected in run_ranks(2, _train_detached, tmp_path, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)


def _train_on_nothing() -> None:
    """The second of the packs has no tokens, on any rank."""
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), distca_hf.DistCAPlugin()).train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for tokens in (30, 0):
        ids = torch.arange(tokens)[None]
        wrapped(input_ids=ids, labels=ids.clone(), position_ids=ids.clone()).loss.backward()


def test_step_without_tokens_on_any_rank_is_refused_by_all(tmp_path: Path) -> None:
    for outcome in start_ranks(2, _train_on_nothing, tmp_path):
        assert outcome.exit_code == 1
        assert "PackingError: micro-batch 1: no data on any rank" in outcome.output


def _train_with_another_version(batches: str) -> None:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=96)
    if torch.distributed.get_rank() == 1:
        facts.__version__ = "0.0.1"
        facts._versions.cache_clear()
    model = distca_hf.enable(tiny_model(num_hidden_layers=1), plugin).train()
    batch = (
        next(iter(plugin.dataloader(random_dataset())))
        if batches == "placed"
        else {"input_ids": torch.ones(1, 9).int()}
    )
    model(**batch)


@pytest.mark.parametrize("batches", ["placed", "packs"])
def test_ranks_of_different_versions_are_refused(batches: str, tmp_path: Path) -> None:
    for outcome in start_ranks(2, _train_with_another_version, tmp_path, batches):
        assert outcome.exit_code == 1
        assert "ranks disagree, nothing was sent: distca_hf is" in outcome.output
