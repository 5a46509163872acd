"""Plan estimates table: speed, memory and other choices, with what they assume."""

from collections.abc import Sequence

from rich.console import RenderableType

from distca_hf.analysis.plan_answer import PlanAnswer
from distca_hf.analysis.plan_choices import Choice
from distca_hf.analysis.plan_estimates import USABLE_SHARE, Estimates
from distca_hf.analysis.plan_text import block, counted, in_gib, plain_table


SHARDING = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}
PARTS = {
    "state": "weights, AdamW: a rank's share",
    "gathered": "weights gathered, gradients",
    "kept": "kept until backward",
    "computed": "a layer or logits",
    "received": "keys of other ranks",
}


# Columns of a terminal in which the table of choices has room for all of its own.
ROOM_FOR_ALL = 60


def estimates_tables(answer: PlanAnswer, columns: int) -> list[RenderableType]:
    """Returns speed, memory, and other numbers of tokens per rank; a sentence where nothing is known of the model.

    Args:
        answer: with or without estimates.
        columns: of the terminal; some figures are left out where it is narrow.
    """
    if answer.estimates is None:
        words = f"{answer.step.request.model.name}: its size is not known, so speed and memory are not estimated."
        return [words, *_choices(answer.choices, columns >= ROOM_FOR_ALL)]
    return [
        _speed(answer.estimates),
        _memory(answer, answer.estimates),
        *_choices(answer.choices, columns >= ROOM_FOR_ALL),
    ]


def _speed(estimates: Estimates) -> RenderableType:
    """Returns attention's share, and how much longer others take."""
    speed = estimates.speed
    table = plain_table("")
    table.add_row("attention's share of a balanced step", f"{speed.attention_share:.0%}".replace("%", " %"))
    table.add_row("faster than documents in order", f"{speed.over_plain:.2f} x")
    table.add_row("faster than sorted packs", f"{speed.over_sorted:.2f} x")
    words = "Sorted packs cut documents at their borders, and leave attention across cuts out."
    return block("speed, estimated", table, words)


def _memory(answer: PlanAnswer, estimates: Estimates) -> RenderableType:
    """Returns GiB of a rank, part by part, for each way to share weights."""
    table = plain_table(*(SHARDING[sharding] for sharding in estimates.memory))
    for part, words in PARTS.items():
        table.add_row(words, *(in_gib(getattr(memory, part)) for memory in estimates.memory.values()))
    table.add_row("most at once", *(in_gib(memory.total) for memory in estimates.memory.values()))
    fits = (memory.total <= estimates.room_bytes for memory in estimates.memory.values())
    table.add_row(f"fits {in_gib(estimates.room_bytes)}", *("yes" if enough else "no" for enough in fits))
    return block("GiB per GPU, estimated", table, _assumptions(answer, estimates))


def _assumptions(answer: PlanAnswer, estimates: Estimates) -> str:
    """Returns what has to be so for the estimates to hold."""
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
    """Returns one row for each number of tokens per rank."""
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
