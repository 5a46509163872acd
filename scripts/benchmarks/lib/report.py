"""Results of a benchmark step: one header line and one Markdown table, or the same as JSON."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lib.devices import peak_flops
from lib.model import Shape
from lib.tables import Columns, figure, peak_gib


STEP_MS, EXCHANGED_GB = figure("step_seconds", 1e3, 1), figure("exchanged_bytes", 1e-9, 3)
TOKENS_PER_SECOND, MFU = figure("tokens_per_second", 1, 0), figure("utilisation", 100, 1)
# Losses of all modes are of the same tokens: how far they may differ, as a part of the first one.
LARGEST_LOSS_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}


@dataclass(frozen=True)
class Load:
    """The load of a step on each rank."""

    tokens: int  # tokens of one rank
    # Flops of one GPU, nothing counted twice: linear work and attention forward, and twice as much backward.
    model_flops: float
    pairs: tuple[float, ...]  # attended pairs of one rank on average, in all layers of each kind
    peak_flops: float | None  # flops per second of the device; None if not known
    gpus: float = 1.0  # GPUs for each rank of tokens: tensor ranks, which divide the flops of these, and servers


@dataclass
class Measured:
    """One mode, on this rank, or the slowest or largest rank of each figure."""

    seconds: list[float] = field(default_factory=list)  # `[rounds]` seconds of the step
    exchanged_bytes: int = 0  # bytes that attention sends or receives per step, whichever is more
    peak_bytes: int = 0  # most bytes that torch had given out at once; 0 on CPUs
    loss: float = 0.0  # loss of the last step

    @property
    def step_seconds(self) -> float:
        """Returns the median of the rounds."""
        return statistics.median(self.seconds)

    def ratio_to(self, other: "Measured | None", parts: Sequence[float] = ()) -> float | None:
        """Returns the median of the rounds' ratios to another mode, each divided by a part if there are some; None
        without another mode."""
        if other is None:
            return None
        rounds = zip(self.seconds, other.seconds, parts or [1.0] * len(self.seconds), strict=True)
        return statistics.median(own / its / part for own, its, part in rounds)


def equal_losses(losses: Sequence[float], dtype: torch.dtype) -> bool:
    """Returns whether these may be losses of the same tokens, computed in a dtype."""
    return all(abs(loss - losses[0]) <= LARGEST_LOSS_DIFFERENCE[dtype] * abs(losses[0]) for loss in losses)


def load_of(options: argparse.Namespace, shape: Shape, num_ranks: int, device: torch.device, servers: int = 0) -> Load:
    """Returns the load of a step on one of so many data ranks, which share the documents of `lengths`. GPUs of
    attention servers count, too, also in a mode that leaves them idle."""
    tokens = sum(options.lengths) / num_ranks
    pairs = tuple(pairs / num_ranks for pairs in shape.pairs(options.lengths))
    linear = tokens * shape.linear_flops
    return Load(
        tokens=int(tokens),
        model_flops=3 * (linear + shape.attention_flops(pairs)) * num_ranks / (num_ranks + servers),
        pairs=pairs,
        peak_flops=peak_flops(device),
        gpus=options.tp_size * (num_ranks + servers) / num_ranks,
    )


def rates_of(mode: Measured, load: Load) -> dict[str, Any]:
    """Returns the measured figures; `step_seconds`, `tokens_per_second` of a GPU, and `utilisation` as a part of the
    peak, None if that is not known."""
    return {
        **asdict(mode),
        "step_seconds": mode.step_seconds,
        "tokens_per_second": load.tokens / load.gpus / mode.step_seconds,
        "utilisation": load.model_flops / mode.step_seconds / load.peak_flops if load.peak_flops else None,
    }


def figures_of(
    measured: Mapping[str, Measured], errors: Mapping[str, Mapping[str, float]], load: Load
) -> dict[str, dict[str, Any]]:
    """Returns all figures of each mode by name, in seconds, bytes and ratios; None if there is nothing to say.
    `errors` come from `lib.check.check_modes`; there are none if nothing was compared."""
    ideal = measured["ideal"].step_seconds if "ideal" in measured else None
    return {
        name: {
            **rates_of(mode, load),
            "ratio_to_ideal": mode.step_seconds / ideal if ideal else None,
            "largest_error": max(errors[name].values()) if errors else None,
        }
        for name, mode in measured.items()
    }


COLUMNS: Columns = {
    "step ms": STEP_MS,
    "÷ ideal": figure("ratio_to_ideal", 1, 3),
    "tokens/s/GPU": TOKENS_PER_SECOND,
    "MFU %": MFU,
    "exchanged GB": EXCHANGED_GB,
    "peak GiB": peak_gib,
    "error ÷ allowed": figure("largest_error", 1, 2),
}
