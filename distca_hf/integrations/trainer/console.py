"""Console: the form in which a Trainer prints our metrics. History and trackers get them as numbers, by name."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


PREFIX = "distca/"
ALWAYS = ("imbalance", "tokens_per_second_per_rank")
SOMETIMES = ("utilisation", "memory_gib")


def print_in_short(callbacks: Iterable[TrainerCallback], replace: Callable[[object, str, object], None]) -> None:
    """Lets the callbacks that print logs print our metrics in few words: with four names more a line is too long.

    Args:
        callbacks: of a Trainer.
        replace: sets an attribute of an object.
    """
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
    """Prints a log in short."""
    return print_log(args, state, control, logs=None if logs is None else in_short(logs), **kwargs)


def in_short(logs: Mapping[str, float]) -> Mapping[str, float | str]:
    """Returns a log with the basic metrics as one entry of at most 52 characters; all else stays."""
    metrics = {name: logs[PREFIX + name] for name in (*ALWAYS, *SOMETIMES) if PREFIX + name in logs}
    if not metrics.keys() >= set(ALWAYS):
        return logs
    unit = "GPU" if "memory_gib" in metrics else "rank"
    words = [
        f"imbalance {metrics['imbalance']:.2f}",
        f"{metrics['tokens_per_second_per_rank']:.0f} tok/s/{unit}",
    ]
    if "utilisation" in metrics:
        words.append(f"{100 * metrics['utilisation']:.0f}% MFU")
    if "memory_gib" in metrics:
        words.append(f"{metrics['memory_gib']:.0f} GiB")
    others = {name: value for name, value in logs.items() if name not in {PREFIX + metric for metric in metrics}}
    return {**others, "distca": ", ".join(words)}
