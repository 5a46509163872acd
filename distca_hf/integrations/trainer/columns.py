"""Columns: what placed batches read of a Trainer's dataset. Labels are as the Trainer itself would make them.

A Trainer shows its collator the columns that the model's forward pass names; with `remove_unused_columns=False`, and
of what a transform makes, all. Collators of Transformers do not know TRL's masks, and TRL has made labels of them
before its collator is called. So masks decide only if there are no labels: such a Trainer needs distca_hf to train.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import datasets
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    default_data_collator,
)

from distca_hf.data.rows import MASK_COLUMNS, ONE_PER_ROW, Reading, is_drawn, shown_columns
from distca_hf.integrations.models.planner import reading_for


# Collators that pad, and keep the labels of the dataset or, the last one, make labels of its tokens. TRL's is known by
# its name, as TRL may not be installed.
KNOWN = (DefaultDataCollator, DataCollatorWithPadding, DataCollatorForSeq2Seq, DataCollatorForLanguageModeling)
OF_TRL = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
# Columns that TRL's collator takes, and documents of rows, which it may not be shown.
OF_TRLS_COLLATOR = frozenset({"input_ids", "labels", "seq_lengths"})
# Columns that collators of Transformers take for labels under these names.
OTHER_LABELS = ("label", "label_ids")


def reading_of(trainer: Trainer, dataset: datasets.Dataset) -> Reading:
    """Returns what is read of a dataset of a Trainer."""
    collator = trainer.data_collator
    reading = reading_for(trainer.model, unlearnt_token(collator))
    if _is_trls(collator):
        return replace(reading, only=OF_TRLS_COLLATOR, masks="never")
    only = (
        None if is_drawn(dataset) else frozenset({*_shown_to_collator(trainer, dataset), *MASK_COLUMNS, "seq_lengths"})
    )
    makes_labels = type(collator) is DataCollatorForLanguageModeling
    return replace(
        reading, only=only, masks="never" if makes_labels else "without labels", refused=_refused_columns(trainer)
    )


def unlearnt_token(collator: Any) -> int | None:
    """Returns the token that a collator never learns, wherever it stands: the pad token, even if it ends documents."""
    return collator.tokenizer.pad_token_id if type(collator) is DataCollatorForLanguageModeling else None


def refused_collator(trainer: Trainer) -> Iterator[str]:
    """Yields reasons why placed batches would differ from the batches of a Trainer's collator."""
    collator: Callable[..., object] = trainer.data_collator
    name = getattr(collator, "__name__", type(collator).__name__)
    if getattr(collator, "mlm", False):
        yield f"its data collator {name} masks tokens (mlm); placed micro-batches are for causal language models"
    elif not (collator is default_data_collator or type(collator) in KNOWN or _is_trls(collator)):
        yield (
            f"its data collator {name} would not be called: tokens_per_rank asks for placed batches. Leave that "
            "out, which keeps the collator; or let the dataset hold the columns that it makes (input_ids, labels or "
            "completion_mask), and use DataCollatorForSeq2Seq"
        )
    if not _is_trls(collator) and not is_drawn(trainer.train_dataset):
        shown = _shown_to_collator(trainer, trainer.train_dataset)
        for column, reason in _refused_columns(trainer).items():
            if column in shown:
                per_row = column in OTHER_LABELS and isinstance(trainer.train_dataset.features[column], datasets.Value)
                yield f"the dataset's column {column!r} {f'{ONE_PER_ROW}, or remove it' if per_row else reason}"


def _refused_columns(trainer: Trainer) -> Mapping[str, str]:
    """Returns columns that a Trainer's labels would come from, or that its collator ignores, with what to do."""
    refused = dict.fromkeys(
        [*OTHER_LABELS, *(name for name in trainer.label_names if name != "labels")],
        "would be its labels; rename it to 'labels', or remove it",
    )
    collator = trainer.data_collator
    if type(collator) is DataCollatorForLanguageModeling and not collator.mlm:
        refused["labels"] = (
            f"is ignored by its data collator {type(collator).__name__}, which makes labels of input_ids; remove the "
            "column, or keep its labels with DataCollatorForSeq2Seq"
        )
    return refused


def _shown_to_collator(trainer: Trainer, dataset: datasets.Dataset) -> list[str]:
    """Returns the stored columns of a dataset that a Trainer shows its collator."""
    signature = trainer._signature_columns  # remembered by the first who asks
    try:
        return shown_columns(trainer._remove_unused_columns(dataset))
    finally:
        trainer._signature_columns = signature


def _is_trls(collator: Callable[..., object]) -> bool:
    return f"{type(collator).__module__}.{type(collator).__qualname__}" == OF_TRL
