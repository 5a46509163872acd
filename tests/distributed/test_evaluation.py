"""Evaluation on all ranks together: documents longer than one rank holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from support.data import random_documents
from support.models import tiny_model
from support.ranks import run_ranks
from support.training import quiet_arguments, sft_trainer


TOKENS_PER_RANK = 100


def _documents() -> list[list[int]]:
    return random_documents(3, lengths=(170,)) + random_documents(8, seed=1, lengths=(20, 30))


def _dataset(loop: str) -> Dataset:
    """Of the first three documents, which take more than a rank each, only the end is learnt: ranks hold unequal
    numbers of labels. TRL's trainer has made labels of masks before."""
    rows = _documents()
    if loop == "sft":
        labels = [[-100] * (len(row) - 20) + row[-20:] for row in rows]
        return Dataset.from_dict({"input_ids": rows, "labels": labels})
    masks = [[int(token >= len(row) - 20) for token in range(len(row))] for row in rows]
    return Dataset.from_dict({"input_ids": rows, "completion_mask": masks})


def _evaluate(folder: Path, loop: str, average_tokens: bool) -> tuple[float, float, float]:
    """Loss before training, within it, and of a prediction after it."""
    from transformers import Trainer, TrainingArguments

    import distca_hf

    arguments = quiet_arguments(
        folder,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=0.0,
        use_cpu=True,
        average_tokens_across_devices=average_tokens,
    )
    dataset = _dataset(loop)
    if loop == "sft":
        trainer = sft_trainer(tiny_model(), dataset, eval_dataset=dataset, max_length=None, **arguments)
    else:

        class Own(Trainer):
            """Has an override as many programs have."""

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                return super().compute_loss(model, inputs, return_outputs, **kwargs)

        args = TrainingArguments(**arguments)
        trainer = (Own if loop == "own" else Trainer)(
            model=tiny_model(), args=args, train_dataset=dataset, eval_dataset=dataset
        )
    distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK, evaluate="distca").attach(trainer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    within = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    predicted = trainer.predict(dataset)
    assert predicted.predictions is None, "only the loss is reported"
    return before, within[-1], predicted.metrics["test_loss"]


@pytest.mark.parametrize(
    ("world", "loop", "average_tokens"),
    [(2, "trainer", True), (3, "trainer", True), (2, "trainer", False), (2, "sft", True), (2, "own", True)],
)
def test_loss_is_the_mean_of_the_micro_batches_of_whole_documents(
    world: int, loop: str, average_tokens: bool, tmp_path: Path
) -> None:
    import distca_hf

    loader = distca_hf.DistCAPlugin(tokens_per_rank=TOKENS_PER_RANK * world).dataloader(_dataset(loop), shuffle=False)
    model = tiny_model(implementation="sdpa").eval()
    means = []
    for at in range(len(loader)):
        documents = loader.documents(0, at)
        labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
        with torch.no_grad():
            losses = [
                model(
                    input_ids=torch.from_numpy(document.input_ids)[None],
                    labels=torch.from_numpy(document.labels)[None],
                    num_items_in_batch=labels,
                ).loss.item()
                for document in documents
            ]
        means.append(sum(losses))
    expected = sum(means) / len(means)

    for losses in run_ranks(world, _evaluate, tmp_path, tmp_path / "run", loop, average_tokens):
        assert losses == pytest.approx((expected,) * 3, rel=1e-5)


def _train(folder: Path, evaluates_before: bool) -> list[float]:
    """Losses of three steps, perhaps after an evaluation."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    import distca_hf

    dataset = Dataset.from_dict({"input_ids": _documents(), "labels": _documents()})
    args = TrainingArguments(**quiet_arguments(folder, max_steps=3, learning_rate=0.01, use_cpu=True))
    trainer = Trainer(tiny_model(), args, DataCollatorWithFlattening(), dataset, dataset)
    distca_hf.DistCAPlugin().attach(trainer)
    if evaluates_before:
        trainer.evaluate()
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_ranks_train_together_after_an_evaluation(tmp_path: Path) -> None:
    alone, after = (
        run_ranks(2, _train, tmp_path / name, tmp_path / name, name == "after") for name in ("not", "after")
    )

    assert len(alone[0]) == 3
    assert after[0] == pytest.approx(alone[0], abs=1e-6)
