"""Callback: checks the model, logs balance and speed, and prints them in short.

History and trackers get metrics as numbers, by name.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from weakref import WeakSet

from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from distca_hf.batches.base_loader import BaseLoader
from distca_hf.batches.meter import Meter, MeterReading, PlanSource
from distca_hf.batches.preview import count
from distca_hf.batches.stream_loader import StreamLoader
from distca_hf.config import DistCAConfig
from distca_hf.errors import ConfigError
from distca_hf.integrations.models.forward_watch import ForwardWatch, enable, watch_of
from distca_hf.integrations.models.weights_check import WeightsCheck, check_optimizer
from distca_hf.integrations.trainer.steps import ReadAhead, steps_per_epoch
from distca_hf.integrations.trainer.stop_on_signal import LeaveOnSignal
from distca_hf.parallel_context import ParallelContext
from distca_hf.settings import fields_of
from distca_hf.telemetry import get_logger
from distca_hf.version import __version__


log = get_logger(__name__)

# Prefix of our metrics in logs. The console shows some of them as one entry: the first group always, the second if
# they can be measured with this device and model.
PREFIX = "distca/"
ALWAYS = ("imbalance", "tokens_per_second_per_rank")
SOMETIMES = ("step_imbalance", "utilisation", "memory_gib")
# Settings of placed batches.
OF_STREAMS = ("stream_buffer_tokens", "skip_bad_rows")
OF_PLACED = ("overlong", "pad_to_multiple_of", "regroup_steps", "prefetch", "kernel_times", *OF_STREAMS)


class DistCACallback(TrainerCallback):
    """Balances the ranks of a Trainer that keeps its batches, as `plugin.attach` does without `tokens_per_rank`.

    ```python
    Trainer(model=model, args=args, train_dataset=dataset, callbacks=[distca_hf.DistCACallback(plugin)])
    ```

    It adds metrics to every log, over all ranks and the micro-batches since the last log. The setting `metrics`
    chooses the basic ones or all (`batches.meter` has both). It runs before the callbacks that report logs to
    trackers.

    It also leaves on SIGTERM or Ctrl-C (see `LeaveOnSignal`, which `plugin.attach` adds as the last callback) and
    compares weights every `debug.check_weights_every_steps`.

    Args:
        loader: the placed loader of this training; None if its batches come from elsewhere.
    """

    def __init__(self, plugin: ParallelContext, loader: BaseLoader | None = None) -> None:
        self._context = plugin
        self._loader = loader
        self._model: nn.Module | None = None
        self._since_log: Meter | None = None
        self._since_begin: Meter | None = None
        self._first_step = 0
        self._weights: WeightsCheck | None = None
        self._read_ahead = WeakSet[ReadAhead]()  # of Trainers that share this callback

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """Checks and enables the model before it is wrapped.

        Raises:
            UnsupportedAttentionError, ConfigError: the model cannot run on distca.
            ConfigError: `tokens_per_rank` is set, and a callback cannot replace Trainer's loader; or the Trainer makes
                another model when it trains.
        """
        if self._context.tokens_per_rank:
            raise ConfigError(
                f"tokens_per_rank={self._context.tokens_per_rank} asks for placed batches, and a callback "
                "cannot replace the Trainer's own: call plugin.attach(trainer) instead of adding DistCACallback, or "
                "leave tokens_per_rank out"
            )
        trainer = _trainer_of_this_event(self)
        if trainer.model_init is not None:
            raise ConfigError(
                "model_init makes another model in train(), which DistCACallback would not balance; pass the model "
                "itself to the Trainer"
            )
        self.report_on(enable(model, self._context))
        self.plan_ahead(trainer, setattr)
        handler = trainer.callback_handler
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
        if self._context.metrics == "basic":
            print_in_short(handler.callbacks, setattr)
        if self._context.save_on_signal:
            handler.add_callback(LeaveOnSignal(self._context.transport))

    def plan_ahead(self, trainer: Trainer, replace: Callable[[object, str, object], None]) -> None:
        """Lets ranks plan the micro-batches of this Trainer's steps ahead. Call `report_on` first."""
        assert self._model is not None
        self._read_ahead.add(ReadAhead(trainer, self._model, replace))

    def report_on(self, model: nn.Module) -> None:
        """Reports on this enabled model from now on. Warns of settings that have no effect."""
        self._model = model
        if self._loader is None:
            self._warn_of_unused(
                OF_PLACED,
                "no effect without tokens_per_rank, because the Trainer makes its own batches. Leave it out, or give "
                "tokens_per_rank for placed batches",
            )
        elif not isinstance(self._loader, StreamLoader):
            self._warn_of_unused(OF_STREAMS, "no effect, because train_dataset is not a stream. Leave it out")

    def _warn_of_unused(self, names: Iterable[str], because: str) -> None:
        """Warns of these settings if they do not have their defaults."""
        fields, given = fields_of(DistCAConfig), {name: getattr(self._context, name) for name in names}
        if unused := [f"{name}={x!r}" for name, x in given.items() if x != fields[name].metadata["default"]]:
            log.warning("%s: %s", ", ".join(unused), because)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: object = None,
        model: nn.Module | None = None,
        optimizer: object = None,
        **kwargs: object,
    ) -> None:
        """Begins to measure.

        Raises:
            ConfigError: the model does not follow this callback's plugin; or the optimizer holds other weights.
        """
        watch = watch_of(self._model)
        if watch is None:
            raise ConfigError(
                "DistCACallback came too late to enable the model: give it to Trainer in callbacks=[...] instead of "
                "trainer.add_callback, or call plugin.attach(trainer)"
            )
        if watch.context is not self._context:
            raise ConfigError(
                "the model was enabled with another plugin after this Trainer got its own: signals, metrics and "
                "batches would follow different plugins. Use one plugin, or call plugin.attach(trainer) again"
            )
        if model is not None and optimizer is not None:
            check_optimizer(model, optimizer)
        source, transport = self._source(watch), self._context.transport(args.device)
        self._since_log, self._since_begin = (Meter(transport, args.device, watch.flops) for _ in range(2))
        for meter in (self._since_log, self._since_begin):
            meter.begin(source)
        self._first_step, watch.loss.is_unlogged = state.global_step, False
        watch.report.restart(steps_per_epoch(args, train_dataloader))
        if source is None and transport.world_size == 1:
            log.info("%s: one rank: there is nothing to balance", __version__)
        for each in self._read_ahead:
            each.begin(train_dataloader)

    def _source(self, watch: ForwardWatch) -> PlanSource | None:
        """Returns where plans come from; None if nothing is planned, or not yet."""
        return watch.planner if self._loader is None else self._loader

    def on_evaluate(self, *event: object, **kwargs: object) -> None:
        """Leaves the finished evaluation out of the measurement."""
        for meter in self._meters():
            meter.leave_out_evaluation()

    on_predict = on_evaluate

    def _meters(self) -> Iterator[Meter]:
        return (meter for meter in (self._since_log, self._since_begin) if meter is not None)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Notes the optimizer step that begins, because some steps are reported."""
        self._context.trace_file.follow_trainer(args.output_dir, state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: object
    ) -> None:
        """Notes that a step has ended, and compares weights if due.

        Raises:
            PlanMismatchError: weights were compared after this step, and differ.
        """
        for meter in self._meters():
            meter.note_training()
        every = self._context.debug.check_weights_every_steps
        if every and state.global_step % every == 0:
            if self._weights is None:
                self._weights = WeightsCheck(self._context.transport(args.device))
            self._weights.compare(model, state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Lets a stopped training log its last steps if their losses are of placed rows: only their mean over ranks is
        meaningful."""
        watch = watch_of(self._model)
        if control.should_training_stop and watch is not None and watch.loss.is_unlogged:
            control.should_log = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        watch = watch_of(self._model)
        if watch is not None:
            watch.reported_steps.flush()
        self._context.trace_file.leave_trainer()
        reading = self._read(self._since_begin, state.global_step)
        if reading is not None:
            steps = state.global_step - self._first_step
            log.info("%s", reading.in_words(f"trained {count(steps, 'step')}"))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        if (watch := watch_of(self._model)) is not None:
            watch.loss.is_unlogged = False
        reading = self._read(self._since_log, state.global_step)
        if reading is None:
            return
        if self._context.metrics == "basic":
            metrics = reading.basic()
        else:
            metrics = reading.all(self._loader.documents_truncated if self._loader is not None else 0)
        add_metrics(metrics, logs, state)

    def _read(self, meter: Meter | None, step: int) -> MeterReading | None:
        """Returns a reading of the training; None if nothing was planned. A collective call: every rank must read
        after the same steps."""
        watch = watch_of(self._model)
        source = None if watch is None else self._source(watch)
        if meter is None or watch is None or source is None:
            return None
        return meter.read(source, step, watch.attention_dtype)


def _trainer_of_this_event(callback: TrainerCallback) -> Trainer:
    """Returns the Trainer whose event is being called.

    Trainer puts the user's callbacks after its own, some of which report to trackers. It passes them everything except
    itself and their list. So this finds it through the caller of the event, `CallbackHandler.call_event`.

    Raises:
        ConfigError: something else calls the event.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    raise ConfigError("DistCACallback did not find its Trainer; call plugin.attach(trainer) instead of adding it")


def add_metrics(metrics: Mapping[str, float], logs: dict[str, float], state: TrainerState) -> None:
    """Adds metrics to a log of Trainer, and to the copy that its history already holds."""
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)


def print_in_short(callbacks: Iterable[TrainerCallback], replace: Callable[[object, str, object], None]) -> None:
    """Makes callbacks that print logs print our metrics in short: with four more names a line would be too long."""
    for callback in callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback):
            replace(callback, "on_log", partial(_print_log, callback.on_log))


def _print_log(
    print_log: Callable[..., object],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict[str, float] | None = None,
    **kwargs: object,
) -> object:
    return print_log(args, state, control, logs=None if logs is None else in_short(logs), **kwargs)


def in_short(logs: Mapping[str, float]) -> Mapping[str, float | str]:
    """Returns a log with the basic metrics as one entry of at most 52 characters; everything else stays."""
    metrics = {name: logs[PREFIX + name] for name in (*ALWAYS, *SOMETIMES) if PREFIX + name in logs}
    if not metrics.keys() >= set(ALWAYS):
        return logs
    unit = "GPU" if "memory_gib" in metrics else "rank"
    parts = [
        f"imbalance {metrics.get('step_imbalance', metrics['imbalance']):.2f}",
        f"{metrics['tokens_per_second_per_rank']:.0f} tok/s/{unit}",
    ]
    if "utilisation" in metrics:
        parts.append(f"{100 * metrics['utilisation']:.0f}% MFU")
    if "memory_gib" in metrics:
        parts.append(f"{metrics['memory_gib']:.0f} GiB")
    others = {name: value for name, value in logs.items() if name not in {PREFIX + metric for metric in metrics}}
    return {**others, "distca": ", ".join(parts)}
