"""Collators: which labels a Trainer's data collator would make, where batches are made here instead of by it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)


# Collators that pad and keep the labels of the dataset. TRL's is known by its name, as TRL may not be installed.
KEEP_LABELS = (DefaultDataCollator, DataCollatorWithPadding, DataCollatorForSeq2Seq)
OF_TRL = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
# Columns that collators of Transformers take for labels under these names.
OTHER_LABELS = ("label", "label_ids")


def unlearnt_token(collator: Any) -> int | None:
    """Returns the token that a collator never learns, wherever it stands: the pad token, even if it ends documents."""
    return collator.tokenizer.pad_token_id if type(collator) is DataCollatorForLanguageModeling else None


def refused_collator(collator: Callable[..., Any], columns: Sequence[str]) -> Iterator[str]:
    """Yields reasons why batches made here would differ from those of a collator.

    Args:
        columns: of the training dataset.
    """
    name = getattr(collator, "__name__", type(collator).__name__)
    if getattr(collator, "mlm", False):
        yield f"its data collator {name} masks tokens (mlm); placed micro-batches are for causal language models"
    elif type(collator) is DataCollatorForLanguageModeling:
        ignored = [column for column in ("labels", "completion_mask", "assistant_masks") if column in columns]
        if ignored:
            yield (
                f"its data collator {name} makes labels of input_ids and ignores the column {ignored[0]!r}; remove "
                "the column, or keep its labels with DataCollatorForSeq2Seq"
            )
    elif not _is_known(collator):
        yield (
            f"its data collator {name} would not be called: batches are made here. Let the dataset hold what it makes "
            "(input_ids, labels or completion_mask), and use DataCollatorForSeq2Seq"
        )
    if "labels" not in columns:
        for column in OTHER_LABELS:
            if column in columns:
                yield f"the dataset's column {column!r} would be its labels; rename it to 'labels', or remove it"


def _is_known(collator: Callable[..., Any]) -> bool:
    kind = type(collator)
    of_trl = f"{kind.__module__}.{kind.__qualname__}" == OF_TRL
    return collator is default_data_collator or kind in KEEP_LABELS or of_trl
