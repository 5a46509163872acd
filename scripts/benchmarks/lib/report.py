"""Results of a benchmark step: a line with versions, device, model and documents, and figures of a Markdown table."""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers

import distca_hf
from lib.documents import spelled_out
from lib.model import Shape
from lib.tables import Columns, figure, peak_gib
from lib.wires import peak_flops


STEP_MS, EXCHANGED_GB = figure("step_seconds", 1e3, 1), figure("exchanged_bytes", 1e-9, 3)
TOKENS_PER_SECOND, MFU = figure("tokens_per_second", 1, 0), figure("utilisation", 100, 1)
# Losses of all modes are of the same tokens: how far they may differ, as a part of the first one.
LARGEST_LOSS_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
# Variables that change a measurement.
SHOWN_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_MAX_P2P_NCHANNELS", "DISTCA_EXCHANGE_CHUNKS", "PYTORCH_ALLOC_CONF")


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


def machine_facts(device: torch.device) -> list[str]:
    """Returns two parts: versions of packages; number and kind of devices, with variables that change a figure."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    set_here = [f", {variable}={os.environ[variable]}" for variable in SHOWN_VARIABLES if variable in os.environ]
    return [
        f"distca_hf {distca_hf.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        f"{dist.get_world_size()} x {name}{''.join(set_here)}",
    ]


def facts_of(options: argparse.Namespace, config: Any, tokens: int, device: torch.device) -> list[str]:
    """Returns the parts of that line, for a model and so many tokens of a rank and step."""
    dtype, reduce_dtype = (str(one).removeprefix("torch.") for one in (options.dtype, options.reduce_dtype))
    reduced = f"FSDP2, gradients summed in {reduce_dtype}" if options.fsdp else "no FSDP"
    divided = {
        f", {options.dp_replicate_size} replicas": options.dp_replicate_size,
        f", experts over {options.ep_size} ranks": options.ep_size,
        f", layers over {options.tp_size} tensor ranks": options.tp_size,
    }
    return [
        *machine_facts(device),
        f"{config.model_type}, {config.get_text_config().num_hidden_layers} layers",
        dtype,
        f"documents {spelled_out(options.documents)}",
        f"{tokens} tokens per rank and step",
        f"checkpointing {options.checkpointing}, {reduced}"
        + "".join(words for words, size in divided.items() if size > 1)
        + ", liger" * options.liger,
    ]
