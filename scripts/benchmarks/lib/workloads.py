"""Workloads of a program: each is measured by itself, in all modes, and reported as soon as it was."""

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lib.header import facts_of
from lib.parser import chosen_modes, write_figures
from lib.report import Measured, equal_losses
from lib.tables import Columns, Figures, table_of


# Tokens of a rank and step, measurements of each mode by its name, and further figures of these.
Workload = tuple[int, Mapping[str, Measured], Mapping[str, Figures]]


def add_workloads(parser: argparse.ArgumentParser, known: Collection[str]) -> None:
    """Adds `--workloads`, by default all."""
    parser.add_argument("--workloads", default=",".join(known), help="comma-separated, see above")


def parse_workloads(parser: argparse.ArgumentParser, options: argparse.Namespace, known: Collection[str]) -> None:
    """Replaces the text of `--workloads` by a list of names. Ends with a message if one is not known."""
    options.workloads = chosen_modes(parser, options.workloads, known, "workload") or [*known]


def measure_workloads(
    options: argparse.Namespace,
    config: Any,
    device: torch.device,
    measure: Callable[[str], Workload],
    columns: Columns,
    remark: str,
) -> None:
    """Measures one workload after the other; rank 0 prints a table of each, and writes all so far. Exits at the end if
    losses of the same documents differ: those of all modes but `ideal`. A collective call.

    Args:
        measure: measures the workload of a name.
        columns: of the table, after the mode.
        remark: last part of the line above it.
    """
    figures: dict[str, dict[str, Figures]] = {}
    wrong = []
    for workload in options.workloads:
        tokens, measured, further = measure(workload)
        figures[workload] = {
            name: {**vars(mode), "step_seconds": mode.step_seconds, **further[name]} for name, mode in measured.items()
        }
        if dist.get_rank() == 0:
            options.documents = f"of {workload}"
            header = "; ".join([*facts_of(options, config, tokens, device), remark])
            print(f"{header}\n\n{table_of(columns, figures[workload])}\n", flush=True)
            write_figures(options, workloads=figures)
        losses = {name: mode.loss for name, mode in measured.items() if name != "ideal"}
        if not equal_losses([*losses.values()], options.dtype):
            wrong.append(f"{workload}: {losses}")
    if wrong:
        raise SystemExit(f"losses of the same documents differ: {'; '.join(wrong)}")
