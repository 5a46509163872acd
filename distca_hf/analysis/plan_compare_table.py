"""Plan compare table: the first optimizer step as other planners and kinds of parallelism would run it."""

from rich.console import RenderableType

from distca_hf.analysis.plan_report import PlanReport
from distca_hf.analysis.plan_text import block, in_bytes, in_thousands, plain_table


# Columns of a terminal in which all figures of a baseline have room beside its name.
ROOM_FOR_ALL = 76
NAMES = {
    "greedy": "DistCA paper",
    "zigzag_cp": "ring/zigzag CP",
    "ulysses": "Ulysses",
    "lpt": "whole documents (LPT)",
    "sorted_packs": "sorted packs",
}
NOTES = (
    "DistCA paper: its planner, at a tolerance of 10, 5 and 0 %. CP: context parallelism. In 8s: in groups of 8 "
    "ranks. Whole documents: each to the least loaded rank. Sorted packs: documents cut at packs' borders, equally "
    "heavy packs at the same time. Bytes are those of one layer's forward pass."
)


def compare_table(report: PlanReport, columns: int) -> RenderableType:
    """Returns one row for each way to run the same documents.

    Args:
        report: the first optimizer step.
        columns: of the terminal; some figures are left out where it is narrow.
    """
    wide = columns >= ROOM_FOR_ALL
    headers = ("tokens", "bytes", "largest rank", "between nodes") if wide else ("largest rank",)
    table = plain_table("imbalance", *headers)
    for name, outcome in (("distca", report.planned), *report.baselines.items()):
        figures = outcome.figures
        largest = in_bytes(figures.bytes_max_rank)
        cells = (
            (
                in_thousands(figures.tokens_max),
                in_bytes(figures.bytes_total),
                largest,
                in_bytes(figures.bytes_internode_max),
            )
            if wide
            else (largest,)
        )
        table.add_row(spoken(name), f"{figures.imbalance:.3f}", *cells)
    return block("other ways to run the same documents", table, NOTES)


def spoken(name: str) -> str:
    """Returns the name that people know of a baseline: "DistCA paper, 10 %" of "greedy_0.10"."""
    known = max((short for short in NAMES if name.startswith(short)), key=len, default=None)
    if known is None:
        return name
    rest = name.removeprefix(known).strip("_")
    if known == "greedy":
        return f"{NAMES[known]}, {float(rest):.0%}"
    return f"{NAMES[known]} in {rest}s" if rest else NAMES[known]
