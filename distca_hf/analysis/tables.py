"""Tables: estimates, other choices and baselines in the terminal, and numbers in few characters.

Tables have no lines and are as narrow as their words, so that they are readable from 40 columns on.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distca_hf.analysis.answer import Choice, PlanAnswer
from distca_hf.analysis.estimates import USABLE_SHARE, Estimates
from distca_hf.analysis.first_step import StepReport
from distca_hf.analysis.memory import GIB


# Names of the ways to shard weights, of parts of memory, and of baselines.
SHARDING = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}
PARTS = {
    "state": "weights, AdamW: a rank's share",
    "gathered": "weights gathered, gradients",
    "kept": "kept until backward",
    "computed": "a layer or logits",
    "received": "keys of other ranks",
}
BASELINES = {
    "greedy": "DistCA paper",
    "zigzag_cp": "ring/zigzag CP",
    "ulysses": "Ulysses",
    "lpt": "whole documents (LPT)",
    "sorted_packs": "sorted packs",
}
COMPARE_NOTE = (
    "DistCA paper: its planner, at a tolerance of 10, 5 and 0 %. CP: context parallelism. In 8s: in groups of 8 "
    "ranks. Whole documents: each to the least loaded rank. Sorted packs: documents cut at packs' borders, equally "
    "heavy packs at the same time. Bytes are those of one layer's forward pass."
)
# Minimum width of a terminal, in characters, for all columns of the table of choices.
CHOICES_COLUMNS = 60
# Minimum width of a terminal, in characters, for all figures of a baseline beside its name.
COMPARE_COLUMNS = 76


def block(title: str, table: Table, *words: str) -> RenderableType:
    """Returns a table between its title and notes, which may be wider than the table."""
    return Group(Text(title, style="bold"), table, *words)


def plain_table(*columns: str) -> Table:
    """Returns a table without lines: names that may wrap, then right-aligned numbers that never do."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    table.add_column("", overflow="fold", min_width=7)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def counted(number: int, thing: str) -> str:
    """Returns a number of things: "1 document", "2,000 documents", "3 micro-batches"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("ch") else "s")


def in_bytes(number: int) -> str:
    """Returns bytes in the unit that leaves few digits."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def in_gib(number: float) -> str:
    """Returns bytes as GiB, without their unit."""
    return f"{number / GIB:,.1f}"


def in_thousands(number: int) -> str:
    """Returns a number of tokens in at most six characters, such as 131.1K."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def in_range(low: int, high: int) -> str:
    """Returns both ends of a range, or one number if they are equal."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def estimates_tables(answer: PlanAnswer, columns: int) -> list[RenderableType]:
    """Returns speed, memory and choices; one sentence in place of estimates if the model's size is not known.

    Args:
        answer: with or without estimates.
        columns: width of the terminal, in characters; a narrow one shows fewer figures.
    """
    if answer.estimates is None:
        words = f"{answer.step.request.model.name}: its size is not known, so speed and memory are not estimated."
        return [words, *_choices(answer.choices, columns >= CHOICES_COLUMNS)]
    return [
        _speed(answer.estimates),
        _memory(answer, answer.estimates),
        *_choices(answer.choices, columns >= CHOICES_COLUMNS),
    ]


def _speed(estimates: Estimates) -> RenderableType:
    """Returns the table of attention's share and of ratios of step times."""
    speed = estimates.speed
    table = plain_table("")
    table.add_row("attention's share of a balanced step", f"{speed.attention_share:.0%}".replace("%", " %"))
    table.add_row("faster than documents in order", f"{speed.over_plain:.2f} x")
    table.add_row("faster than sorted packs", f"{speed.over_sorted:.2f} x")
    words = "Sorted packs cut documents at their borders, and leave attention across cuts out."
    return block("speed, estimated", table, words)


def _memory(answer: PlanAnswer, estimates: Estimates) -> RenderableType:
    """Returns the table of GiB per rank, by part and by way to shard weights."""
    table = plain_table(*(SHARDING[sharding] for sharding in estimates.memory))
    for part, words in PARTS.items():
        table.add_row(words, *(in_gib(getattr(memory, part)) for memory in estimates.memory.values()))
    table.add_row("most at once", *(in_gib(memory.total) for memory in estimates.memory.values()))
    fits = (memory.total <= estimates.room_bytes for memory in estimates.memory.values())
    table.add_row(f"fits {in_gib(estimates.room_bytes)}", *("yes" if enough else "no" for enough in fits))
    return block("GiB per GPU, estimated", table, _assumptions(answer, estimates))


def _assumptions(answer: PlanAnswer, estimates: Estimates) -> str:
    """Returns the assumptions of the estimates, in words."""
    assumed, ranks = answer.assumptions, answer.step.request.num_ranks
    kept = {
        "saved": "layers checkpointed, attention's outputs kept",
        "recomputed": "layers checkpointed, attention computed twice",
        "none": "no activation checkpointing",
    }[assumed.checkpointing]
    words = (
        f"Assumed: all weights trained in fp32 with AdamW, shared by {counted(ranks, 'rank')}; bf16; {kept} "
        f"(--checkpointing); {'with' if assumed.liger else 'without'} Liger's kernels and loss (--liger); speeds of "
        f"an H200 with FlashAttention 4; {USABLE_SHARE:.0%} of {assumed.gpu_gib:g} GiB may be used (--gpu-gib)."
    ).replace("%", " %")
    memory = estimates.memory["fsdp2"]
    if not assumed.liger and memory.computed > memory.total / 4:
        words += " Most of it may be logits: use_liger_kernel=True (--liger) holds none."
    return words


def _choices(choices: Sequence[Choice], wide: bool) -> list[RenderableType]:
    """Returns the table of choices, a row for each; nothing if there are none."""
    if not choices:
        return []
    headers = ("GiB", "fits", "faster", *["longest"] * wide, "too long")
    table = plain_table(*headers)
    for choice in choices:
        needed, faster, too_long = choice.memory_bytes, choice.over_plain, choice.too_long_documents
        table.add_row(
            f"{choice.tokens_per_rank:,}",
            "-" if needed is None else in_gib(needed),
            "-" if choice.fits is None else "yes" if choice.fits else "no",
            "-" if faster is None else f"{faster:.2f} x",
            *[f"{choice.longest_document_tokens:,}"] * wide,
            f"{too_long:,}" if too_long else "-",
        )
    words = (
        "GiB: FSDP2. Faster: than documents in order. "
        + "Longest: document that all ranks together hold. " * wide
        + "Too long: documents of these that are longer than all ranks together hold; training refuses them, "
        "unless --overlong says to cut them."
    )
    return [block("tokens per rank", table, words)]


def compare_table(report: StepReport, columns: int) -> RenderableType:
    """Returns the table of distca and all baselines on the same documents.

    Args:
        report: the first optimizer step.
        columns: width of the terminal, in characters; a narrow one shows fewer figures.
    """
    wide = columns >= COMPARE_COLUMNS
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
    return block("other ways to run the same documents", table, COMPARE_NOTE)


def spoken(name: str) -> str:
    """Returns the full name of a baseline: "DistCA paper, 10 %" for "greedy_0.10"."""
    known = max((short for short in BASELINES if name.startswith(short)), key=len, default=None)
    if known is None:
        return name
    rest = name.removeprefix(known).strip("_")
    if known == "greedy":
        return f"{BASELINES[known]}, {float(rest):.0%}"
    return f"{BASELINES[known]} in {rest}s" if rest else BASELINES[known]
