"""Command `distca plan`: from a file of lengths to text, picture or JSON, with progress on stderr.

Text is readable from 40 columns on. Sentences come first, then tables of the epoch, estimates, choices and the first
step, then a bar for each rank.
"""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from distca_hf.analysis.answer import Assumptions, Choice, EpochFigures, Estimates, PlanAnswer, make_answer
from distca_hf.analysis.epoch import divide_batch, pack_epoch, plan_epoch
from distca_hf.analysis.find_model import find_model
from distca_hf.analysis.first_step import StepReport, make_report
from distca_hf.analysis.groups import UNSHARED
from distca_hf.analysis.memory import USABLE_SHARE, Checkpointing
from distca_hf.analysis.options import PlanOptions
from distca_hf.analysis.profiles.cluster_profile import find_profile, gpu_gib_of
from distca_hf.analysis.request import PlanRequest, pipeline_of
from distca_hf.analysis.tables import (
    CHECKPOINTING,
    PART_NAMES,
    PlanProgress,
    Terminal,
    accumulation,
    block,
    counted,
    in_bytes,
    in_gib,
    in_range,
    in_tiles,
    memory_table,
    of_host,
    plain_table,
    print_blocks,
    print_json,
    ways_table,
)
from distca_hf.arrays import IntArray, ceil_div
from distca_hf.config import OverlongPolicy
from distca_hf.errors import ConfigError
from distca_hf.whole_file import replaced


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distca_hf.analysis.answer import PlanAnswer


def check_can_draw(path: Path) -> None:
    """Checks that a picture can be drawn into a file, before anything is planned.

    Raises:
        ConfigError: matplotlib is missing, it does not support the format, or the folder does not exist.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'distca_hf[report]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(f'.{name}' for name in sorted(formats))}")
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--plot {path} is a folder, or in a folder that does not exist")


def draw_answer(answer: "PlanAnswer", path: Path) -> None:
    """Draws an answer into a file, which appears when it is complete.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = figure_of(answer)
    try:
        with replaced(path, named=True) as unfinished:
            figure.savefig(unfinished, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def figure_of(answer: "PlanAnswer") -> "Figure":
    """Returns a figure of three panels.

    Two show the work of every rank over the mean in the first optimizer step, before and after. The third is a
    histogram of the imbalance of all micro-batches in order.
    """
    from matplotlib.figure import Figure

    report = answer.step
    request, num_ranks = report.request, report.request.num_ranks
    before, after = report.imbalance_before, report.figures.imbalance
    figure = Figure(figsize=(min(16.0, 6.0 + 0.1 * num_ranks), 7.5), layout="constrained")
    in_order, planned, epoch = figure.subplots(3, 1)
    planned.sharex(in_order)
    planned.sharey(in_order)
    for panel, title, work in (
        (in_order, f"documents in order: the busiest rank has {before:.2f} times the mean", report.work_before),
        (planned, f"{request.layout} by distca: {after:.3f} times the mean", report.work),
    ):
        panel.bar(range(num_ranks), work * (num_ranks / max(1, int(work.sum()))), width=0.9)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left", fontsize="medium")
        panel.set_ylabel("work / mean")
        panel.set_xlabel("rank")
        panel.margins(x=0.01)
    epoch.hist(answer.imbalance_before, bins=40)
    spread = answer.epoch.imbalance_before
    epoch.set_title(f"all {answer.epoch.micro_batches:,} micro-batches in order", loc="left", fontsize="medium")
    epoch.set_xlabel(f"busiest rank / mean; {spread.mean:.2f} on average, {spread.worst:.2f} at most")
    epoch.set_ylabel("micro-batches")
    figure.suptitle(
        f"Attention work: {before:.2f} times the mean on the busiest of {num_ranks} ranks, then {after:.2f} times\n"
        f"{request.model.name}, {num_ranks} ranks x {request.tokens_per_rank:,} tokens, first optimizer step",
        x=0.01,
        ha="left",
    )
    return figure


def run_plan(options: PlanOptions, tokens_per_rank: int) -> None:
    """Runs `distca plan`. Prints output at the very end: nothing is printed before an error.

    Raises:
        ConfigError: an option, the model, or the picture's path is wrong.
        PackingError: lengths cannot be read, or do not fit.
    """
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed} must be at least 0")
    shape = find_model(options.model)
    policy = cast(OverlongPolicy, options.overlong)  # the request refuses any other
    stages = pipeline_of(options.pipeline, options.chunks)
    world = options.gpus, tokens_per_rank, options.ranks_per_node, options.micro_steps
    request = PlanRequest(*world, shape, options.layout, policy, options.bytes_limit, stages)
    kept = cast(Checkpointing, options.checkpointing)  # likewise
    gpu_gib = gpu_gib_of(find_profile(options.cluster), options.gpu_gib)
    on_host = options.mlp_tokens, options.attention_kv_heads, options.offload_params, options.host_gib
    assumptions = Assumptions(kept, options.liger, gpu_gib, options.seed, options.cluster, *on_host)
    if shape.size is not None:
        assumptions.simulation(request)  # refuses what cannot be simulated before anything is read
    if options.plot is not None:
        check_can_draw(options.plot)
    progress = PlanProgress()
    with progress.shown():
        documents = progress.read_lengths(options.lengths)
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
        with progress.stage("other numbers of tokens per rank" if stages is None else "simulating the pipeline"):
            answer = make_answer(step, plans, packed, documents.tokens, assumptions, options.compare)
    if options.plot is not None:
        draw_answer(answer, options.plot)
    groups = documents.groups
    if options.as_json:
        print_json({**answer.as_json(), "shared_prefixes": None if groups is None else groups.as_json(UNSHARED)})
    else:
        print_answer(answer, Terminal(), "" if groups is None else groups.in_words(UNSHARED))


# Maximum number of bars. With more ranks, several share a bar, which shows the heaviest of them.
MOST_BARS = 32
# Smallest ratio of step times that counts as faster: runs differ by about this much.
WORTH_IT = 1.02
# Characters next to the two bars of a rank, and range of the length of a bar.
COLUMNS_BESIDE_BARS = 22
FEWEST_BAR_CHARACTERS, MOST_BAR_CHARACTERS = 4, 24
# Ways that are simulated if no others are asked for.
WAYS_OF_SPEED = 3
WAYS_NOTE = (
    "x plain: speed over plain packing. Bytes: the most that a GPU sends or receives in a layer's forward pass. *: "
    "leaves out attention where it cuts documents. `distca simulate` has more figures."
)
# Minimum width of a terminal, in characters, for all columns of the table of choices.
CHOICES_COLUMNS = 60


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
    print_blocks(console, blocks)


def _world(answer: PlanAnswer) -> str:
    """Returns sentences about the documents, the ranks, the model and the way of planning."""
    step, epoch = answer.step, answer.epoch
    request = step.request
    steps = f" x {request.micro_steps} micro-steps" if request.micro_steps > 1 else ""
    if request.pipeline is not None:
        steps += f", in each of {request.pipeline.num_stages} stages of a pipeline ({request.num_gpus:,} GPUs)"
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
    if answer.step.request.pipeline is not None:
        return f"{words} {answer.estimates.simulated.beside_stages()} These are estimates; see below."
    faster, memory = answer.estimates.ours.times_as_fast, answer.estimates.memory["fsdp2"]
    room = answer.estimates.room
    usable = "" if memory.total <= room.gpu_bytes else f", which does not fit: {in_gib(room.gpu_bytes)} GiB are usable"
    usable += room.on_host(memory, answer.step.request.num_gpus)
    if faster * WORTH_IT < 1:
        words += f" Steps take {1 / faster:.2f} times as long as with plain packing, which leaves attention out"
    elif faster < WORTH_IT:
        words += " Steps are about as fast as with plain packing"
    else:
        words += f" Steps are {faster:.2f} times as fast as with plain packing"
    synced = answer.estimates.memory.get("fsdp2_synced")
    also = "" if synced is None else f", {in_gib(synced.total)} if gradients are synced in each micro-step"
    return f"{words}; a GPU needs {in_gib(memory.total)} GiB with FSDP2{also}{usable}. These are estimates; see below."


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
    table.add_row("micro-batches counted", f"{epoch.micro_batches:,}", f"{epoch.planned_micro_batches:,}")
    return block("attention of the busiest rank / mean of all", table)


def _figures(report: StepReport) -> RenderableType:
    """Returns the table of figures of the first optimizer step."""
    table = plain_table("")
    figures = report.figures
    states = "unknown" if figures.state_bytes_max_rank is None else in_bytes(figures.state_bytes_max_rank)
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
        *([("  of states, per mixer: largest rank", states)] if report.request.model.mixer_layers else []),
        ("documents that are cut", f"{report.cut_documents:,}, into {counted(report.shards, 'task')}"),
        ("planning time", f"{1e3 * report.planning_seconds:.1f} ms"),
        ("fingerprint", report.fingerprint),
    ):
        table.add_row(name, value)
    title, origin, steps = "exactly these documents", report.origin, report.request.micro_steps
    if origin is not None:
        batches = counted(origin.epoch_micro_batches, "micro-batch")
        title = f"the first{f' {steps}' if steps > 1 else ''} of {batches} of epoch {origin.epoch}, seed {origin.seed}"
    return block(title, table)


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


def _estimates(answer: PlanAnswer, estimates: Estimates) -> list[RenderableType]:
    """Returns the tables of speed, of all ways to train if they were asked for, and of GiB per rank."""
    request, assumed = answer.step.request, answer.assumptions
    without = "" if request.pipeline is None else f" without a pipeline, on {request.num_gpus:,} GPUs"
    table = plain_table("")
    table.add_row("attention's share of a step", f"{estimates.ours.attention_share:.0%}".replace("%", " %"))
    table.add_row("speed over plain packing", f"{estimates.ours.times_as_fast:.2f} x")
    table.add_row("speed over sorted packs", f"{estimates.over_sorted:.2f} x")
    profile = estimates.costs.profile
    words = (
        f"Simulated like `distca simulate --batches {estimates.ours.steps}`, with times measured on "
        f"{profile.made.device} (--cluster {profile.source}). Packs are made as by TRL (bfd): documents longer than a "
        "pack are cut, and attention across cuts is left out. Sorted packs: equally heavy ones run at the same time."
    )
    blocks = [block(f"speed, simulated{without}", table, words)]
    if len(estimates.simulated.ways) > WAYS_OF_SPEED:
        blocks.append(block("ways to train, simulated", ways_table(estimates.simulated), WAYS_NOTE))
    tiles = in_tiles(assumed.mlp_tokens, assumed.attention_kv_heads)
    words = (
        f"Assumed: all weights trained in fp32 with AdamW, shared by {counted(request.num_gpus, 'rank')}; bf16; "
        f"{CHECKPOINTING[assumed.checkpointing]} (--checkpointing); {'with' if assumed.liger else 'without'} Liger's "
        f"kernels and loss (--liger); {tiles}{USABLE_SHARE:.0%} of {assumed.gpu_gib:g} GiB may "
        "be used (--gpu-gib)."
    ).replace("%", " %")
    words += of_host(estimates.memory, assumed.state_on_host)
    memory = estimates.memory["fsdp2"]
    if not assumed.liger and memory.computed > memory.total / 4:
        words += " Most of it may be logits; with use_liger_kernel=True (--liger) they take no memory."
    size = request.model.size
    if size is not None:
        words += accumulation(size.parameters, request.num_gpus, estimates.simulated.accumulation)
    table = memory_table(estimates.memory, PART_NAMES, estimates.room, request.num_gpus)
    unfit = [f"Does not fit: {estimates.advice}."] if estimates.advice else []
    return [*blocks, block(f"GiB per GPU, estimated{without}", table, words, *unfit)]


def _choices(choices: Sequence[Choice], wide: bool) -> RenderableType:
    """Returns the table of choices, a row for each; a narrow terminal shows fewer figures."""
    table = plain_table("GiB", "fits", "speed", *["longest"] * wide, "too long")
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
        "GiB: per GPU with FSDP2. Speed: over plain packing. "
        + "Longest: the longest document that all ranks together can hold. " * wide
        + "Too long: how many of your documents are longer; training refuses them, unless --overlong says to cut "
        "them."
    )
    return block("tokens per rank", table, words)
