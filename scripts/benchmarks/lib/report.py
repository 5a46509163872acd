"""Results of a benchmark step: one header line and one Markdown table, or the same as JSON."""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lib.model import Shape
from lib.rates import KernelSeconds, Rates, peak_flops
from lib.tables import Columns, Figures, figure, peak_gib


STEP_MS, EXCHANGED_GB = figure("step_seconds", 1e3, 1), figure("exchanged_bytes", 1e-9, 3)
TOKENS_PER_SECOND, MFU = figure("tokens_per_second", 1, 0), figure("utilisation", 100, 1)


@dataclass(frozen=True)
class Load:
    """The load of a step on each rank, all micro-steps together."""

    tokens: int  # tokens of one rank
    # Flops of one rank, nothing counted twice: linear work and attention forward, and twice as much backward.
    model_flops: float
    executed_linear_flops: float  # flops of linear work only, with forward once more if it is checkpointed
    pairs: tuple[float, ...]  # attended pairs of one rank on average, in all layers of each kind
    peak_flops: float | None  # flops per second of the device; None if not known
    tensor_ranks: int = 1  # GPUs that hold the same tokens, and divide the flops of these


@dataclass
class Measured:
    """One mode, on this rank, or the slowest or largest rank of each figure."""

    seconds: list[float] = field(default_factory=list)  # `[rounds]` seconds of the step
    # `[rounds]` seconds with exchanges replaced by local copies; empty if that was not measured.
    silent_seconds: list[float] = field(default_factory=list)
    exchanged_bytes: int = 0  # bytes that attention sends or receives per step, whichever is more
    peak_bytes: int = 0  # most bytes that torch had given out at once; 0 on CPUs
    loss: float = 0.0  # loss of the last step

    @property
    def step_seconds(self) -> float:
        """Returns the median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def exposed_seconds(self) -> float | None:
        """Returns the seconds that exchanges add to a step, the median of rounds compared one by one; None if that was
        not measured."""
        if not self.silent_seconds:
            return None
        return statistics.median(loud - silent for loud, silent in zip(self.seconds, self.silent_seconds, strict=True))


def load_of(options: argparse.Namespace, shape: Shape, num_ranks: int, device: torch.device) -> Load:
    """Returns the load of a step on one of so many data ranks, which share the documents of `lengths`."""
    tokens = options.accumulation * sum(options.lengths) / num_ranks
    pairs = tuple(options.accumulation * pairs / num_ranks for pairs in shape.pairs(options.lengths))
    linear = tokens * shape.linear_flops
    return Load(
        tokens=int(tokens),
        model_flops=3 * (linear + shape.attention_flops(pairs)),
        executed_linear_flops=(3 + (options.checkpointing != "none")) * linear,
        pairs=pairs,
        peak_flops=peak_flops(device),
        tensor_ranks=options.tp_size,
    )


def rates_of(mode: Measured, load: Load) -> dict[str, Any]:
    """Returns the measured figures; `step_seconds`, `tokens_per_second` of a GPU, and `utilisation` as a part of the
    peak, None if that is not known."""
    return {
        **asdict(mode),
        "step_seconds": mode.step_seconds,
        "tokens_per_second": load.tokens / load.tensor_ranks / mode.step_seconds,
        "utilisation": load.model_flops / mode.step_seconds / load.peak_flops if load.peak_flops else None,
    }


def figures_of(
    measured: Mapping[str, Measured],
    kernels: Mapping[str, KernelSeconds],
    errors: Mapping[str, Mapping[str, float]],
    rates: Rates,
    load: Load,
) -> dict[str, dict[str, Any]]:
    """Returns all figures of each mode by name, in seconds, bytes and ratios; None if there is nothing to say.
    `errors` come from `lib.check.check_modes`; there are none if nothing was compared."""
    ideal = measured["ideal"].step_seconds if "ideal" in measured else None
    floor = rates.floor_seconds(load.executed_linear_flops, load.pairs)
    return {
        name: {
            **rates_of(mode, load),
            "ratio_to_ideal": mode.step_seconds / ideal if ideal else None,
            "ratio_to_floor": mode.step_seconds / floor,
            "exposed_seconds": mode.exposed_seconds,
            "kernels": kernels[name].figures if name in kernels else None,
            "largest_error": max(errors[name].values()) if errors else None,
        }
        for name, mode in measured.items()
    }


def _kernels(of: Figures) -> str:
    kernels = of["kernels"]
    return " / ".join(f"{kernels[name]['max_over_mean']:.3f}" for name in ("forward", "backward")) if kernels else "-"


COLUMNS: Columns = {
    "step ms": STEP_MS,
    "÷ ideal": figure("ratio_to_ideal", 1, 3),
    "÷ floor": figure("ratio_to_floor", 1, 3),
    "tokens/s/GPU": TOKENS_PER_SECOND,
    "MFU %": MFU,
    "exchanged GB": EXCHANGED_GB,
    "exposed ms": figure("exposed_seconds", 1e3, 1),
    "kernels max/mean": _kernels,
    "peak GiB": peak_gib,
    "error ÷ allowed": figure("largest_error", 1, 2),
}
