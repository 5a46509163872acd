"""Attach: an unmodified Trainer takes placed micro-batches. Methods are replaced on the instance; the class is left
alone."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import DataCollatorWithFlattening, Trainer

from distca_hf.cost import causal_pairs_of
from distca_hf.errors import ConfigError
from distca_hf.integrations.callback import DistCACallback
from distca_hf.integrations.loader import PlacedLoader
from distca_hf.integrations.model import enable
from distca_hf.integrations.preemption import LeaveOnSignal
from distca_hf.integrations.resuming import Resuming
from distca_hf.integrations.sources import calls_super, takes_shift_labels
from distca_hf.packing.sorted_packs import SortedPacks
from distca_hf.packing.source import DocumentSource
from distca_hf.telemetry import get_logger


if TYPE_CHECKING:
    from distca_hf.integrations.plugin import DistCAPlugin

log = get_logger(__name__)

# Trainers whose losses are the model's own.
TRAINERS = ("transformers.trainer", "trl.trainer.sft_trainer")
# Packages whose collators (those that do not mask) only pad or pack, which is done here.
PACKAGES = ("transformers", "trl")


def attach(trainer: Trainer, plugin: "DistCAPlugin") -> None:
    """Checks trainer and model, and puts our loader and metrics in place. A dataset that is packed already keeps its
    packs and Trainer's loader: then attention tasks move between ranks.

    Raises:
        ConfigError: all settings that would make the loss wrong, or would silently have no effect.
        UnsupportedAttentionError: the model cannot run on distca.
        PackingError: the dataset cannot be packed.
    """
    reasons = list(_wrong_settings(trainer, plugin))
    if reasons:
        raise ConfigError("this Trainer cannot be attached to: " + "; ".join(reasons))
    packed = _packed_by(trainer)
    if packed is not None:
        log.warning("%s: its packs are kept, and attention tasks move between ranks", packed)
        if plugin.sort_packs:
            trainer._get_train_sampler = lambda dataset=None: _sorted_packs(trainer)
        callback = DistCACallback(plugin)
        callback.watch(enable(trainer.model, plugin))
        _add_callbacks(trainer, plugin, callback)
        return
    args = trainer.args
    if not args.average_tokens_across_devices:
        log.warning("average_tokens_across_devices is switched on: ranks hold different numbers of labels")
        args.average_tokens_across_devices = True
    if args.per_device_train_batch_size != 1:
        default = type(args).__dataclass_fields__["per_device_train_batch_size"].default
        tell = log.info if args.per_device_train_batch_size == default else log.warning
        tell(
            "per_device_train_batch_size=%d has no effect: a micro-batch is up to %d tokens per rank",
            args.per_device_train_batch_size,
            plugin.tokens_per_rank,
        )
        args.per_device_train_batch_size = trainer._train_batch_size = 1
    # A window's micro-batches are taken one right after the other: have all of the next one ready.
    prefetch = max(plugin.prefetch, args.gradient_accumulation_steps + 1)
    seed = args.seed if args.data_seed is None else args.data_seed
    loader = plugin.dataloader(
        _dataset(trainer),
        seed,
        device=args.device,
        prefetch=prefetch,
        model=trainer.model,
        micro_steps=args.gradient_accumulation_steps if plugin.regroup_steps else 1,
    )
    enable(trainer.model, plugin, loader.longest_document_tokens)
    if plugin.evaluate == "distca":
        args.prediction_loss_only = True
        trainer.get_eval_dataloader = lambda dataset=None: _evaluation_loader(trainer, plugin, dataset)
        trainer.get_test_dataloader = lambda dataset: _evaluation_loader(trainer, plugin, dataset)
    trainer.get_train_dataloader = lambda: loader
    callback = DistCACallback(plugin, loader)
    callback.watch(trainer.model)
    _add_callbacks(trainer, plugin, callback)
    Resuming(loader).install(trainer)
    log.info(
        "%d documents, %d tokens in %d micro-batches per epoch, %d tokens per rank",
        loader.num_documents,
        loader.num_tokens,
        len(loader),
        plugin.tokens_per_rank,
    )


def _add_callbacks(trainer: Trainer, plugin: "DistCAPlugin", callback: DistCACallback) -> None:
    """Metrics come before the callbacks that report them; leaving comes after all others have ended."""
    trainer.callback_handler.callbacks.insert(0, callback)
    if plugin.save_on_signal:
        trainer.add_callback(LeaveOnSignal(plugin.transport))


def _dataset(trainer: Trainer) -> Any:
    """The training dataset without the masks that TRL's settings leave unused; warns where TRL has cut documents."""
    dataset, args = trainer.train_dataset, trainer.args
    columns = dataset.column_names or []
    unused = {
        "completion_mask": getattr(trainer, "completion_only_loss", None) is False,
        "assistant_masks": getattr(args, "assistant_only_loss", None) is False,
    }
    names = [name for name, is_unused in unused.items() if is_unused and name in columns]
    if names:
        log.info("not used, as the trainer's settings say: %s", ", ".join(names))
        dataset = dataset.remove_columns(names)
    if getattr(args, "max_length", None) is not None:
        log.warning(
            "the trainer cuts documents to max_length=%d tokens before they get here; with max_length=None they may "
            "be as long as all ranks hold together",
            args.max_length,
        )
    return dataset


def _evaluation_loader(trainer: Trainer, plugin: "DistCAPlugin", dataset: Any) -> PlacedLoader:
    """Placed micro-batches of an evaluation dataset: Trainer's own (by name, if it has several), or the given one."""
    if dataset is None or isinstance(dataset, str):
        dataset = trainer.eval_dataset if dataset is None else trainer.eval_dataset[dataset]
    return plugin.dataloader(dataset, shuffle=False, device=trainer.args.device, model=trainer.model)


def _sorted_packs(trainer: Trainer) -> SortedPacks:
    """A sampler that lets equally heavy packs of an optimizer step run at the same time."""
    args = trainer.args
    source = DocumentSource(trainer.train_dataset, sys.maxsize)
    pairs = causal_pairs_of(np.zeros_like(source.document_tokens), source.document_tokens)
    work = np.bincount(source.rows, weights=pairs, minlength=len(trainer.train_dataset))
    seed = args.seed if args.data_seed is None else args.data_seed
    return SortedPacks(work, args.world_size, args.train_batch_size, args.gradient_accumulation_steps, seed)


def _packed_by(trainer: Trainer) -> str | None:
    """Who packs this trainer's documents already; None if nobody does."""
    if "seq_lengths" in (getattr(trainer.train_dataset, "column_names", None) or []):
        return "the dataset is packed (it has a column 'seq_lengths')"
    collator = trainer.data_collator
    if isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False):
        return f"{type(collator).__name__} packs batches"
    return None


def _wrong_settings(trainer: Trainer, plugin: "DistCAPlugin") -> Iterator[str]:
    """What would make the loss wrong or be ignored without a word."""
    args = trainer.args
    if trainer.train_dataset is None:
        yield "it has no train_dataset"
    if _packed_by(trainer) is None:
        yield from _wrong_for_cut_documents(trainer, plugin)
    if args.n_gpu > 1:
        yield f"it would run DataParallel over {args.n_gpu} GPUs in one process; launch one process per GPU"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size restarts with other batches; set tokens_per_rank or the batch size instead"
    if trainer.model_init is not None:
        yield "model_init makes another model in train(), which would not be checked; pass the model itself"
    for asked, kind in ((args.deepspeed, "DEEPSPEED"), (getattr(args, "fsdp", None), "FSDP")):
        got = trainer.accelerator.distributed_type
        if asked and args.world_size > 1 and got != kind:
            yield f"{kind} was asked for, but Accelerate runs {got}, as it does on CPUs"
    for name, size in (("cp", trainer.get_cp_size()), ("sp", trainer.get_sp_size()), ("tp", trainer.get_tp_size())):
        if size > 1:
            yield f"{name}_size={size}: ranks that share documents already; distca spans all ranks by itself"


def _wrong_for_cut_documents(trainer: Trainer, plugin: "DistCAPlugin") -> Iterator[str]:
    """What goes wrong where documents are cut between ranks and batches are made here."""
    args = trainer.args
    if args.label_smoothing_factor:
        yield f"label_smoothing_factor={args.label_smoothing_factor} brings a loss without shift_labels; set it to 0"
    for name in ("compute_loss", "training_step"):
        if not _keeps(trainer, name):
            yield (
                f"{type(trainer).__name__}.{name} replaces Trainer's: labels of documents that are cut between ranks "
                f"must not be shifted again. Call super().{name}(...) in it, or use the batch's shift_labels"
            )
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func gets unshifted labels of documents cut between ranks; use the model's own loss"
    if not trainer.model_accepts_loss_kwargs:
        yield f"{type(trainer.model).__name__} takes no num_items_in_batch: ranks would average unequal label counts"
    if plugin.evaluate == "distca" and trainer.compute_metrics is not None:
        yield "compute_metrics needs whole documents, and evaluate='distca' cuts them; remove one of them"
    if plugin.sort_packs:
        yield "sort_packs is for packs of others, and these batches are placed; set it to False"
    if getattr(args, "train_sampling_strategy", "random") != "random":
        yield f"train_sampling_strategy={args.train_sampling_strategy!r} has no effect on placed micro-batches"
    collator = trainer.data_collator
    if getattr(collator, "mlm", False):
        yield "its data collator masks tokens (mlm); placed micro-batches are for causal language models"
    elif collator.__module__.split(".")[0] not in PACKAGES:
        yield (
            f"its data collator {getattr(collator, '__name__', type(collator).__name__)} would not be called: batches "
            "are made here. Let the dataset hold what it makes (input_ids, labels or completion_mask)"
        )


def _keeps(trainer: Trainer, name: str) -> bool:
    """Whether a method is Trainer's or SFTTrainer's; or calls it, as all overrides between them do; or takes
    shift_labels."""
    overrides = [vars(part)[name] for part in (trainer, *type(trainer).__mro__) if name in vars(part)]
    for method in overrides:
        if method.__module__.startswith(TRAINERS) or takes_shift_labels(method):
            return True
        if not calls_super(method, name):
            return False
    return True
