"""Print answer: the answer of `distca plan` in the terminal, readable from 40 columns on."""

from collections.abc import Iterator

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from distca_hf.analysis.answer import EpochFigures, PlanAnswer
from distca_hf.analysis.first_step import Outcome, StepReport
from distca_hf.analysis.tables import (
    block,
    compare_table,
    counted,
    estimates_tables,
    in_bytes,
    in_gib,
    in_range,
    plain_table,
)
from distca_hf.arrays import IntArray, ceil_div


# Maximum number of bars; with more ranks several share a bar, which shows the heaviest of them.
MOST_BARS = 32
# Minimum ratio of step times that is called faster; runs differ by about this much from each other.
WORTH_IT = 1.02
# Characters beside the two bars of a rank, and range of the length of a bar.
COLUMNS_BESIDE_BARS = 22
FEWEST_BAR_CHARACTERS, MOST_BAR_CHARACTERS = 4, 24


def print_answer(answer: PlanAnswer, console: Console) -> None:
    """Prints documents, the answer in two sentences, the epoch, estimates, choices, and the first step with
    baselines."""
    blocks: list[RenderableType] = [_world(answer), in_short(answer)]
    blocks.append(_epoch(answer.epoch, answer.step.request.layout))
    blocks += estimates_tables(answer, console.width)
    blocks.append(_figures(answer.step))
    if answer.step.baselines:
        blocks.append(compare_table(answer.step, console.width))
    blocks.append(_bars(answer.step, console))
    for number, each in enumerate(blocks):
        if number:
            console.print()
        console.print(each, highlight=False)


def _world(answer: PlanAnswer) -> str:
    """Returns sentences about the documents, the ranks, the model and the way of planning."""
    step, epoch = answer.step, answer.epoch
    request = step.request
    steps = f" x {request.micro_steps} micro-steps" if request.micro_steps > 1 else ""
    if step.origin is None:
        packed = "exactly these documents"
    else:
        packed = f"{counted(epoch.micro_batches, 'micro-batch')} in an epoch, seed {step.origin.seed}"
    return (
        f"{step.source}: {counted(epoch.documents, 'document')}, {counted(epoch.tokens, 'token')}, the longest has "
        f"{epoch.longest_document_tokens:,}. {request.model.name} on {counted(request.num_ranks, 'rank')} x "
        f"{counted(request.tokens_per_rank, 'token')}{steps}, {request.ranks_per_node} ranks per node, "
        f"{request.layout} layout: {packed}."
    )


def in_short(answer: PlanAnswer) -> str:
    """Returns the answer in two sentences: the change of balance, then the speed and memory of that."""
    before, after = answer.epoch.imbalance_before.mean, answer.epoch.imbalance.mean
    words = (
        f"In short: the busiest rank has {before:.2f} times the mean attention work, with distca {after:.2f} times."
    )
    if answer.estimates is None:
        return words
    faster, memory = answer.estimates.speed.over_plain, answer.estimates.memory["fsdp2"]
    fits = "" if memory.total <= answer.estimates.room_bytes else "more than there is: "
    words += f" Steps get {faster:.2f} times as fast" if faster >= WORTH_IT else " Steps hardly get faster"
    return f"{words}; a GPU needs {fits}{in_gib(memory.total)} GiB with FSDP2. Estimated, as below."


def _epoch(epoch: EpochFigures, layout: str) -> RenderableType:
    """Returns the table of the spread of imbalance, before and after."""
    table = plain_table("in order", layout)
    before, after = epoch.imbalance_before, epoch.imbalance
    for name, old, new in (
        ("mean over the epoch", before.mean, after.mean),
        ("95 % of micro-batches are below", before.p95, after.p95),
        ("worst micro-batch", before.worst, after.worst),
    ):
        table.add_row(name, f"{old:.3f}", f"{new:.4f}")
    table.add_row("micro-batches looked at", f"{epoch.micro_batches:,}", f"{epoch.planned_micro_batches:,}")
    return block("attention of the busiest rank / mean of all", table)


def _figures(report: StepReport) -> RenderableType:
    """Returns the table of figures of the first optimizer step."""
    table = plain_table("")
    figures, outcome = report.planned.figures, report.planned
    for name, value in (
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("longest document", f"{report.longest_document_tokens:,} tokens"),
        ("imbalance, documents in order", f"{report.imbalance_before:.3f}"),
        ("imbalance, planned", f"{figures.imbalance:.4f}"),
        ("tokens per rank", in_range(figures.tokens_min, figures.tokens_max)),
        ("bytes per layer, forward: total", in_bytes(figures.bytes_total)),
        ("  largest rank", in_bytes(figures.bytes_max_rank)),
        ("  largest rank, between nodes", in_bytes(figures.bytes_internode_max)),
        ("  total / bound", _ratio(outcome)),
        ("documents that are cut", f"{report.cut_documents:,}, into {counted(report.shards, 'task')}"),
        ("planning time", f"{1e3 * outcome.planning_seconds:.1f} ms"),
        ("fingerprint", outcome.fingerprint),
    ):
        table.add_row(name, value)
    return block(_first_step(report), table)


def _first_step(report: StepReport) -> str:
    """Returns the place of the first step in a training, in words."""
    if report.origin is None:
        return "exactly these documents"
    steps, origin = report.request.micro_steps, report.origin
    first = f"the first {steps}" if steps > 1 else "the first"
    return (
        f"{first} of {counted(origin.epoch_micro_batches, 'micro-batch')} of epoch {origin.epoch}, seed {origin.seed}"
    )


def _ratio(outcome: Outcome) -> str:
    """Returns bytes over their lower bound, or a dash if there is none."""
    bound = outcome.bound_bytes_total
    if bound is None:
        return "-"
    return f"{outcome.figures.bytes_total / bound:.2f} ({in_bytes(bound)})" if bound else "bound: 0 B"


def _bars(report: StepReport, console: Console) -> RenderableType:
    """Returns bars of the ranks' work over the mean, before and after."""
    unicode = console.encoding.lower().startswith("utf")
    characters = min(MOST_BAR_CHARACTERS, max(FEWEST_BAR_CHARACTERS, (console.width - COLUMNS_BESIDE_BARS) // 2))
    num_ranks = report.request.num_ranks
    each = ceil_div(num_ranks, MOST_BARS)
    before = list(_heaviest(report.work_before, each))
    planned = list(_heaviest(report.work, each))
    longest = max(*before, *planned, 1.0)
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks" if each > 1 else "rank", justify="right", no_wrap=True)
    for title in ("in order", "planned"):
        table.add_column("", justify="right", no_wrap=True)
        table.add_column(title, no_wrap=True)
    for bar, (old, new) in enumerate(zip(before, planned, strict=True)):
        last = min(num_ranks, (bar + 1) * each) - 1
        ranks = f"{bar * each}-{last}" if last > bar * each else str(last)
        old_bar, new_bar = (_bar(work / longest * characters, unicode) for work in (old, new))
        table.add_row(ranks, f"{old:.2f}", old_bar, f"{new:.2f}", new_bar)
    notes = [f"each bar: the heaviest of {each} ranks"] if each > 1 else []
    return block("work of each rank / mean", table, *notes)


def _heaviest(work: IntArray, each: int) -> Iterator[float]:
    """Yields the work over the mean of the heaviest rank of every `each` neighbours."""
    mean = max(1, int(work.sum())) / len(work)
    for first in range(0, len(work), each):
        yield float(np.max(work[first : first + each])) / mean


def _bar(characters: float, unicode: bool) -> str:
    """Returns a bar of a length in characters, exact to an eighth of one if the terminal has Unicode."""
    eighths = round(characters * 8)
    if not unicode:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
