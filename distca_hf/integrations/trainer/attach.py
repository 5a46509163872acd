"""Attach and detach: an unmodified Trainer trains with balanced ranks, on its own batches or on placed ones. This
replaces methods of the instance, and leaves the class as it is.

Every Trainer of a process can also be attached while it trains, without a change to the program: for
`python -m distca_hf.run --attach` and DISTCA_ATTACH=1, `patches/every_trainer.py` wraps Trainer's methods, which then
call functions from here. Settings come from the recipe or from DISTCA_<FIELD>. The program keeps its batches, unless
`tokens_per_rank` is set. A Trainer stays as it is if the program has attached it, if it has a `DistCACallback`, or if
its model was enabled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import datasets
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from distca_hf.batches.known_batch import note_batch
from distca_hf.batches.loader import PlacedLoader
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.data.documents import check_map_style
from distca_hf.data.rows import is_drawn
from distca_hf.data.streams import check_saves_position, is_stream
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.distributed import model_mesh
from distca_hf.integrations.models.distributed_check import follow_mesh
from distca_hf.integrations.models.forward_watch import enable, watch_of
from distca_hf.integrations.models.planner import planner_for
from distca_hf.integrations.models.structure import IMPLEMENTATION, calls_super, give_own_attention, transformers_model
from distca_hf.integrations.models.weights_check import divide_again
from distca_hf.integrations.trainer.attachment import Attachment, held_models, restorer, watch_held_models
from distca_hf.integrations.trainer.callback import DistCACallback, print_in_short
from distca_hf.integrations.trainer.check import (
    DDP,
    TRAINER,
    EvaluationCheck,
    check_placed_evaluation,
    reading_of,
    wrong_settings,
)
from distca_hf.integrations.trainer.resuming import Resuming, check_checkpoint
from distca_hf.integrations.trainer.steps import LossReader
from distca_hf.integrations.trainer.stop_on_signal import LeaveOnSignal
from distca_hf.parallel_context import ParallelContext
from distca_hf.telemetry import get_logger


log = get_logger(__name__)

# Arguments that configure a torch DataLoader.
OF_A_DATALOADER = (
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_drop_last",
)


def attach(trainer: Trainer, context: ParallelContext) -> None:
    """Checks trainer and model, and adds metrics. The Trainer keeps its batches, and their rows are placed inside the
    model; with `tokens_per_rank` it gets placed batches instead.

    Attaching again undoes the earlier attachment; the last plugin counts.

    Raises:
        ConfigError: some settings would make the loss wrong, would silently have no effect or, with attention servers,
            prevent steps from running again (names all); or the earlier attachment cannot be undone, as for `detach`.
        UnsupportedAttentionError: the model cannot run on distca.
        PackingError: `tokens_per_rank` is given, and the dataset cannot be packed.
    """
    earlier = Attachment.of(trainer)
    if earlier is not None:
        earlier.check_undoable()
        log.info("this Trainer was attached to before; that is undone, and this plugin counts from now on")
        earlier.undo()
    if context.tokens_per_rank and trainer.train_dataset is not None:
        (check_saves_position if is_stream(trainer.train_dataset) else check_map_style)(trainer.train_dataset)
    reasons = [*wrong_settings(trainer, context), *context.annex.cannot_attach(trainer)]
    if any(isinstance(callback, DistCACallback) for callback in trainer.callback_handler.callbacks):
        reasons.append("it has a DistCACallback, and attach brings one: leave it out of callbacks=[...]")
    if reasons:
        raise ConfigError("distca_hf cannot be attached to this Trainer: " + "; ".join(reasons))
    follow_mesh(trainer.model, context)
    attachment = Attachment(trainer)
    reader = LossReader(attachment)
    try:
        train = trainer.train

        def train_from_whole_checkpoint(
            resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object
        ) -> object:
            check_checkpoint(trainer.model, trainer.args.output_dir, resume_from_checkpoint)
            divide_again(trainer.model)  # the optimizer must hold divided weights
            _let_wrap(trainer)
            attachment.is_training = True
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                attachment.is_training = False

        attachment.replace(trainer, "train", train_from_whole_checkpoint)
        if context.tokens_per_rank:
            _place(trainer, context, attachment)
        else:
            _enable(attachment, context)
            callback = DistCACallback(context)
            _add_callbacks(context, attachment, callback)
            callback.plan_ahead(trainer, attachment.replace)
        for model in held_models(trainer).values():  # a reference model also gets the images of these batches
            if model.config._attn_implementation == IMPLEMENTATION:
                give_own_attention(model)
        compute_loss = trainer.compute_loss

        def loss_of_known_batch(model: nn.Module, inputs: dict[str, Any], *args: object, **kwargs: object) -> object:
            note_batch(inputs)  # further passes on some entries of the batch can then find its documents
            return compute_loss(model, inputs, *args, **kwargs)

        attachment.replace(trainer, "compute_loss", loss_of_known_batch)
        reader.install()
        context.annex.attach(trainer, attachment)
    except BaseException:
        attachment.undo()
        raise


def _let_wrap(trainer: Trainer) -> None:
    """Lets a training wrap a model in DDP that was evaluated before. Accelerate remembers that it has prepared this
    model, although for evaluation, and would return it as it is: each rank would train separately."""
    if trainer.accelerator.distributed_type not in DDP or model_mesh(trainer.model) is not None:
        return
    is_wrapped = any(isinstance(part, DistributedDataParallel) for part in trainer.model_wrapped.modules())
    # Nobody wraps a model in DDP that is already sharded.
    if not is_wrapped and not any(isinstance(weight, DTensor) for weight in trainer.model.parameters()):
        vars(trainer.model).pop("_is_accelerate_prepared", None)
        trainer.model_wrapped = trainer.model


def detach(trainer: Trainer) -> None:
    """Restores a Trainer and its model as they were before `attach`. Raises ConfigError if nothing is attached to the
    Trainer, it is training, or a method was replaced after `attach`."""
    attachment = Attachment.of(trainer)
    if attachment is None:
        raise ConfigError(
            f"nothing is attached to this {type(trainer).__name__}: plugin.detach(trainer) undoes "
            "plugin.attach(trainer)"
        )
    attachment.check_undoable()
    attachment.undo()


def _enable(attachment: Attachment, context: ParallelContext, longest_document_tokens: int | None = None) -> None:
    """Enables the Trainer's model until it is detached."""
    model = attachment.trainer.model
    attachment.when_undone(restorer(model))
    enable(model, context, longest_document_tokens)


def _place(trainer: Trainer, context: ParallelContext, attachment: Attachment) -> None:
    """Gives the Trainer placed batches."""
    args = trainer.args
    watch_held_models(attachment)
    if not trainer.model_accepts_loss_kwargs:  # according to its class, but `check` has found that its loss does
        attachment.replace(trainer, "model_accepts_loss_kwargs", True)
    loader = _training_loader(trainer, context, attachment)
    loader.writes_epochs = False  # the callback writes a line when training ends
    longest = None if isinstance(loader, StreamLoader) else loader.longest_document_tokens
    _enable(attachment, context, longest)
    watch = watch_of(trainer.model)
    assert watch is not None
    if longest is not None:  # every batch of a stream is checked
        watch.position_limits.check(longest, "the training dataset")
    if context.evaluate == "distca":
        attachment.replace(trainer, "evaluation_loop", partial(_report_loss_only, trainer.evaluation_loop))
        attachment.set_while("evaluation_loop", average_tokens_across_devices=True)
        attachment.replace(trainer, "compute_loss", partial(_loss_over_all_labels, trainer, trainer.compute_loss))

        def evaluation(dataset: datasets.Dataset | str | None = None) -> PlacedLoader:
            """Returns placed batches of a given dataset, or of Trainer's own (by name, if there are several)."""
            if dataset is None or isinstance(dataset, str):
                dataset = trainer.eval_dataset if dataset is None else trainer.eval_dataset[dataset]
            return PlacedLoader(
                dataset,
                planner_for(trainer.model, context),
                context.transport(args.device),
                args.device,
                shuffle=False,
                reading=reading_of(trainer, dataset),
                num_workers=args.dataloader_num_workers,
            )

        check_placed_evaluation(trainer, evaluation)
        attachment.replace(trainer, "get_eval_dataloader", evaluation)
        attachment.replace(trainer, "get_test_dataloader", evaluation)
    else:
        check = EvaluationCheck(trainer)
        attachment.replace(trainer, "get_eval_dataloader", partial(check.loader, trainer.get_eval_dataloader))

    def training() -> PlacedLoader | StreamLoader:
        attachment.check_unchanged()
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        if watch_of(transformers_model(model)) is None:
            raise ConfigError(
                f"model of this Trainer changed after plugin.attach(trainer), and {type(model).__name__} is not "
                "enabled: it would train on parts of documents; call plugin.attach(trainer) again"
            )
        if args.world_size > 1 and not args.average_tokens_across_devices:
            raise ConfigError("call trainer.train() of the attached Trainer: ranks hold different numbers of labels")
        return loader

    attachment.replace(trainer, "get_train_dataloader", training)
    _add_callbacks(context, attachment, DistCACallback(context, loader))
    Resuming(loader).install(attachment)


def _training_loader(
    trainer: Trainer, context: ParallelContext, attachment: Attachment
) -> PlacedLoader | StreamLoader:
    """Sets arguments that placed batches need, warns of those without effect, and returns the loader."""
    args = trainer.args
    fields = type(args).__dataclass_fields__
    if not args.average_tokens_across_devices:
        log.warning("average_tokens_across_devices is switched on: ranks hold different numbers of labels")
    if args.per_device_train_batch_size != 1:
        is_default = args.per_device_train_batch_size == fields["per_device_train_batch_size"].default
        report = log.debug if is_default else log.warning
        report(
            "per_device_train_batch_size=%d has no effect: a micro-batch is tokens_per_rank=%d tokens on each rank",
            args.per_device_train_batch_size,
            context.tokens_per_rank,
        )
    attachment.set_while("train", average_tokens_across_devices=True, per_device_train_batch_size=1)
    attachment.replace(trainer, "_train_batch_size", 1)
    without_effect = [name for name in OF_A_DATALOADER if getattr(args, name) != fields[name].default]
    if "dataloader_num_workers" in without_effect and is_drawn(trainer.train_dataset):  # they draw its rows
        without_effect.remove("dataloader_num_workers")
    of_accelerator = ("split_batches", "dispatch_batches")
    without_effect += [f"accelerator_config.{x}" for x in of_accelerator if getattr(args.accelerator_config, x)]
    if without_effect:
        log.warning(
            "%s: no effect on placed batches, which a thread of this process prepares (setting prefetch)",
            ", ".join(without_effect),
        )
    if getattr(args, "max_length", None) is not None:
        log.warning(
            "the trainer cuts documents to max_length=%d tokens before they get here; with max_length=None they may "
            "be as long as all ranks hold together",
            args.max_length,
        )
    planner = planner_for(trainer.model, context, context.annex.extra_ranks)
    of_training: dict[str, Any] = {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
        # A step takes its micro-batches one right after the other: have all of the next step ready.
        "prefetch": max(context.prefetch, args.gradient_accumulation_steps + 1),
        "micro_steps": args.gradient_accumulation_steps if context.regroup_steps else 1,
        "reading": reading_of(trainer, trainer.train_dataset),
    }
    transport = context.training_transport(args.device)
    if is_stream(trainer.train_dataset):
        transports = transport, context.thread_transport()
        return StreamLoader(trainer.train_dataset, planner, *transports, args.device, **of_training, repeats=True)
    workers = args.dataloader_num_workers
    loader = PlacedLoader(trainer.train_dataset, planner, transport, args.device, **of_training, num_workers=workers)
    loader.log_masks()
    return loader


def _report_loss_only(
    evaluate: Callable[..., object],
    dataloader: object,
    description: str,
    prediction_loss_only: bool | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Runs Trainer's evaluation without predictions: every rank has different parts of them."""
    if description == "Prediction" and not prediction_loss_only:  # Trainer.predict, whose purpose they are
        log.warning(
            "evaluate='distca': predict returns the loss and no predictions, because documents are cut between ranks; "
            "attach a plugin with evaluate='local' for them"
        )
    return evaluate(dataloader, description, True, *args, **kwargs)


def _loss_over_all_labels(
    trainer: Trainer,
    compute_loss: Callable[..., object],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs: object,
) -> object:
    """Computes a loss whose mean over ranks is the mean over all labels of a placed micro-batch. Some trainers (TRL's)
    count no labels in evaluation: ranks would average means over unequal numbers of labels."""
    plan = inputs.get("distca_plan")
    if model.training or plan is None or num_items_in_batch is not None:
        return compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **kwargs)
    labels = torch.tensor(max(1, plan.label_tokens), device=inputs["input_ids"].device)
    steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
    trainer.current_gradient_accumulation_steps = 1  # TRL divides a loss of experts by it if labels are counted
    try:
        return compute_loss(model, inputs, return_outputs, num_items_in_batch=labels, **kwargs)
    finally:
        trainer.current_gradient_accumulation_steps = steps


def _add_callbacks(context: ParallelContext, attachment: Attachment, callback: DistCACallback) -> None:
    """Adds the callback of metrics first, and the one that leaves on a signal last."""
    callback.report_on(attachment.trainer.model)
    if context.metrics == "basic":
        print_in_short(attachment.trainer.callback_handler.callbacks, attachment.replace)
    attachment.add_callback(callback, first=True)
    if context.save_on_signal:
        attachment.add_callback(LeaveOnSignal(context.transport), first=False)
        vars(attachment.trainer).pop("_eval_dataloaders", None)  # their workers would not outlive a signal


def train_attached(
    trainer: Trainer, train: Callable[..., Any], make: Callable[[], ParallelContext], *args: object, **kwargs: object
) -> object:
    """Calls `train`, Trainer's own method, while the Trainer is attached to a new plugin. A Trainer that the program
    balances itself trains as it is."""
    callbacks = trainer.callback_handler.callbacks
    if (
        any(isinstance(callback, DistCACallback) for callback in callbacks)
        or Attachment.of(trainer) is not None
        or watch_of(trainer.model) is not None
    ):
        return train(trainer, *args, **kwargs)
    if _replaces(type(trainer), "_inner_training_loop"):
        _refuse(trainer, "_inner_training_loop")
    plugin = make()
    with _attached(trainer, train, plugin):
        output = trainer.train(*args, **kwargs)
    if Attachment.of(trainer) is None:
        plugin.close()  # programs may train many times, and each plugin opens process groups
    return output


def check_own_train(trainer: Trainer) -> None:
    """Lets a Trainer whose class has a `train` that never calls Trainer's refuse to train."""
    if _replaces(type(trainer), "train"):
        trainer.train = partial(_refuse, trainer, "train")


def _replaces(kind: type[Trainer], method: str) -> bool:
    """Returns whether a class overrides a method of Trainer without calling Trainer's."""
    own = (vars(part)[method] for part in kind.__mro__ if method in vars(part))
    for function in own:
        if function.__module__.startswith(TRAINER):
            return False
        if not calls_super(function, method):
            return True
    return False


def _refuse(trainer: Trainer, method: str, *args: object, **kwargs: object) -> NoReturn:
    """Refuses to train in a loop that is not Trainer's."""
    name = type(trainer).__name__
    raise ConfigError(
        f"distca_hf cannot be attached to this Trainer: {name}.{method} makes its own loop, and does not call "
        f"Trainer's. Leave --attach and DISTCA_ATTACH out, and call distca_hf.enable(model, plugin) in that loop "
        "before the model is wrapped"
    )


@contextmanager
def _attached(trainer: Trainer, train: Callable[..., Any], plugin: ParallelContext) -> Iterator[None]:
    """Attaches a Trainer in a `with` block. There its `train` is Trainer's, because an override is already running. If
    the Trainer was changed meanwhile, it stays attached, with a warning."""
    own = vars(trainer).get("train")
    trainer.train = MethodType(train, trainer)
    try:
        attach(trainer, plugin)
        try:
            yield
        finally:
            try:
                detach(trainer)
            except ConfigError as error:
                log.warning("%s stays attached after its training: %s", type(trainer).__name__, error)
    finally:
        if Attachment.of(trainer) is None:
            del trainer.train
            if own is not None:
                trainer.train = own
