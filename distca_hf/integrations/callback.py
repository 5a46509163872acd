"""Callback: checks the model, keeps the loader's position in checkpoints, and logs what balancing brought."""

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.integrations.loader import PlacedLoader
from distca_hf.integrations.model import enable, packs_of
from distca_hf.runtime.plans import PlanFacts
from distca_hf.telemetry import LoaderTimes


if TYPE_CHECKING:
    from distca_hf.integrations.plugin import DistCAPlugin

# Where `TrainerState` keeps the loader's position: among the states of callbacks, which it writes into checkpoints.
LOADER_STATE = "distca_loader"


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
    `distca/tokens_per_second` and `distca/documents_truncated`. `plugin.attach` puts it before the callbacks that
    report logs to trackers.

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

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Checks and enables the model before it is wrapped.

        Raises:
            UnsupportedAttentionError, ConfigError: the model cannot run on distca.
        """
        self.watch(enable(model, self._plugin))

    def watch(self, model: Any) -> None:
        """Reports on this enabled model."""
        self._model = model

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resumes where the loader was, whatever Trainer makes of its step count: with another number of accumulation
        steps, or of ranks, it is another place in the data.

        Raises:
            ConfigError: the dataset or its order are not those of the checkpoint; names both values.
        """
        saved = state.stateful_callbacks.get(LOADER_STATE)
        if self._loader is not None:
            self._loader.restart()
            if state.global_step > 0 and saved is not None and not args.ignore_data_skip:
                self._loader.load_state_dict(saved)
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._loader is not None:
            state.stateful_callbacks[LOADER_STATE] = self._loader.state_dict()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._loader is not None:
            self._loader.close()

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
        """A collective call: every rank logs the same steps."""
        source: PlanSource | None = self._loader if self._loader is not None else packs_of(self._model)
        if source is None:  # one rank, nothing planned
            return {}
        now, times = time.perf_counter(), source.times
        new = LoaderTimes(
            wait_seconds=times.wait_seconds - self._seen.wait_seconds,
            plan_seconds=times.plan_seconds - self._seen.plan_seconds,
            micro_batches=times.micro_batches - self._seen.micro_batches,
        )
        transport = self._plugin.transport(args.device)
        sent_bytes = transport.traffic.bytes_sent - self._seen_bytes
        seconds = now - self._began
        self._seen, self._seen_bytes, self._began = LoaderTimes(**vars(times)), transport.traffic.bytes_sent, now
        facts = list(source.history)[-new.micro_batches :] if new.micro_batches else []
        if not facts:
            return {}
        measured = {
            "wait_ns": round(1e9 * new.wait_seconds),
            "plan_ns": round(1e9 * new.plan_seconds),
            "sent_bytes": sent_bytes,
        }
        by_rank = Agreement.start(transport, Occasion.REPORT, step, {}, measured).wait()
        wait_ns, plan_ns, sent = (max(values) / new.micro_batches for values in by_rank.values())
        return {
            "distca/imbalance_before": sum(fact.imbalance_before for fact in facts) / len(facts),
            "distca/imbalance": sum(fact.imbalance for fact in facts) / len(facts),
            "distca/mbytes_sent_max": sent / 1e6,
            "distca/plan_ms": plan_ns / 1e6,
            "distca/loader_wait_ms": wait_ns / 1e6,
            "distca/tokens_per_second": sum(fact.num_tokens for fact in facts) / seconds,
            "distca/documents_truncated": float(self._loader.documents_truncated if self._loader is not None else 0),
        }
