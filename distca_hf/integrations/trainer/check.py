"""Trainer check: finds parts of a Trainer that would make the loss wrong, or would silently be ignored; and says what
placed batches read from its dataset instead.

Parts are its settings, methods and collator. The check also finds out before training, not at the first evaluation,
whether the Trainer's evaluation datasets can be evaluated.

Placed batches have the labels that the Trainer itself would make. It shows its collator the columns that the model's
forward pass names; with `remove_unused_columns=False`, or if a transform makes the rows, all columns. Collators of
Transformers do not know TRL's masks, and TRL turns them into labels before it calls its collator. So masks count only
if there are no labels: then the Trainer needs distca_hf to train.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import datasets
import transformers
from accelerate import DistributedType
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    default_data_collator,
)

from distca_hf.config import DistCAConfig
from distca_hf.data.documents import check_map_style
from distca_hf.data.rows import (
    MASK_COLUMNS,
    ONE_PER_ROW,
    Reading,
    is_drawn,
    media_columns,
    media_refusal,
    shown_columns,
)
from distca_hf.data.streams import is_stream
from distca_hf.errors import ConfigError, PackingError
from distca_hf.integrations.models.distributed import has_data_and_tensor_mesh, model_mesh, tensor_ranks
from distca_hf.integrations.models.distributed_check import LOWEST_TENSOR, refused_distribution
from distca_hf.integrations.models.planner import reading_for
from distca_hf.integrations.models.structure import (
    calls_super,
    passes_keywords_on,
    takes_shift_labels,
    transformers_model,
    weights_outside_text,
)


# Module of methods whose batches and losses are Trainer's.
TRAINER = "transformers.trainer"
DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
# What to do if placed batches would replace something of the user's.
GIVEN = "leave tokens_per_rank out, which keeps this Trainer's batches and loss"
# Collators that pad. They keep the dataset's labels, except the last one, which makes labels from tokens. TRL's is
# recognised by name, because TRL may not be installed.
KNOWN = (DefaultDataCollator, DataCollatorWithPadding, DataCollatorForSeq2Seq, DataCollatorForLanguageModeling)
OF_TRL = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
# Columns that TRL's collator takes, and lengths of documents in rows, which it may not be shown.
OF_TRLS_COLLATOR = frozenset({"input_ids", "labels", "seq_lengths"})
# Other names of columns that collators of Transformers take for labels.
OTHER_LABELS = ("label", "label_ids")
# Number of rows among which to look for a short and a long one.
ROWS_LOOKED_AT = 256


def makes_batches_in_steps(trainer: Trainer) -> bool:
    """Returns whether a trainer makes its batches inside its steps, as TRL does from a policy's completions."""
    return not _keeps(trainer, "_prepare_inputs")


def wrong_settings(trainer: Trainer, config: DistCAConfig) -> Iterator[str]:
    """Yields all reasons why distca_hf cannot be attached to a Trainer."""
    args = trainer.args
    if config.tokens_per_rank:
        yield from _wrong_for_placed(trainer, config)
    tensor = tensor_ranks(trainer.model)
    if tensor > 1 and not config.tokens_per_rank and not args.average_tokens_across_devices:
        yield (
            f"average_tokens_across_devices=False with tp_size={tensor}: Trainer divides the labels of each rank by "
            f"tp_size then, so that losses and gradients are {tensor} times as large; leave it True"
        )
    if args.world_size > 1 and model_mesh(trainer.model) is not None and not has_data_and_tensor_mesh(trainer.model):
        yield (
            f"Trainer of Transformers {transformers.__version__} does not know that the model was divided when it was "
            f"loaded (DistributedConfig), and would wrap it in DDP; from {LOWEST_TENSOR} on it does (pip install "
            "--upgrade transformers). Your own loop trains such a model here, too"
        )
    if args.n_gpu > 1:
        yield (
            f"it would run DataParallel over {args.n_gpu} GPUs in one process; launch one process per GPU: torchrun "
            f"--nproc-per-node {args.n_gpu} {Path(sys.argv[0]).name}"
        )
    if args.auto_find_batch_size and (args.world_size > 1 or config.tokens_per_rank):
        yield (
            "auto_find_batch_size begins again on a rank that lacks memory: all others would wait for it, and placed "
            "batches would be as large as before; set it to False"
        )
    if trainer.model_init is not None:
        yield "model_init makes another model in train(), which would not be checked; pass the model itself"
    for asked, kind in ((args.deepspeed, "DEEPSPEED"), (getattr(args, "fsdp", None), "FSDP")):
        got = trainer.accelerator.distributed_type
        if asked and args.world_size > 1 and got != kind:
            yield f"{kind} was asked for, but Accelerate runs {got}, as it does on CPUs"
    refused = list(refused_distribution(trainer.model))
    yield from refused
    sizes = {"cp": trainer.get_cp_size(), "sp": trainer.get_sp_size(), "tp": trainer.get_tp_size()}
    for name, size in sizes.items():
        known = tensor if name == "tp" else 1
        if size not in (1, known) and not any(reason.startswith(f"{name}_size=") for reason in refused):
            yield f"{name}_size={size}, and the model is divided between {known}: set it to {known}"


def _wrong_for_placed(trainer: Trainer, config: DistCAConfig) -> Iterator[str]:
    """Yields reasons against placed batches: documents are cut between ranks, and the Trainer makes no batches."""
    args = trainer.args
    if trainer.train_dataset is None:
        yield "it has no train_dataset, and tokens_per_rank asks for batches that are made of it"
        return
    if packs := _packs(trainer):
        yield (
            f"{packs}, and tokens_per_rank={config.tokens_per_rank} asks for placed batches. Leave tokens_per_rank "
            "out: these packs are placed inside the model; or give whole documents, and pack nothing"
        )
        return
    if args.label_smoothing_factor:
        yield f"label_smoothing_factor={args.label_smoothing_factor} brings a loss without shift_labels; {GIVEN}"
    for name in ("compute_loss", "training_step"):
        if not _keeps(trainer, name):
            yield (
                f"{type(trainer).__name__}.{name} replaces Trainer's: labels of documents that are cut between ranks "
                f"must not be shifted again. Call super().{name}(...), or use the batch's shift_labels; or {GIVEN}"
            )
    for name in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader"):
        methods = overrides(trainer, name)
        if methods and not methods[0].__module__.startswith(TRAINER):
            yield f"{type(trainer).__name__}.{name} replaces Trainer's, and would not be called; {GIVEN}"
    if trainer.compute_loss_func is not None:
        yield f"compute_loss_func gets unshifted labels of documents cut between ranks; {GIVEN}"
    inner = transformers_model(trainer.model)
    # Many multimodal classes say that their loss takes no number of labels, which was true of an earlier loss.
    counts_labels = "accepts_loss_kwargs" not in vars(inner) and passes_keywords_on(
        type(inner).forward, "loss_function"
    )
    if not trainer.model_accepts_loss_kwargs and not counts_labels:
        yield f"{type(trainer.model).__name__} takes no num_items_in_batch: ranks would average unequal label counts"
    if config.evaluate == "distca" and trainer.compute_metrics is not None:
        yield "compute_metrics needs whole documents, and evaluate='distca' cuts them; remove one of them"
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        yield (
            f"train_sampling_strategy={strategy!r} has no effect, because micro-batches are placed; leave it out, set "
            f"'sequential' for the order of the dataset, or {GIVEN}"
        )
    if _is_stored(trainer.train_dataset) and (media := media_columns(trainer.train_dataset)):
        yield media_refusal(media)
    finds_unused = getattr(trainer.accelerator.ddp_handler, "find_unused_parameters", False)
    trained = [name for name, weight in weights_outside_text(inner).items() if weight.requires_grad]
    if trained and trainer.accelerator.distributed_type in DDP and not finds_unused:
        yield (
            f"{trained[0]} and {len(trained) - 1} more weights outside the text model train, and documents of text "
            "give them no gradients, which DDP counts on; freeze them (requires_grad_(False)), or set "
            "ddp_find_unused_parameters=True"
        )
    yield from refused_collator(trainer)


def _packs(trainer: Trainer) -> str | None:
    """Returns a sentence that says how a trainer's documents are already packed; None if they are not."""
    if getattr(trainer.args, "packing", False):
        return "packing=True packs its dataset"
    collator = trainer.data_collator
    if isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False):
        return f"{type(collator).__name__} packs its batches"
    return None


def _keeps(trainer: Trainer, name: str) -> bool:
    """Returns whether a method is Trainer's, takes shift_labels, or reaches either through calls of super."""
    for method in overrides(trainer, name):
        if method.__module__.startswith(TRAINER) or takes_shift_labels(method):
            return True
        if not calls_super(method, name):
            return False
    return True


def overrides(trainer: Trainer, name: str) -> list[Callable[..., object]]:
    """Returns all methods with this name: the instance's first, then up its classes."""
    return [vars(part)[name] for part in (trainer, *type(trainer).__mro__) if name in vars(part)]


def reading_of(trainer: Trainer, dataset: datasets.Dataset) -> Reading:
    """Returns what to read from a dataset of a Trainer."""
    collator = trainer.data_collator
    makes_labels = type(collator) is DataCollatorForLanguageModeling
    # This collator never trains on the pad token, even if it ends documents.
    reading = reading_for(trainer.model, collator.tokenizer.pad_token_id if makes_labels else None)
    if _is_trls(collator):
        return replace(reading, only=OF_TRLS_COLLATOR, masks="never")
    only = None
    if not is_drawn(dataset) and (trainer.args.remove_unused_columns or not is_stream(dataset)):
        only = frozenset({*_shown_to_collator(trainer, dataset), *MASK_COLUMNS, "seq_lengths"})
    return replace(
        reading, only=only, masks="never" if makes_labels else "without labels", refused=_refused_columns(trainer)
    )


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
    if not _is_trls(collator) and _is_stored(trainer.train_dataset):
        shown = _shown_to_collator(trainer, trainer.train_dataset)
        for column, reason in _refused_columns(trainer).items():
            if column in shown:
                per_row = column in OTHER_LABELS and isinstance(trainer.train_dataset.features[column], datasets.Value)
                yield f"the dataset's column {column!r} {f'{ONE_PER_ROW}, or remove it' if per_row else reason}"


def _refused_columns(trainer: Trainer) -> Mapping[str, str]:
    """Returns columns that would become a Trainer's labels, or that its collator ignores, with what to do."""
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
    """Returns the columns of a dataset that a Trainer shows its collator; for a stream, all that it may show."""
    signature = trainer._signature_columns  # the first call remembers it
    try:
        if is_stream(dataset):
            trainer._set_signature_columns_if_needed()
            return list(trainer._signature_columns or ())
        return shown_columns(trainer._remove_unused_columns(dataset))
    finally:
        trainer._signature_columns = signature


def _is_stored(dataset: object) -> bool:
    """Returns whether the columns of a dataset are stored, so that they are known before rows are read."""
    return not is_stream(dataset) and not is_drawn(dataset)


def _is_trls(collator: Callable[..., object]) -> bool:
    return f"{type(collator).__module__}.{type(collator).__qualname__}" == OF_TRL


def check_placed_evaluation(trainer: Trainer, open_loader: Callable[[datasets.Dataset], object]) -> None:
    """Opens all evaluation datasets of a Trainer whose evaluation batches are placed. Raises PackingError if one of
    them cannot be packed."""
    for name, dataset in _evaluation_datasets(trainer):
        try:
            check_map_style(dataset)
            open_loader(dataset)
        except PackingError as error:
            raise PackingError(f"the evaluation dataset{name}: {error}") from error


class EvaluationCheck:
    """Checks evaluation datasets of a Trainer that evaluates with its own batches: collates a short and a long row.
    Checks each dataset once; those that the Trainer already has, immediately. Raises ConfigError if one of them cannot
    be evaluated; says why."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._checked: list[object] = []
        for name, dataset in _evaluation_datasets(self._trainer):
            self._check(dataset, name)

    def loader(self, make: Callable[..., object], dataset: object = None, *args: object, **kwargs: object) -> object:
        """Makes the loader of an evaluation dataset: a given one, or Trainer's own (by name, if there are several).
        Raises ConfigError if the dataset cannot be evaluated; says why."""
        given = self._trainer.eval_dataset if dataset is None else dataset
        self._check(self._trainer.eval_dataset[given] if isinstance(given, str) else given)
        return make(dataset, *args, **kwargs)

    def _check(self, dataset: object, name: str = "") -> None:
        if not isinstance(dataset, datasets.Dataset) or any(dataset is one for one in self._checked):
            return
        reason = _reason_against(self._trainer, dataset) if len(dataset) else "it has no rows"
        if reason is not None:
            raise ConfigError(f"the evaluation dataset{name} cannot be evaluated: {reason}")
        self._checked.append(dataset)


def _evaluation_datasets(trainer: Trainer) -> list[tuple[str, datasets.Dataset]]:
    """Returns names, quoted after a space, and datasets."""
    given = trainer.eval_dataset
    if isinstance(given, Mapping):
        return [(f" {name!r}", dataset) for name, dataset in given.items()]
    return [] if given is None else [("", given)]


def _reason_against(trainer: Trainer, dataset: datasets.Dataset) -> str | None:
    """Returns why the collator cannot make a batch with labels of these rows; None if it can."""
    rows = dataset.select(range(min(len(dataset), ROWS_LOOKED_AT)))
    rows = trainer._remove_unused_columns(rows, description="evaluation")
    if "input_ids" not in rows.column_names:
        return None  # not a tokenised dataset: what the collator makes from it is unknown
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
