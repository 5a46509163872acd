"""Results of trainings in several modes: a table, and how far their losses lie apart."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lib.tables import markdown, number


COLUMNS = (
    "mode",
    "step ms",
    "÷ first",
    "tokens/s/GPU",
    "MFU %",
    "peak GiB",
    "held before GiB",
    "loss at first",
    "at last",
    "furthest from first mode",
    "planned max/mean",
)


def furthest(run: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, int]:
    """Returns the largest difference of losses of the same step, NaN if one of them is NaN, and the first step that
    has it, counted from 1."""
    differences = [abs(a - b) for a, b in zip(run["losses"], other["losses"], strict=True)]
    at = max(range(len(differences)), key=lambda step: (math.isnan(differences[step]), differences[step]))
    return differences[at], at + 1


def furthest_in_words(run: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the largest difference of losses, and its step if they differ."""
    difference, step = furthest(run, other)
    return f"{difference:.1e}" + f" (step {step})" * (difference != 0)


def step_figures(run: Mapping[str, Any], warmup: int) -> dict[str, float | None]:
    """Returns medians of the steps behind the first ones: `step_seconds`, `tokens_per_second` of a GPU, and
    `utilisation` as a part of the peak, None if that is not known.

    Args:
        run: figures of a training, as `lib.training.run.train` returns them.
        warmup: steps that do not count.
    """
    timed = range(warmup, len(run["seconds"]))
    peak = run["peak_flops"]
    return {
        "step_seconds": statistics.median(run["seconds"][step] for step in timed),
        "tokens_per_second": statistics.median(run["tokens"][step] / run["seconds"][step] for step in timed),
        "utilisation": statistics.median(run["model_flops"][step] / run["seconds"][step] / peak for step in timed)
        if peak
        else None,
    }


def table(runs: Sequence[Mapping[str, Any]], warmup: int) -> str:
    """Returns a Markdown table with a row for each training; the first one is what the others are compared with."""
    first = step_figures(runs[0], warmup)["step_seconds"]
    assert first is not None
    rows = []
    for run in runs:
        figures = step_figures(run, warmup)
        rows.append(
            (
                run["mode"],
                number(figures["step_seconds"], 1e3, 0),
                number(figures["step_seconds"], 1 / first, 3),
                number(figures["tokens_per_second"], 1, 0),
                number(figures["utilisation"], 100, 1),
                number(run["peak_bytes"] or None, 2**-30, 1),
                number(run["held_before_bytes"] if run["peak_bytes"] else None, 2**-30, 1),
                number(run["losses"][0], 1, 4),
                number(run["losses"][-1], 1, 4),
                furthest_in_words(runs[0], run),
                number(statistics.mean(run["imbalance"]) if run["imbalance"] else None, 1, 4),
            )
        )
    return markdown(COLUMNS, rows)
