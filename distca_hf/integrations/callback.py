"""Callback: what placement brought, in the trainer's logs; the loader's position, in its checkpoints."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distca_hf.integrations.loader import PlacedLoader


# Where `TrainerState` keeps the loader's position: in the states of callbacks, which it writes into checkpoints.
LOADER_STATE = "distca_loader"


class PlacementMetrics(TrainerCallback):  # type: ignore[misc]
    """Adds to every log: balance before and after placement, planning time, waiting time and truncated documents.

    It must come before the callbacks that report logs: they pass on what is in the dict when their turn comes.
    """

    def __init__(self, loader: PlacedLoader) -> None:
        self._loader = loader
        self._seen_wait_seconds = 0.0
        self._seen_plan_seconds = 0.0
        self._seen_micro_batches = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resumes where the loader was, whatever Trainer makes of its step count (with another number of accumulation
        steps it is another place in the data).

        Raises:
            ConfigError: dataset, seed or micro-batches are not those of the checkpoint; names both values.
        """
        saved = state.stateful_callbacks.get(LOADER_STATE)
        if state.global_step > 0 and saved is not None and not args.ignore_data_skip:
            self._loader.load_state_dict(saved)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.stateful_callbacks[LOADER_STATE] = self._loader.state_dict()

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
        metrics = self._since_last_log()
        logs.update(metrics)
        if state.log_history:  # already holds a copy of this log
            state.log_history[-1].update(metrics)

    def _since_last_log(self) -> dict[str, float]:
        times = self._loader.times
        micro_batches = times.micro_batches - self._seen_micro_batches
        wait_seconds = times.wait_seconds - self._seen_wait_seconds
        plan_seconds = times.plan_seconds - self._seen_plan_seconds
        self._seen_micro_batches, self._seen_wait_seconds = times.micro_batches, times.wait_seconds
        self._seen_plan_seconds = times.plan_seconds
        facts = list(self._loader.history)[-micro_batches:] if micro_batches else []
        if not facts:
            return {}
        return {
            "distca/imbalance_before": sum(fact.imbalance_before for fact in facts) / len(facts),
            "distca/imbalance": sum(fact.imbalance for fact in facts) / len(facts),
            "distca/plan_ms": 1e3 * plan_seconds / micro_batches,
            "distca/loader_wait_ms": 1e3 * wait_seconds / micro_batches,
            "distca/documents_truncated": float(self._loader.documents_truncated),
        }
