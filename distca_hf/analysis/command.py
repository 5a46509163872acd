"""Command `distca plan`: from a file of lengths to text or JSON, with progress on stderr.

Text is readable from 40 columns on. Sentences come first, then tables of the epoch, estimates, choices and the first
step, then a bar for each rank.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from distca_hf.analysis import tables
from distca_hf.analysis.answer import Choice, EpochFigures, Estimates, PlanAnswer, make_answer, simulation_request
from distca_hf.analysis.epoch import StepReport, divide_batch, make_report, pack_epoch, plan_epoch
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.groups import UNSHARED
from distca_hf.analysis.lengths import read_lengths
from distca_hf.analysis.memory import USABLE_SHARE
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.analysis.request import PlanRequest, assumed, pipeline_of
from distca_hf.analysis.tables import counted, in_gib
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.config import OverlongPolicy


# Maximum number of bars. With more ranks, several share a bar, which shows the heaviest of them.
MOST_BARS = 32
# Smallest ratio of step times that counts as faster: runs differ by about this much.
WORTH_IT = 1.02
# Characters next to the two bars of a rank, and range of the length of a bar.
COLUMNS_OF_NUMBERS = 22
FEWEST_BAR_CHARACTERS, MOST_BAR_CHARACTERS = 4, 24
# Ways that are simulated if no others are asked for.
WAYS_OF_SPEED = 3
WAYS_NOTE = (
    "x plain: speed over plain packing. Bytes: the most that a GPU sends or receives in a layer's forward pass. *: "
    "leaves out attention where it cuts documents. `distca simulate` has more figures."
)
# Minimum width of a terminal, in characters, for all columns of the table of choices.
CHOICES_COLUMNS = 60


def run_plan(options: PlanOptions, tokens_per_rank: int) -> None:
    """Runs `distca plan`. Prints output at the very end: nothing is printed before an error."""
    shape = find_model(options.model)
    request = PlanRequest(
        *(options.gpus, tokens_per_rank, options.ranks_per_node, options.micro_steps, shape),
        layout=options.layout,
        overlong=cast(OverlongPolicy, options.overlong),  # the request refuses any other
        bytes_limit=options.bytes_limit,
        pipeline=pipeline_of(options.pipeline, options.chunks),
        cluster=options.cluster,
        **assumed(options, find_profile(options.cluster)),
    )
    if shape.size is not None:
        simulation_request(request)  # refuses what cannot be simulated before anything is read
    progress = tables.PlanProgress()
    with progress.shown():
        with progress.stage(f"reading {options.lengths.name}"):
            documents = read_lengths(options.lengths)
        with progress.stage(f"packing {len(documents.tokens):,} documents"):
            if options.lengths_are_batch:
                packed = divide_batch(documents.tokens, request)
            else:
                packed = pack_epoch(documents.tokens, request, options.seed)
        # Planning is timed: the garbage collector must not run in it for objects of imports and reading.
        gc.collect()
        gc.freeze()
        step = make_report(request, packed, documents.source)
        plans = plan_epoch(
            request, packed.document_tokens, packed.epoch, lambda steps: progress.over("planning an epoch", steps)
        )
        with progress.stage(
            "other numbers of tokens per rank" if request.pipeline is None else "simulating the pipeline"
        ):
            answer = make_answer(step, plans, packed, documents.tokens, options.compare)
    groups = documents.groups
    if options.as_json:
        tables.print_json(
            {**answer.as_json(), "shared_prefixes": None if groups is None else groups.as_json(UNSHARED)}
        )
    else:
        print_answer(answer, tables.Terminal(), "" if groups is None else groups.in_words(UNSHARED))


def print_answer(answer: PlanAnswer, console: Console, remark: str = "") -> None:
    """Prints documents with a remark, the answer in two sentences, the epoch, estimates, choices, the first step."""
    model = answer.step.request.model
    blocks: list[RenderableType] = [f"{_world(answer)} {remark}".rstrip(), in_short(answer)]
    if model.other_layers:
        blocks.append(
            f"{model.name} has other layers than full attention: {model.other_layers}. Work and bytes here are "
            "counted in a layer of full attention; speed counts every layer as it is."
        )
    blocks += [f"Limit: {limit}." for limit in model.limits]
    blocks.append(_epoch(answer.epoch, answer.step.request.layout))
    if answer.estimates is None:
        blocks.append(f"{model.name}: its size is not known, so speed and memory are not estimated.")
    else:
        blocks += _estimates(answer, answer.estimates)
    if answer.choices:
        blocks.append(_choices(answer.choices, console.width >= CHOICES_COLUMNS))
    blocks.append(_figures(answer.step))
    blocks.append(_bars(answer.step, console))
    tables.print_blocks(console, blocks)


def _world(answer: PlanAnswer) -> str:
    step, epoch = answer.step, answer.epoch
    request = step.request
    steps = f" x {request.micro_steps} micro-steps" if request.micro_steps > 1 else ""
    if request.pipeline is not None:
        steps += f", in each of {request.pipeline.num_stages} stages of a pipeline ({request.num_gpus:,} GPUs)"
    if step.seed is None:
        packed = "exactly these documents"
    else:
        packed = f"{counted(epoch.micro_batches, 'micro-batch')} in an epoch, seed {step.seed}"
    return (
        f"{step.source}: {counted(epoch.documents, 'document')}, {counted(epoch.tokens, 'token')}, the longest has "
        f"{epoch.longest_document_tokens:,}. {request.model.name} on {counted(request.num_ranks, 'rank')} x "
        f"{counted(request.tokens_per_rank, 'token')}{steps}, {request.ranks_per_node} ranks per node, "
        f"{request.layout} layout: {packed}."
    )


def in_short(answer: PlanAnswer) -> str:
    """Returns the answer in two sentences: the change of balance, then the speed and memory of that."""
    before, after = answer.epoch.imbalance_before.mean, answer.epoch.imbalance.mean
    text = f"In short: the busiest rank has {before:.2f} times the mean attention work, with distca {after:.2f} times."
    if answer.estimates is None:
        return text
    if answer.step.request.pipeline is not None:
        return f"{text} {answer.estimates.simulated.compared_with_stages()} These are estimates; see below."
    faster, memory = answer.estimates.ours.times_as_fast, answer.estimates.memory["fsdp2"]
    room = answer.estimates.room
    usable = "" if memory.total <= room.gpu_bytes else f", which does not fit: {in_gib(room.gpu_bytes)} GiB are usable"
    usable += room.on_host(memory, answer.step.request.num_gpus)
    if faster * WORTH_IT < 1:
        text += f" Steps take {1 / faster:.2f} times as long as with plain packing, which leaves attention out"
    elif faster < WORTH_IT:
        text += " Steps are about as fast as with plain packing"
    else:
        text += f" Steps are {faster:.2f} times as fast as with plain packing"
    synced = answer.estimates.memory.get("fsdp2_synced")
    also = "" if synced is None else f", {in_gib(synced.total)} if gradients are synced in each micro-step"
    return f"{text}; a GPU needs {in_gib(memory.total)} GiB with FSDP2{also}{usable}. These are estimates; see below."


def _epoch(epoch: EpochFigures, layout: str) -> RenderableType:
    table = tables.plain_table("in order", layout)
    before, after = epoch.imbalance_before, epoch.imbalance
    for name, old, new in (
        ("mean over the epoch", before.mean, after.mean),
        ("95 % of micro-batches are below", before.p95, after.p95),
        ("worst micro-batch", before.worst, after.worst),
    ):
        table.add_row(name, f"{old:.3f}", f"{new:.4f}")
    table.add_row("micro-batches counted", f"{epoch.micro_batches:,}", f"{epoch.planned_micro_batches:,}")
    return tables.block("attention of the busiest rank / mean of all", table)


def _figures(report: StepReport) -> RenderableType:
    table = tables.plain_table("")
    figures = report.figures
    fewest, most = figures.tokens_min, figures.tokens_max
    states = "unknown" if figures.state_bytes_max_rank is None else tables.in_bytes(figures.state_bytes_max_rank)
    for name, value in (
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("longest document", f"{report.longest_document_tokens:,} tokens"),
        ("imbalance, documents in order", f"{report.imbalance_before:.3f}"),
        ("imbalance, planned", f"{figures.imbalance:.4f}"),
        ("tokens per rank", f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"),
        ("bytes per layer, forward: total", tables.in_bytes(figures.bytes_total)),
        ("  largest rank", tables.in_bytes(figures.bytes_max_rank)),
        ("  largest rank, between nodes", tables.in_bytes(figures.bytes_internode_max)),
        *([("  of states, per mixer: largest rank", states)] if report.request.model.mixer_layers else []),
        ("documents that are cut", f"{report.cut_documents:,}, into {counted(report.shards, 'task')}"),
        ("planning time", f"{1e3 * report.planning_seconds:.1f} ms"),
        ("fingerprint", report.fingerprint),
    ):
        table.add_row(name, value)
    title, steps = "exactly these documents", report.request.micro_steps
    if report.epoch_micro_batches is not None:
        batches = counted(report.epoch_micro_batches, "micro-batch")
        title = f"the first{f' {steps}' if steps > 1 else ''} of {batches} of epoch 0, seed {report.seed}"
    return tables.block(title, table)


def _bars(report: StepReport, console: Console) -> RenderableType:
    unicode = console.encoding.lower().startswith("utf")
    characters = min(MOST_BAR_CHARACTERS, max(FEWEST_BAR_CHARACTERS, (console.width - COLUMNS_OF_NUMBERS) // 2))
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
    return tables.block("work of each rank / mean", table, *notes)


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


def _estimates(answer: PlanAnswer, estimates: Estimates) -> list[RenderableType]:
    """Returns the tables of speed, of all ways to train if they were asked for, and of GiB per rank."""
    request = answer.step.request
    without = "" if request.pipeline is None else f" without a pipeline, on {request.num_gpus:,} GPUs"
    table = tables.plain_table("")
    table.add_row("attention's share of a step", f"{estimates.ours.attention_share:.0%}".replace("%", " %"))
    table.add_row("speed over plain packing", f"{estimates.ours.times_as_fast:.2f} x")
    table.add_row("speed over sorted packs", f"{estimates.over_sorted:.2f} x")
    profile = estimates.costs.profile
    note = (
        f"Simulated like `distca simulate --batches {estimates.ours.steps}`, with times measured on "
        f"{profile.made.device} (--cluster {profile.source}). Packs are made as by TRL (bfd): documents longer than a "
        "pack are cut, and attention across cuts is left out. Sorted packs: equally heavy ones run at the same time."
    )
    blocks = [tables.block(f"speed, simulated{without}", table, note)]
    if len(estimates.simulated.ways) > WAYS_OF_SPEED:
        blocks.append(tables.block("ways to train, simulated", tables.ways_table(estimates.simulated), WAYS_NOTE))
    tiles = tables.in_tiles(request.mlp_tokens, request.attention_kv_heads)
    note = (
        f"Assumed: all weights trained in fp32 with AdamW, shared by {counted(request.num_gpus, 'rank')}; bf16; "
        f"{tables.CHECKPOINTING[request.checkpointing]} (--checkpointing); {'with' if request.liger else 'without'} "
        f"Liger's kernels and loss (--liger); {tiles}{USABLE_SHARE:.0%} of {request.gpu_gib:g} GiB may "
        "be used (--gpu-gib)."
    ).replace("%", " %")
    note += tables.of_host(estimates.memory, request.state_on_host)
    memory = estimates.memory["fsdp2"]
    if not request.liger and memory.computed > memory.total / 4:
        note += " Most of it may be logits; with use_liger_kernel=True (--liger) they take no memory."
    size = request.model.size
    if size is not None:
        note += tables.accumulation(size.parameters, request.num_gpus, estimates.simulated.accumulation)
    table = tables.memory_table(estimates.memory, tables.PART_NAMES, estimates.room, request.num_gpus)
    unfit = [f"Does not fit: {estimates.advice}."] if estimates.advice else []
    return [*blocks, tables.block(f"GiB per GPU, estimated{without}", table, note, *unfit)]


def _choices(choices: Sequence[Choice], wide: bool) -> RenderableType:
    table = tables.plain_table("GiB", "fits", "speed", *["longest"] * wide, "too long")
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
    note = (
        "GiB: per GPU with FSDP2. Speed: over plain packing. "
        + "Longest: the longest document that all ranks together can hold. " * wide
        + "Too long: how many of your documents are longer; training refuses them, unless --overlong says to cut "
        "them."
    )
    return tables.block("tokens per rank", table, note)
