"""Callback: checks the model, and logs what balancing brought."""

import sys
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.errors import ConfigError
from distca_hf.integrations.drift import WeightsCheck
from distca_hf.integrations.enabling import enable
from distca_hf.integrations.forward_watch import watch_of
from distca_hf.integrations.loader import PlacedLoader
from distca_hf.integrations.preemption import LeaveOnSignal
from distca_hf.planning.plan_facts import PlanFacts
from distca_hf.telemetry import LoaderTimes, get_logger


if TYPE_CHECKING:
    from distca_hf.integrations.plugin import DistCAPlugin

log = get_logger(__name__)


class PlanSource(Protocol):
    """Where plans come from: the placed loader, or the planner of packs."""

    history: deque[PlanFacts]
    times: LoaderTimes


class DistCACallback(TrainerCallback):  # type: ignore[misc]
    """Gives a Trainer that packs by itself balanced attention: tokens stay, attention tasks move.

    ```python
    Trainer(model=model, args=args, train_dataset=packed, callbacks=[distca_hf.DistCACallback(plugin)])
    ```

    It adds to every log, over the micro-batches since the last one and all ranks: `distca/imbalance_before` and
    `distca/imbalance` (mean of max/mean work), `distca/mbytes_sent_max` (by the rank that sends most, per
    micro-batch), `distca/plan_ms`, `distca/loader_wait_ms` (of the slowest rank, per micro-batch),
    `distca/wait_ms_max` (of the rank that waited longest for others, per micro-batch), `distca/slowest_rank` (the one
    that waited least), `distca/tokens_per_second` and `distca/documents_truncated`. It comes before the callbacks that
    report logs to trackers.

    It also leaves on SIGTERM or Ctrl-C (see `LeaveOnSignal`, which `plugin.attach` adds as the last callback) and
    compares weights every `check_weights_every_steps`.

    Args:
        plugin: settings and transport.
        loader: the placed loader of this training; None if its batches come from elsewhere.
    """

    def __init__(self, plugin: "DistCAPlugin", loader: PlacedLoader | None = None) -> None:
        self._plugin = plugin
        self._loader = loader
        self._model: Any = None
        self._began = time.perf_counter()
        self._seen = LoaderTimes()
        self._seen_bytes = 0
        self._seen_waiting = 0.0
        self._weights: WeightsCheck | None = None
        self._leave: LeaveOnSignal | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Checks and enables the model before it is wrapped.

        Raises:
            UnsupportedAttentionError, ConfigError: the model cannot run on distca.
            ConfigError: packs are to be sorted, which takes another sampler than Trainer's.
        """
        if self._plugin.sort_packs:
            raise ConfigError(
                "sort_packs chooses which rank runs which pack, and a callback cannot tell Trainer so: call "
                "plugin.attach(trainer) instead of adding DistCACallback, or set sort_packs to False"
            )
        self.watch(enable(model, self._plugin))
        leave = LeaveOnSignal(self._plugin.transport) if self._plugin.save_on_signal else None
        handler = _handler_of_this_event(self)
        if handler is None:
            log.warning("DistCACallback stays where it is among callbacks: trackers before it do not get its metrics")
            self._leave = leave
            return
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
        if leave is not None:
            handler.add_callback(leave)

    def watch(self, model: Any) -> None:
        """Reports on this enabled model."""
        self._model = model

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins to measure.

        Raises:
            ConfigError: the model does not follow this callback's plugin.
        """
        self._check_model()
        self._began = time.perf_counter()
        if self._leave is not None:
            self._leave.on_train_begin(args, state, control)

    def _check_model(self) -> None:
        """Raises ConfigError unless the model follows this callback's plugin."""
        watch = watch_of(self._model)
        if watch is None:
            raise ConfigError(
                "DistCACallback came too late to enable the model: give it to Trainer in callbacks=[...] instead of "
                "trainer.add_callback, or call plugin.attach(trainer)"
            )
        if watch.plugin is not self._plugin:
            raise ConfigError(
                "the model was enabled with another plugin after this Trainer got its own: signals, metrics and "
                "batches would go separate ways. Use one plugin, or call plugin.attach(trainer) again"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Compares weights, where that is due.

        Raises:
            PlanMismatchError: weights were compared after this step, and differ.
        """
        every = self._plugin.check_weights_every_steps
        if every and state.global_step % every == 0:
            if self._weights is None:
                self._weights = WeightsCheck(self._plugin.transport(args.device))
            self._weights.compare(model, state.global_step)
        if self._leave is not None:
            self._leave.on_step_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._leave is not None:
            self._leave.on_epoch_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._leave is not None:
            self._leave.on_train_end(args, state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        metrics = self._since_last_log(args, state.global_step)
        logs.update(metrics)
        if state.log_history:  # already holds a copy of this log
            state.log_history[-1].update(metrics)

    def _since_last_log(self, args: TrainingArguments, step: int) -> dict[str, float]:
        """Returns metrics of the micro-batches since the last log. A collective call: every rank logs the same
        steps."""
        watch = watch_of(self._model)
        source: PlanSource | None = self._loader
        if source is None and watch is not None:
            source = watch.packs
        if source is None:  # one rank, nothing planned
            return {}
        now, times = time.perf_counter(), source.times
        new = LoaderTimes(
            wait_seconds=times.wait_seconds - self._seen.wait_seconds,
            plan_seconds=times.plan_seconds - self._seen.plan_seconds,
            micro_batches=times.micro_batches - self._seen.micro_batches,
        )
        transport = self._plugin.transport(args.device)
        traffic = transport.traffic
        sent_bytes, waited = traffic.bytes_sent - self._seen_bytes, traffic.waited_seconds - self._seen_waiting
        seconds = now - self._began
        self._seen, self._began = LoaderTimes(**vars(times)), now
        self._seen_bytes, self._seen_waiting = traffic.bytes_sent, traffic.waited_seconds
        facts = list(source.history)[-new.micro_batches :] if new.micro_batches else []
        if not facts:
            return {}
        measured = {
            "wait_ns": round(1e9 * new.wait_seconds),
            "plan_ns": round(1e9 * new.plan_seconds),
            "sent_bytes": sent_bytes,
            "waited_ns": round(1e9 * waited),
        }
        by_rank = Agreement.start(transport, Occasion.REPORT, step, {}, measured).wait()
        wait_ns, plan_ns, sent, waited_ns = (max(values) / new.micro_batches for values in by_rank.values())
        return {
            "distca/imbalance_before": sum(fact.imbalance_before for fact in facts) / len(facts),
            "distca/imbalance": sum(fact.imbalance for fact in facts) / len(facts),
            "distca/mbytes_sent_max": sent / 1e6,
            "distca/plan_ms": plan_ns / 1e6,
            "distca/loader_wait_ms": wait_ns / 1e6,
            "distca/wait_ms_max": waited_ns / 1e6,
            "distca/slowest_rank": float(np.argmin(by_rank["waited_ns"])),
            "distca/tokens_per_second": sum(fact.num_tokens for fact in facts) / seconds,
            "distca/documents_truncated": float(self._loader.documents_truncated if self._loader is not None else 0),
        }


def _handler_of_this_event(callback: TrainerCallback) -> CallbackHandler | None:
    """Returns the list of callbacks that is being called; None where it is not found.

    Trainer puts callbacks of the user behind its own, among them those that report to trackers, and passes everything
    to them but the list they are in. So it is taken from the caller of the event, `CallbackHandler.call_event`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            return handler
        frame = frame.f_back
    return None
