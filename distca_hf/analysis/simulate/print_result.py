"""Print result: what a simulation found, in the terminal, readable at 80 columns."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from distca_hf.analysis.memory import GIB
from distca_hf.analysis.profiles.cluster_profile import ClusterProfile
from distca_hf.analysis.simulate.result import Result, WayFigures
from distca_hf.analysis.tables import counted, plain_table


def print_results(
    world: str, results: Sequence[Result], profile: ClusterProfile, assumptions: Sequence[str], console: Console
) -> None:
    """Prints what was simulated, the choice and a table for each number of GPUs, a summary, and assumptions."""
    console.print(Text(world))
    for result in results:
        for block in ("", _title(result), Text(result.in_short(), style="bold"), "", _table(result)):
            console.print(block)
        if result.missing:
            console.print(Text(f"Left out: {'; '.join(result.missing)}."))
    if any(not way.whole for result in results for way in result.ways):
        console.print(Text("* cuts documents, and leaves more than 0.5 % of attended pairs out."))
    if len(results) > 1:
        console.print("")
        console.print(_summary(results))
    console.print("")
    console.print(Text(f"Times: {profile_in_words(profile)}"))
    console.print(Text("Assumptions"))
    for line in assumptions:
        console.print(Text(f"- {line}"))


def profile_in_words(profile: ClusterProfile) -> str:
    """Returns origin and date of a profile."""
    made = profile.made
    words = f"{profile.source}, {made.processes} x {made.device}, {made.kernel}, measured {made.date}"
    return f"{words}; {made.remarks}." if made.remarks else f"{words}."


def _title(result: Result) -> RenderableType:
    words = (
        f"{result.gpus} GPUs x {result.of_rank}, {counted(result.accumulation, 'micro-step')}, context "
        f"{result.context_tokens:,}"
    )
    if result.num_stages > 1:
        chunks = f" of {result.chunks} chunks" if result.chunks > 1 else ""
        words += f"; pipeline: {result.num_stages} stages{chunks}"
    return Text(words)


def _table(result: Result) -> Table:
    table = plain_table("step s", "tokens/s/GPU", "MFU", "GiB", "GPU-hours", "x plain")
    for way in sorted(result.ways, key=lambda way: -way.step_seconds):
        table.add_row(*_row(way, result.gpus))
    return table


def _row(way: WayFigures, gpus: int) -> list[str]:
    memory = f"{way.memory_bytes / GIB:.0f}"
    return [
        way.label + ("" if way.whole else " *"),
        f"{way.step_seconds:.2f}",
        f"{way.tokens_per_second / gpus:,.0f}",
        "-" if way.utilisation is None else f"{100 * way.utilisation:.0f} %",
        memory if way.fits else f"{memory} !",
        f"{way.gpu_hours:,.0f}",
        f"{way.times_as_fast:.2f}",
    ]


def _summary(results: Sequence[Result]) -> Table:
    table = plain_table("micro-steps", "plain s", "other s", "distca s", "x plain", "x other")
    for result in results:
        ours, other = result.ours, result.other
        table.add_row(
            f"{result.gpus} GPUs",
            str(result.accumulation),
            f"{result.plain.step_seconds:.2f}",
            "-" if other is None else f"{other.step_seconds:.2f}",
            "-" if ours is None else f"{ours.step_seconds:.2f}",
            "-" if ours is None else f"{ours.times_as_fast:.2f}",
            "-" if result.gain is None else f"{result.gain:.2f}",
        )
    return table
