"""Print given: runs `distca plan --batch-size`, and prints its answer, readable at 80 columns."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from distca_hf.analysis.command import DEFAULT_MODEL, PlanProgress
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.given import GivenAnswer, answer
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import Checkpointing
from distca_hf.analysis.profiles.shipped import find_profile, gpu_gib_of
from distca_hf.analysis.simulate.command import DEFAULT_TOKENS_PER_RANK
from distca_hf.analysis.simulate.model import SimulatedModel
from distca_hf.analysis.simulate.request import SimulationRequest
from distca_hf.analysis.tables import block, counted, plain_table, ways_table
from distca_hf.analysis.terminal import Terminal
from distca_hf.errors import ConfigError
from distca_hf.planning.plan_totals import PlanTotals


def run_given(
    lengths: Path,
    *,
    ranks: int,
    batch_size: int,
    context: int | None,
    ranks_per_node: int,
    micro_steps: int,
    model: str | None,
    checkpointing: str,
    liger: bool,
    cluster: str,
    gpu_gib: float | None,
    seed: int,
    as_json: bool,
    without_effect: Sequence[str],
) -> None:
    """Runs `distca plan --batch-size`. Output is printed at the very end, so that an error leaves none.

    Args:
        without_effect: options that were given, and are only for placed batches.

    Raises:
        ConfigError: an option or the model is wrong.
        PackingError: lengths cannot be read, or are too few for a step.
    """
    if without_effect:
        raise ConfigError(
            f"{', '.join(without_effect)}: only for placed batches, and --batch-size {batch_size} is for your own. "
            "Leave out one or the other"
        )
    profile = find_profile(cluster)
    request = SimulationRequest(
        *(SimulatedModel.of(find_model(model or DEFAULT_MODEL)), ranks, DEFAULT_TOKENS_PER_RANK, context, micro_steps),
        ranks_per_node=ranks_per_node,
        checkpointing=cast(Checkpointing, checkpointing),  # the request refuses any other
        liger=liger,
        gpu_gib=gpu_gib_of(profile) if gpu_gib is None else gpu_gib,
        seed=seed,
        batch_size=batch_size,
    )
    progress = PlanProgress()
    with progress.shown():
        with progress.stage(f"reading {lengths.name}"):
            rows = read_lengths(lengths)
        found = answer(request, rows.source, rows.tokens, profile, progress)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), allow_nan=False) + "\n")
    else:
        print_given(found, Terminal())


def print_given(found: GivenAnswer, console: Console) -> None:
    """Prints the answer for people."""
    request, rows, count = found.request, found.row_tokens, len(found.micro_batches)
    returned, placed = found.totals(False), found.totals(True)
    steps = f" x {request.accumulation} micro-steps" if request.accumulation > 1 else ""
    cut = "" if request.context_tokens is None else f", longer rows are cut at {request.context_tokens:,}"
    console.print(
        f"{found.source}: {counted(len(rows), 'row')}, {counted(int(rows.sum()), 'token')}, the longest has "
        f"{int(rows.max()):,}{cut}. {request.model.name} on {counted(request.num_ranks, 'rank')} x "
        f"{counted(request.batch_size or 0, 'row')}{steps}, {request.ranks_per_node} ranks per node, seed "
        f"{request.seed}: your batches, {counted(count, 'micro-batch')} of them.\n",
        highlight=False,
    )
    console.print(f"{found.in_short}\n", highlight=False)
    table = plain_table("as given", "rows placed" if found.places_rows else "tasks moved")
    imbalances: list[tuple[str, PlanTotals, str]] = [
        ("tokens", returned, "token_imbalance"),
        ("attention", returned, "imbalance"),
        ("work of a step, results return" if found.places_rows else "work of a step", returned, "step_imbalance"),
    ]
    if found.places_rows:
        imbalances.append(("work of a step, placed loss", placed, "step_imbalance"))
    for name, totals, of in imbalances:
        table.add_row(name, *(f"{getattr(totals, field) / count:.2f}" for field in (f"{of}_before", of)))
    for loss_is_placed in (False, True)[: 1 + found.places_rows]:
        way = ", placed loss" if loss_is_placed else ", results return" if found.places_rows else ""
        table.add_row(f"  worst micro-batch{way}", *(f"{one:.2f}" for one in found.worst(loss_is_placed)))
    words = (
        "Work of a step: layers, attention, head and loss; training logs its imbalance as distca/step_imbalance. "
        "Padding is not counted. "
    )
    if found.places_rows:
        even = sum(one.stays for one in found.micro_batches)
        words += (
            "Results return to their batch's rank if something reads logits, or the loss of one rank; otherwise head "
            f"and loss run on placed rows. {100 * found.moved_share:.0f} % of the tokens change ranks. {even} of "
            f"{count} micro-batches are even within 2 %: their tokens stay. "
        )
    else:
        words += "Layers carry a state, so tokens stay, and attention tasks move. "
    words += f"Planning takes {1e3 * found.planning_seconds:.1f} ms."
    console.print(block("busiest rank / mean of all", table, words), highlight=False)
    console.print()
    words = (
        f"Simulated like `distca simulate --batch-size {request.batch_size} --batches "
        f"{found.simulated.plain.steps}`: FSDP2 in bf16, with times measured on "
        f"{found.profile.made.device} (--cluster {found.profile.source}), checkpointing {request.checkpointing} "
        f"(--checkpointing), {'with' if request.liger else 'without'} Liger's kernels and loss (--liger); 90 % of "
        f"{request.gpu_gib:g} GiB may be used (--gpu-gib). x plain: speed over plain data parallelism. Bytes: the "
        "most that a GPU sends or receives in a layer's forward pass."
    )
    console.print(block("speed and memory, simulated", ways_table(found.simulated), words), highlight=False)
