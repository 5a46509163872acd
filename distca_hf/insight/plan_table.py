"""Plan table: a plan report for people, in the terminal."""

from collections.abc import Iterator

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table

from distca_hf.cost import IntArray
from distca_hf.insight.plan_report import Outcome, PlanReport


# More ranks than bars share a bar: it shows the heaviest of them.
MOST_BARS = 32
BAR_CHARACTERS = 24


def print_report(report: PlanReport, console: Console) -> None:
    """Prints the figures, the baselines if there are any, and a bar for every rank."""
    console.print(_world(report), highlight=False)
    console.print(_figures(report))
    if report.baselines:
        console.print(_baselines(report))
    console.print(_bars(report, console.encoding.lower().startswith("utf")))


def _world(report: PlanReport) -> str:
    """Returns lines about the ranks, the model and the way of planning."""
    request = report.request
    steps = f" x {request.micro_steps} micro-steps" if request.micro_steps > 1 else ""
    return (
        f"{report.source}: {report.documents:,} documents, {report.tokens:,} tokens on {request.num_ranks} ranks x "
        f"{request.tokens_per_rank:,} tokens{steps}, {request.ranks_per_node} ranks per node, {request.model.name}, "
        f"{request.layout} layout; {_place_in_training(report)}"
    )


def _place_in_training(report: PlanReport) -> str:
    """Returns which micro-batches of a training these are."""
    if report.drawn is None:
        return "exactly these documents"
    steps = report.request.micro_steps
    first = f"the first {steps}" if steps > 1 else "the first"
    drawn = report.drawn
    return f"{first} of {drawn.epoch_micro_batches:,} micro-batches of epoch {drawn.epoch}, seed {drawn.seed}"


def _figures(report: PlanReport) -> RenderableType:
    """Returns two columns: names of figures, and their values."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    figures, outcome = report.planned.figures, report.planned
    for name, value in (
        ("imbalance (max/mean work), documents in order", f"{report.imbalance_before:.3f}"),
        ("imbalance, planned", f"{figures.imbalance:.4f}"),
        ("tokens per rank", _range(figures.tokens_min, figures.tokens_max)),
        ("bytes per layer, forward: total", _bytes(figures.bytes_total)),
        ("    largest rank", _bytes(figures.bytes_max_rank)),
        ("    largest rank, between nodes", _bytes(figures.bytes_internode_max)),
        ("    total / bound", _ratio(outcome)),
        ("longest document", f"{report.longest_document_tokens:,} tokens"),
        ("documents that are cut, into tasks", f"{report.cut_documents:,}, {report.shards:,}"),
        ("planning time", f"{1e3 * outcome.planning_seconds:.1f} ms"),
        ("fingerprint", outcome.fingerprint),
    ):
        table.add_row(name, value)
    return table


def _baselines(report: PlanReport) -> RenderableType:
    """Returns one row for each way to run the same documents."""
    table = Table(title="the same documents, run otherwise", title_justify="left")
    for column in ("", "imbalance", "tokens per rank", "bytes total", "largest rank", "between nodes", "planning"):
        table.add_column(column, justify="right" if column else "left")
    for name, outcome in (("distca", report.planned), *report.baselines.items()):
        figures = outcome.figures
        table.add_row(
            name,
            f"{figures.imbalance:.3f}",
            _range(figures.tokens_min, figures.tokens_max),
            _bytes(figures.bytes_total),
            _bytes(figures.bytes_max_rank),
            _bytes(figures.bytes_internode_max),
            f"{1e3 * outcome.planning_seconds:.1f} ms",
        )
    return table


def _bars(report: PlanReport, unicode: bool) -> RenderableType:
    """Draws the work of the ranks over the mean, before and after."""
    num_ranks = report.request.num_ranks
    each = -(-num_ranks // MOST_BARS)
    before = list(_heaviest(report.work_before, each))
    planned = list(_heaviest(report.work, each))
    longest = max(*before, *planned, 1.0)
    table = Table(box=None, title="work of each rank / mean", title_justify="left")
    table.add_column("ranks" if each > 1 else "rank", justify="right")
    for title in ("in order", "planned"):
        table.add_column("", justify="right")
        table.add_column(title, no_wrap=True)
    for bar, (old, new) in enumerate(zip(before, planned, strict=True)):
        last = min(num_ranks, (bar + 1) * each) - 1
        ranks = f"{bar * each}-{last}" if last > bar * each else str(last)
        table.add_row(ranks, f"{old:.2f}", _bar(old / longest, unicode), f"{new:.2f}", _bar(new / longest, unicode))
    return Group("", table, f"each bar: the heaviest of {each} ranks") if each > 1 else Group("", table)


def _heaviest(work: IntArray, each: int) -> Iterator[float]:
    """Returns the work over the mean, of the heaviest rank of every `each` neighbours."""
    mean = max(1, int(work.sum())) / len(work)
    for first in range(0, len(work), each):
        yield float(np.max(work[first : first + each])) / mean


def _bar(share: float, unicode: bool) -> str:
    """Returns a bar of up to `BAR_CHARACTERS`, to an eighth of one where the terminal can draw that."""
    eighths = round(share * BAR_CHARACTERS * 8)
    if not unicode:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _ratio(outcome: Outcome) -> str:
    """Returns bytes over the bound, where there is one."""
    bound = outcome.bound_bytes_total
    if bound is None:
        return "-"
    if bound == 0:
        return "nothing must be sent"
    return f"{outcome.figures.bytes_total / bound:.2f} ({_bytes(bound)})"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _bytes(number: int) -> str:
    """Returns bytes in the unit that leaves few digits."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"
