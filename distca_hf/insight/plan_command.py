"""Plan command: what `distca plan` does, from a file of lengths to text, picture or JSON."""

import gc
import json
from pathlib import Path
from typing import cast

from rich.console import Console

from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.insight.draw import divide_batch, draw_step
from distca_hf.insight.lengths import read_lengths
from distca_hf.insight.models import preset, read_model_config
from distca_hf.insight.plan_picture import check_can_draw, draw_report
from distca_hf.insight.plan_report import make_report
from distca_hf.insight.plan_request import PlanRequest
from distca_hf.insight.plan_table import print_report


DEFAULT_MODEL = "llama3-8b"


def run_plan(
    lengths: Path,
    *,
    ranks: int,
    tokens_per_rank: int,
    ranks_per_node: int,
    micro_steps: int,
    model: str | None,
    model_config: Path | None,
    layout: str,
    overlong: str,
    bytes_limit: int | None,
    seed: int,
    lengths_are_batch: bool,
    compare: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Reads, plans, and prints at the very end, so that an error leaves nothing behind.

    Raises:
        ConfigError: an option, the model, or the picture's path is wrong.
        PackingError: lengths cannot be read, or do not fit.
    """
    if model is not None and model_config is not None:
        raise ConfigError(f"--model {model} and --model-config {model_config} exclude each other")
    if seed < 0:
        raise ConfigError(f"--seed {seed} must be at least 0")
    shape = preset(model or DEFAULT_MODEL) if model_config is None else read_model_config(model_config)
    policy = cast(OverlongPolicy, overlong)  # the request refuses any other
    request = PlanRequest(ranks, tokens_per_rank, ranks_per_node, micro_steps, shape, layout, policy, bytes_limit)
    if plot is not None:
        check_can_draw(plot)
    documents = read_lengths(lengths)
    if lengths_are_batch:
        step = divide_batch(documents.tokens, request)
    else:
        step = draw_step(documents.tokens, request, seed)
    # What imports and reading left for the garbage collector is no part of the time that planning takes.
    gc.collect()
    gc.freeze()
    report = make_report(request, step, documents.source, compare)
    if plot is not None:
        draw_report(report, plot)
    console = Console(width=None if Console().is_terminal else 120)
    if as_json:
        console.file.write(json.dumps(report.as_json(), allow_nan=False) + "\n")
    else:
        print_report(report, console)
