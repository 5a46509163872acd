"""Evaluation: whether a Trainer can evaluate its datasets is found out before training, not at its first evaluation.
And the loss of evaluation batches that are placed on all ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import datasets
import torch
from torch import nn
from transformers import Trainer

from distca_hf.errors import ConfigError
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Rows among which a short and a long one are looked for.
ROWS_LOOKED_AT = 256


def check_placed_evaluation(trainer: Trainer, open_loader: Callable[[Any], object]) -> None:
    """Opens all evaluation datasets of a Trainer whose evaluation batches are placed.

    Raises:
        PackingError: one of them cannot be packed.
    """
    for _, dataset in _evaluation_datasets(trainer):
        open_loader(dataset)


def loss_over_all_labels(
    trainer: Trainer,
    compute_loss: Callable[..., object],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs: object,
) -> object:
    """Computes a loss whose mean over ranks is the mean over all labels of a placed micro-batch. Evaluation of some
    trainers (TRL's) counts nothing: the mean over ranks would be one of means over unequal numbers of labels."""
    plan = inputs.get("distca_plan")
    if model.training or plan is None or num_items_in_batch is not None:
        return compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs)
    labels = torch.tensor(max(1, plan.label_tokens), device=inputs["input_ids"].device)
    steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
    trainer.current_gradient_accumulation_steps = 1  # TRL divides a loss of experts by it where labels are counted
    try:
        return compute_loss(model, inputs, return_outputs, num_items_in_batch=labels, **kwargs)
    finally:
        trainer.current_gradient_accumulation_steps = steps


def check_evaluation(trainer: Trainer) -> None:
    """Collates a short and a long row of all evaluation datasets of a Trainer.

    Raises:
        ConfigError: evaluation is due in training and would fail; says why. Where it is not due, that is a warning.
    """
    for name, dataset in _evaluation_datasets(trainer):
        known = isinstance(dataset, datasets.Dataset) and len(dataset) > 0
        reason = _reason_against(trainer, dataset) if known else None
        if reason is None:
            continue
        message = f"the evaluation dataset{name} cannot be evaluated: {reason}"
        if trainer.args.eval_strategy != "no":
            raise ConfigError(message)
        log.warning("%s", message)


def _evaluation_datasets(trainer: Trainer) -> list[tuple[str, Any]]:
    """Returns names, quoted behind a space, and datasets."""
    given = trainer.eval_dataset
    if isinstance(given, Mapping):
        return [(f" {name!r}", dataset) for name, dataset in given.items()]
    return [] if given is None else [("", given)]


def _reason_against(trainer: Trainer, dataset: datasets.Dataset) -> str | None:
    """Returns why the collator cannot make a batch with labels of these rows; None if it can."""
    rows = dataset.select(range(min(len(dataset), ROWS_LOOKED_AT)))
    rows = trainer._remove_unused_columns(rows, description="evaluation")
    if "input_ids" not in rows.column_names:
        return None  # not a tokenised dataset: the collator makes something of it that is not known here
    lengths = [len(row) for row in rows["input_ids"]]
    shortest, longest = lengths.index(min(lengths)), lengths.index(max(lengths))
    several = trainer.args.eval_batch_size > 1 and len(rows) > 1
    collator = trainer.data_collator
    name = getattr(collator, "__name__", type(collator).__name__)
    try:
        batch = collator([rows[shortest], rows[longest]] if several else [rows[longest]])
    except Exception as error:  # a collator of any package may raise anything
        return (
            f"{name} cannot put rows of {lengths[shortest]} and {lengths[longest]} tokens into one batch "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0][:60]}). Set evaluate='distca' or "
            "per_device_eval_batch_size=1, or give Trainer a collator that pads (DataCollatorForSeq2Seq)"
        )
    missing = [label for label in trainer.label_names if label not in batch]
    if missing:
        return (
            f"{name} makes no {missing[0]!r} of its columns {rows.column_names}, so that no loss can be computed; add "
            "a column 'labels', or set evaluate='distca', which takes input_ids for labels"
        )
    return None
